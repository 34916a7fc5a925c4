"""A command `docker` that makes images of simple Dockerfiles, of this machine's own programs.

    docker image inspect [--format {{json .Config}}] IMAGE     docker cp CONTAINER:FOLDER/. FOLDER
    docker pull IMAGE                                          docker export CONTAINER
    docker build --tag IMAGE FOLDER                            docker rm CONTAINER
    docker create IMAGE COMMAND

It knows FROM, ENV, WORKDIR, COPY, and MANY N (make N files). Containers never run: bubblewrap runs images
that are unpacked. All calls are in the file `calls` of its folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

PROGRAMS = ("bash", "cat", "mkdir", "rm", "sh", "sleep")


def install_docker(folder: Path) -> Path:
    """Write the command below a folder; return its folder for PATH."""
    place = folder / "bin"
    place.mkdir(parents=True)
    command = place / "docker"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} {folder} "$@"\n')
    command.chmod(0o755)
    return place


def calls_of(folder: Path) -> list[list[str]]:
    """Return the arguments of all calls."""
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def base(root: Path) -> None:
    """Make a root with this machine's PROGRAMS and their libraries."""
    for name in ("bin", "lib", "lib64"):
        (root / "usr" / name).mkdir(parents=True)
        os.symlink(f"usr/{name}", root / name)
    (root / "etc").mkdir()
    for name in PROGRAMS:
        program = shutil.which(name, path="/usr/bin:/bin")
        assert program is not None, name
        shutil.copy(program, root / "usr/bin" / name)
        (root / "usr/bin" / name).chmod(0o4755)
        libraries = subprocess.run(
            ["ldd", program], capture_output=True, text=True, check=False
        ).stdout.split()
        for library in (word for word in libraries if word.startswith("/")):
            place = root / "usr" / library.removeprefix("/usr/").lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, place)


def build(root: Path, folder: Path, lines: list[str]) -> dict[str, object]:
    """Follow the lines of a Dockerfile; return the image's settings."""
    base(root)
    variables, workdir = ["PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/root"], "/"
    for line in lines:
        word, *words = line.split()
        if word == "ENV":
            variables += words
        elif word == "WORKDIR":
            workdir = words[0]
            (root / workdir.lstrip("/")).mkdir(parents=True)
        elif word == "COPY":
            for name in words[:-1]:
                shutil.copy(folder / name, root / workdir.lstrip("/") / words[-1])
        elif word == "MANY":
            for number in range(int(words[0])):
                (root / workdir.lstrip("/") / str(number)).touch()
        elif word != "FROM":
            sys.exit(f"unknown instruction: {word}")
    return {"Env": variables, "WorkingDir": workdir}


def main(state: Path, words: list[str]) -> None:
    with (state / "calls").open("a") as calls:
        calls.write(json.dumps(words) + "\n")
    images = state / "images"
    match words:
        case ["image", "inspect", *rest]:
            try:
                print((images / rest[-1].replace("/", "_") / "config").read_text())
            except FileNotFoundError:
                sys.exit("no such image")
        case ["pull", image]:
            _write(images, image, state, ["WORKDIR /srv/pages"])
        case ["build", "--tag", image, folder]:
            _write(images, image, Path(folder), (Path(folder) / "Dockerfile").read_text().splitlines())
        case ["create", image, "true"]:
            print("pulled before\n" + image.replace("/", "_"))
        case ["cp", source, target]:
            container, _, path = source.rpartition(":/")
            shutil.copytree(images / container / "root" / path, target, symlinks=True, dirs_exist_ok=True)
        case ["export", container]:
            subprocess.run(["tar", "-c", "-C", str(images / container / "root"), "."], check=True)
        case ["rm", container]:
            pass
        case _:
            sys.exit(f"unknown command: {words}")


def _write(images: Path, image: str, folder: Path, lines: list[str]) -> None:
    place = images / image.replace("/", "_")
    if not place.exists():
        (place / "root").mkdir(parents=True)
        (place / "config").write_text(json.dumps(build(place / "root", folder, lines)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
