"""Containers of docker and podman: arguments, files, the relay, and real ones where they run.

MRL_CONTAINERS="podman IMAGE ARGUMENT..." names a command line, an image with Python, and further arguments.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.agents.environment import Model, SandboxLost
from mrl.agents.sandboxes import containers
from mrl.agents.sandboxes.command_wait import CommandOutput, wait_for_command
from mrl.agents.sandboxes.containers import (
    ContainerSandbox,
    Docker,
    TimedStream,
    container_arguments,
    exec_arguments,
    read_tar,
)
from mrl.agents.sandboxes.providers import Sandbox, SandboxLimits, TooLarge, model_variables, open_sandbox
from mrl.agents.sandboxes.work_files import WorkFile
from mrl.errors import ConfigError
from tests.support.sandbox_probes import LIMITS, REACHED, answering, guarded, probe

SECONDS = 120.0
REAL = os.environ.get("MRL_CONTAINERS", "").split()


@pytest.mark.parametrize("cli", ["docker", "podman"])
def test_arguments_of_a_container(cli: str) -> None:
    limits = SandboxLimits(memory_mib=512, disk_mib=64, processes=20, cpus=1.5)
    words = container_arguments(
        cli, "name", "an/image:1", {"/here": "/inside"}, limits, ["--runtime", "runsc"], ["/app"]
    )
    pairs = set(itertools.pairwise(words))
    assert words[:2] == [cli, "run"] and words[-4:-1] == ["sh", "an/image:1", "-c"]
    assert pairs >= {
        ("--network", "none"),
        ("--cap-drop", "ALL"),
        ("--security-opt", "no-new-privileges"),
        ("--cap-add", "KILL"),
        ("--memory", "576m"),
        ("--cpus", "1.5"),
        ("--pids-limit", "28"),
        ("--volume", "/here:/inside:ro"),
        ("--runtime", "runsc"),
        ("--entrypoint", "sh"),
    }
    disk = "rw,exec,nosuid,nodev,mode=1777,size=64m" + (",nr_inodes=8192" if cli == "docker" else "")
    assert pairs >= {("--tmpfs", f"{folder}:{disk}") for folder in ("/work", "/tmp", "/app")}
    assert ("--shm-size", "64m") in pairs
    assert {"--rm", "--interactive", "--read-only"} <= set(words)
    assert ("--read-only-tmpfs=false" in words) == (cli == "podman")
    assert not {"--privileged", "--detach", "--pid", "--ipc", "--init"} & set(words)


def test_secrets_are_no_arguments() -> None:
    words = exec_arguments("docker", "name", ["a", "b"], {"OPENAI_API_KEY": "secret", "HOME": "/tmp"})
    assert words == [
        *("docker", "exec", "--user", "65534:65534", "--workdir", "/work"),
        *("--env", "OPENAI_API_KEY", "--env", "HOME=/tmp", "name", "a", "b"),
    ]


def test_only_regular_files_leave_an_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "a/b": WorkFile(b"1", is_executable=True),
        "c": WorkFile(b"2"),
        "folder": WorkFile(kind="folder"),
        "link": WorkFile(b"/etc/passwd", kind="link"),
    }
    archive = containers._tar(files)
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        assert [member.name for member in members] == list(files)
    assert files_of(archive) == {name: files[name] for name in ("a/b", "c")}
    assert files_of(archive, "a/*").keys() == {"a/b"}
    monkeypatch.setattr(containers, "KEPT_FILES", 1)
    with pytest.raises(TooLarge):
        files_of(archive)
    monkeypatch.setattr(containers, "KEPT_MIB", 1)
    with pytest.raises(TooLarge):
        files_of(containers._tar({"large": WorkFile(bytes(2**20 + 1))}))


def test_an_archive_that_ends_early_is_no_smaller_one() -> None:
    archive = containers._tar({"a": WorkFile(b"1"), "b": WorkFile(b"2")})
    assert len(files_of(archive)) == 2
    for size in (0, 100, 1024, 1100, 1536, 2048):  # 1024: between the members; 2048: before the end's zeros
        with pytest.raises(tarfile.ReadError):
            files_of(archive[:size], "a")


def test_a_file_with_holes_is_not_read() -> None:
    """Its zeros would arrive for years."""
    member = tarfile.TarInfo("holes")
    member.size = 2**60
    with pytest.raises(TooLarge, match="holes"):
        files_of(member.tobuf(), "other")


def test_every_wait_for_a_container_has_a_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Here, no command about a container ends."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "docker").write_text('#!/bin/sh\n[ "$1" != run ] && exec sleep 600\necho; exec cat\n')
    (tmp_path / "docker").chmod(0o755)
    with Docker().open(image="x", mounts={}, limits=LIMITS, model=None) as sandbox:  # and its close
        sandbox._limits = dataclasses.replace(LIMITS, boot_seconds=0.2)
        with pytest.raises(SandboxLost, match=r"cannot be read: they did not arrive within 0\.2 s"):
            sandbox.read(["*"])
        with pytest.raises(SandboxLost, match="did not answer"):
            sandbox.write({"a": WorkFile(b"1")})
        with pytest.raises(SandboxLost, match="did not answer"):
            sandbox.run(["true"], seconds=SECONDS)
        with pytest.raises(SandboxLost, match=r"docker inspect did not end within 0\.2 s"):
            sandbox._was_out_of_memory()


@pytest.mark.parametrize(("code", "status"), [("exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_a_relay_gives_the_door_an_address(code: str, status: int, tmp_path: Path) -> None:
    """The relay runs here, on a port of this machine instead of a container's."""
    ask = f"""
import sys, urllib.request
answer = urllib.request.urlopen(f"http://127.0.0.1:{{sys.argv[1]}}/", b"x" * 3_000_000).read()
print(len(answer), flush=True)
{code}
"""
    with answering() as model:
        door, port = containers._door(tmp_path, model), free_port()
        words = ["-c", containers._RELAY, str(tmp_path / "door/socket"), port]
        with subprocess.Popen(
            [sys.executable, *words, sys.executable, "-c", ask, port],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            assert process.stdout is not None
            output = CommandOutput(process.stdout.fileno(), 1000)
            assert not wait_for_command(process, output, seconds=SECONDS, door=door, kill=process.kill)
        door.close()
        assert (process.returncode, output.text()) == (status, "3000000\n")


def test_what_is_missing_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs sandbox\.image"):
        Docker().open(image=None, mounts={}, limits=LIMITS, model=None)
    with pytest.raises(ConfigError, match="is not the name of an image"):
        Docker().open(image="-v/:/host", mounts={}, limits=LIMITS, model=None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no command docker"):
        Docker().open(image="x", mounts={}, limits=LIMITS, model=None)
    (tmp_path / "docker").write_text("#!/bin/sh\necho no daemon here >&2; exit 1\n")
    (tmp_path / "docker").chmod(0o755)
    with pytest.raises(SandboxLost, match=r"did not boot.*no daemon here"):
        Docker().open(image="x", mounts={}, limits=LIMITS, model=None)


def files_of(archive: bytes, pattern: str = "*") -> dict[str, WorkFile]:
    with tempfile.TemporaryFile() as file:
        file.write(archive)
        file.seek(0)
        return read_tar(TimedStream(file.fileno(), SECONDS), [pattern], most_bytes=2**30)


def opened(model: Model | None = None) -> Sandbox:
    return open_sandbox(REAL[0], image=REAL[1], limits=LIMITS, model=model, options={"arguments": REAL[2:]})


real = pytest.mark.skipif(not REAL, reason="MRL_CONTAINERS names no command line that runs here")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with answering() as model, opened(model) as sandbox:
        yield sandbox


@real
@pytest.mark.parametrize(
    "name",
    [
        "files of the host",
        "memory and files by other processes",
        "secrets in the environment",
        "sockets of the host",
        "the network",
        "more processes than the limit",
        "more disk than the limit",
    ],
)
def test_nothing_outside_a_real_container_is_reached(name: str, sandbox: Sandbox) -> None:
    with guarded() as complete:
        text = complete(REACHED[name]).replace(", '/var', '/run'", "")  # the image has these
        if name == "more disk than the limit":  # /work, /tmp and /dev/shm have the limit each
            text = text.replace("if total > DISK +", "if total > 3 * DISK +").partition("count = 0")[0]
        done = probe(sandbox, text)
    assert (done.status, done.output) == (0, "")


@real
def test_a_real_container(sandbox: Sandbox) -> None:
    code = """
import os, urllib.request
print(len(urllib.request.urlopen(os.environ["OPENAI_BASE_URL"], b"x" * 9).read()))
"""
    done = sandbox.run(["python3", "-c", code], seconds=SECONDS, env=model_variables(sandbox))
    assert (done.status, done.output) == (0, "9\n")
    assert sandbox.run(["sh", "-c", "sleep 600 & (setsid sleep 600 &); exit 7"], seconds=SECONDS).status == 7
    sleeping = """
import glob
lines = [open(place, "rb").read() for place in glob.glob("/proc/[0-9]*/cmdline")]
print([line for line in lines if line.startswith(b"sleep\\0" + b"600")])
"""
    assert sandbox.run(["python3", "-c", sleeping], seconds=SECONDS).output == "[]\n"
    done = sandbox.run(["sleep", "600"], seconds=1.0)
    assert done.timed_out and done.status == 137
    bomb = """
import os, time
while True:
    try:
        if os.fork() == 0: time.sleep(600)
    except OSError: time.sleep(0.01)
"""
    for _ in range(3):  # no room for a further process
        assert probe(sandbox, bomb, seconds=1.0).timed_out
    assert probe(sandbox, "x = bytearray(2**30)").status == 137
    assert probe(sandbox, "import os; os.symlink('/etc/passwd', 'l'); os.mkfifo('f')").status == 0
    assert {"probe.py"} == set(sandbox.read(["*"])) - {"fill"}
    with pytest.raises(SandboxLost, match="no-such-command"):
        sandbox.run(["no-such-command"], seconds=SECONDS)
    with pytest.raises(TooLarge):
        sandbox.write({"large": WorkFile(bytes(LIMITS.disk_mib * 2**20 + 1))})


@real
def test_nothing_of_a_real_container_remains() -> None:
    """Neither after its close, nor after its own end, nor after the death of its owner."""
    before = containers_of(os.getpid())
    with opened() as sandbox:
        assert containers_of(os.getpid()) == before + 1
        assert isinstance(sandbox, ContainerSandbox)
        subprocess.run([REAL[0], "kill", sandbox._name], check=True, capture_output=True)
        with pytest.raises(SandboxLost):
            sandbox.run(["true"], seconds=SECONDS)
    assert containers_of(os.getpid()) == before
    code = (
        "from tests.mrl.agents.test_containers import opened\n"
        "sandbox = opened(); print('open', flush=True); sandbox.run(['sleep', '600'], seconds=600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"open\n"
        assert containers_of(process.pid) == 1
        process.kill()
    deadline = time.monotonic() + SECONDS
    while containers_of(process.pid):
        assert time.monotonic() < deadline


def containers_of(pid: int) -> int:
    names = [REAL[0], "ps", "--all", "--filter", f"name=mrl-{pid}-", "--format", "{{.Names}}"]
    return len(subprocess.run(names, capture_output=True, text=True, check=True).stdout.split())


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return str(one.getsockname()[1])
