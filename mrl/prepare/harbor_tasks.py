"""Write the rows of a folder of Harbor tasks, and the files that `agent.environment: harbor` reads.

    FOLDER/TASK/                OUT/
      task.toml                   rows.jsonl        instruction, image, times and limits of each task
      instruction.md              tasks/TASK/work   the image's files of the working folder
      environment/Dockerfile      tasks/TASK/tests
      tests/test.sh               roots/IMAGE       root file system of an image (`unpack`)
      solution/solve.sh

Images are built, or pulled if a task names one. A setting of task.toml that is not in `_SETTINGS` is refused
by its name. What else a task needs and a sandbox lacks (the internet, root's rights, services that run on) is
measured: a task is left out unless its solution, in the run's sandboxes, earns more than doing nothing.

Source of the format: https://www.harborframework.com/docs/tasks and the package harbor (0.26.0, Apache-2.0).
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
import logging
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from mrl.agents.adapters.harbor import LOGS, SOLUTION, Harbor, HarborTask
from mrl.agents.sandboxes.providers import KEPT_FILES, KEPT_MIB, TooLarge
from mrl.agents.sandboxes.work_files import matches, read_folder
from mrl.errors import ConfigError, MrlError
from mrl.prepare.arithmetic_rows import write_rows

log = logging.getLogger(__name__)

_NETWORK = {"network_mode", "allowed_hosts"}
_SETTINGS = {
    "agent": {"timeout_sec", "user"} | _NETWORK,
    "environment": {"build_timeout_sec", "docker_image", "os", "cpus", "memory", "memory_mb", "storage"}
    | {"storage_mb", "env", "workdir", "allow_internet"}
    | _NETWORK,
    "verifier": {"timeout_sec", "env", "user", "environment_mode"} | _NETWORK,
    "solution": {"env"},
}
"""Sections of task.toml, and their settings that can be other than empty."""
_OTHERS = {"schema_version", "version", "task", "metadata", "source", "artifacts"}
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml")
_SYSTEM = {"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "logs", "proc", "run", "sbin"} | {
    *("solution", "sys", "tests", "tmp", "usr", "work")
}
"""Folders at the root that cannot be, or contain, a working folder; /usr/src can."""
_BOOTS = 3
"""Most sandboxes that a trajectory opens one after the other."""
_SECONDS = 1200.0
"""The agent's time, if a task names none."""


class TaskRefused(MrlError):
    """A task that cannot be trained on, and why."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """A task's folder, and what its task.toml says of it."""

    folder: Path
    instruction: str
    settings: Mapping[str, Any]

    def section(self, name: str) -> dict[str, Any]:
        return self.settings.get(name, {})


def write_harbor(
    folders: Sequence[str | Path],
    out: str | Path,
    *,
    builder: str = "docker",
    unpack: bool = False,
    unchecked: bool = False,
) -> str:
    """Write the rows and files of all tasks below some folders; return a line about them.

    Args:
        builder: Command line that builds and pulls images: docker or podman. Its containers are the
            sandboxes, unless `unpack` makes folders for bubblewrap of the images.
        unchecked: Do not try the solutions; tasks without one are taken, too, if they need no internet.

    Raises:
        ConfigError: `out` is not empty, or no task is left.
    """
    out = Path(out).absolute()
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {out} is not empty; name a new folder")
    if shutil.which(builder) is None:
        raise ConfigError(f"there is no command {builder}, which builds the tasks' images; install it")
    kind = "bubblewrap" if unpack else builder
    rows, seconds, refused = [], 0.0, 0
    for root in map(Path, folders):
        for place in sorted(path.parent for path in root.rglob("task.toml")):
            name = place.relative_to(root).as_posix() if place != root else place.resolve().name
            files = out / "tasks" / name
            if files.exists():
                raise ConfigError(f"two tasks have the name {name!r}; rename the folder of one")
            try:
                source = read_task(place)
                task = _made(source, name, out, builder, unpack=unpack)
                if not unchecked:
                    _check(source, task, out, kind)
                elif not _is_offline(source):
                    raise TaskRefused("environment.network_mode is not no-network, and sandboxes have none")
            except TaskRefused as error:
                log.warning("%s: left out: %s", place, error)
                shutil.rmtree(files, ignore_errors=True)
                refused += 1
                continue
            rows.append(_row(source, task))
            seconds = max(seconds, (task.agent_seconds or _SECONDS) + 2 * task.verifier_seconds)
    if not rows:
        raise ConfigError(f"{', '.join(map(str, folders))}: no task is left, {refused} are left out")
    write_rows(out / "rows.jsonl", rows)
    return (
        f"{out}: {len(rows)} tasks, {refused} left out; sandbox.kind = {kind}, and agent.run_seconds of at "
        f"least {seconds:g} + {_BOOTS} times sandbox.boot_seconds"
    )


def read_task(folder: Path) -> _Source:
    """Return what a task's folder contains. Raise TaskRefused for what is not supported."""
    try:
        settings = tomllib.loads((folder / "task.toml").read_text("utf-8"))
        instruction = _shown((folder / "instruction.md").read_text("utf-8"))
    except FileNotFoundError as error:
        steps = " (tasks of several steps are not supported)" if (folder / "steps").is_dir() else ""
        raise TaskRefused(f"there is no {Path(error.filename).name}{steps}") from error
    except (OSError, ValueError) as error:
        raise TaskRefused(f"a file cannot be read: {error}") from error
    for name, value in settings.items():
        if name in _SETTINGS:
            if not isinstance(value, dict):
                raise TaskRefused(f"{name} of task.toml is not a section")
            others = [key for key, other in value.items() if other and key not in _SETTINGS[name]]
            if others:
                raise TaskRefused(f"{name}.{others[0]} is not supported")
            for key in value.get("env", {}):
                if "${" in str(value["env"][key]):
                    raise TaskRefused(f"{name}.env.{key} takes a variable of this machine; write its value")
        elif value and name not in _OTHERS:
            raise TaskRefused(f"{name} is not supported")
    environment, verifier = settings.get("environment", {}), settings.get("verifier", {})
    if str(environment.get("os", "linux")).lower() != "linux":
        raise TaskRefused(f"environment.os = {environment['os']!r} is not supported")
    for name in _COMPOSE:
        if (folder / "environment" / name).exists():
            raise TaskRefused(f"environment/{name} is not supported: a task has one container")
    if verifier.get("environment_mode") == "separate":
        for name in (*_COMPOSE, "Dockerfile"):
            if (folder / "tests" / name).exists():
                raise TaskRefused(f"tests/{name} is not supported: the grade has the task's own image")
    if not (folder / "tests/test.sh").is_file():
        raise TaskRefused("there is no tests/test.sh")
    return _Source(folder, instruction, settings)


def _shown(text: str) -> str:
    """Return an instruction without the canary lines at its beginning, which mark data of benchmarks."""
    lines = text.split("\n")
    while lines and "canary" in lines[0].lower() and lines[0].lstrip().startswith(("#", "<!--")):
        lines.pop(0)
    return "\n".join(lines).strip()


def _row(source: _Source, task: HarborTask) -> dict[str, Any]:
    row = {"prompt": [{"role": "user", "content": source.instruction}], "harbor": dataclasses.asdict(task)}
    category = source.section("metadata").get("category")
    return row | ({"tag": category} if isinstance(category, str) and category else {})


def _is_offline(source: _Source) -> bool:
    environment = source.section("environment")
    modes = {
        source.section(name).get("network_mode", "no-network") for name in ("agent", "verifier")
    }  # else the environment's
    default = "no-network" if environment.get("allow_internet") is False else "public"
    return modes | {environment.get("network_mode", default)} == {"no-network"}


def _made(source: _Source, name: str, out: Path, builder: str, *, unpack: bool) -> HarborTask:
    """Write a task's files below the folder of all; return the task."""
    image = _image(source, builder)
    config = json.loads(_output([builder, "image", "inspect", "--format", "{{json .Config}}", image]))
    environment, verifier = source.section("environment"), source.section("verifier")
    workdir = str(environment.get("workdir") or config.get("WorkingDir") or "/")
    parts = PurePosixPath(workdir).parts
    if parts[:1] != ("/",) or len(parts) == 1 or ".." in parts:
        raise TaskRefused(f"the image's working folder is {workdir!r}; name another one (WORKDIR)")
    if parts[1] in _SYSTEM and (parts[:3] != ("/", "usr", "src") or len(parts) == 3):
        raise TaskRefused(f"the working folder {workdir!r} has files that graders run; name another one")
    variables = dict(word.partition("=")[::2] for word in config.get("Env") or [])
    variables.pop("HOME", None)
    try:
        task = HarborTask(
            name=name,
            image=image,
            root=hashlib.sha256(image.encode()).hexdigest()[:16] if unpack else None,
            workdir=workdir,
            keep=_kept(source, PurePosixPath(workdir)),
            env=variables | {key: str(value) for key, value in environment.get("env", {}).items()},
            verifier_env={key: str(value) for key, value in verifier.get("env", {}).items()},
            agent_seconds=_number(source, "agent", "timeout_sec"),
            verifier_seconds=_number(source, "verifier", "timeout_sec") or 600.0,
            cpus=_number(source, "environment", "cpus"),
            memory_mib=_memory_mib(source),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TaskRefused(f"task.toml has a value of another type: {error}") from error
    _copy_files(source, task, out, builder)
    return task


def _number(source: _Source, section: str, name: str) -> float | None:
    value = source.section(section).get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise TaskRefused(f"{section}.{name} = {value!r} is not a number")
    return None if value is None else float(value)


def _memory_mib(source: _Source) -> int | None:
    """Return the limit of memory; the older form is a text such as 2G."""
    environment = source.section("environment")
    older = str(environment.get("memory") or "").strip().upper()
    if older:
        return int(float(older[:-1]) * {"G": 1024, "M": 1, "K": 1 / 1024}.get(older[-1], float("nan")))
    value = environment.get("memory_mb")
    return None if value is None else int(value)


def _kept(source: _Source, workdir: PurePosixPath) -> list[str]:
    """Return the patterns of the files below the working folder that a grade gets: with a separate verifier
    the task's artifacts, else all."""
    if source.section("verifier").get("environment_mode") != "separate":
        return ["*"]
    patterns: list[str] = []
    for entry in source.settings.get("artifacts", []):
        artifact = {"source": entry} if isinstance(entry, str) else dict(entry)
        for name in artifact.keys() - {"source", "destination"}:
            if artifact[name] and (name, artifact[name]) != ("service", "main"):
                raise TaskRefused(f"artifacts.{name} is not supported")
        path = workdir / str(artifact["source"])
        if path.is_relative_to(f"{LOGS}/artifacts"):
            continue
        if not path.is_relative_to(workdir) or ".." in path.parts:
            raise TaskRefused(f"the artifact {str(path)!r} is not below the working folder {str(workdir)!r}")
        inside = glob.escape(path.relative_to(workdir).as_posix())
        patterns += ["*"] if inside == "." else [inside, f"{inside}/*"]
    return patterns


def _image(source: _Source, builder: str) -> str:
    """Build or pull a task's image; return its name."""
    environment, folder = source.section("environment"), source.folder / "environment"
    named = environment.get("docker_image")
    if named:
        present = subprocess.run([builder, "image", "inspect", named], capture_output=True, check=False)
        if present.returncode != 0:
            _output([builder, "pull", named])
        return str(named)
    if not (folder / "Dockerfile").is_file():
        raise TaskRefused("there is neither environment/Dockerfile nor environment.docker_image")
    digest = hashlib.sha256()
    for path, file in sorted(read_folder(folder).items()):
        digest.update(repr((path, file)).encode())
    image = f"mrl-harbor:{digest.hexdigest()[:16]}"
    _output(
        [builder, "build", "--tag", image, str(folder)], _number(source, "environment", "build_timeout_sec")
    )
    return image


def _copy_files(source: _Source, task: HarborTask, out: Path, builder: str) -> None:
    """Write the tests, the image's files of the working folder, and its root if it is to be unpacked."""
    folder, loose = out / "tasks" / task.name, source.folder / "environment"
    work = folder / "work"
    shutil.copytree(source.folder / "tests", folder / "tests", symlinks=True)
    work.mkdir()
    container = _output([builder, "create", task.image, "true"]).split()[-1]
    try:
        _output([builder, "cp", f"{container}:{task.workdir}/.", str(work)])
        if task.root is not None and not (out / "roots" / task.root).exists():
            _unpack(container, out / "roots" / task.root, builder)
    finally:
        subprocess.run([builder, "rm", container], capture_output=True, check=False)
    if loose.is_dir() and not (loose / "Dockerfile").exists():  # Harbor copies them there, too
        shutil.copytree(loose, work, symlinks=True, dirs_exist_ok=True)
    files = read_folder(work)
    sizes = [len(file.data) for path, file in files.items() if matches(path, task.keep)]
    if len(sizes) > KEPT_FILES or sum(sizes) > KEPT_MIB * 2**20:
        raise TaskRefused(
            f"the working folder has {len(sizes)} files of {sum(sizes) >> 20} MiB; at most {KEPT_FILES} and "
            f"{KEPT_MIB} MiB reach a grade (name the task's artifacts, with a separate verifier)"
        )


def _unpack(container: str, root: Path, builder: str) -> None:
    """Write a container's root file system; its programs get nobody else's rights on this machine."""
    root.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent) as private:
        part = Path(private, "root")
        part.mkdir()
        with subprocess.Popen([builder, "export", container], stdout=subprocess.PIPE) as export:
            tar = subprocess.run(["tar", "-x", "-C", str(part)], stdin=export.stdout, check=False)
        if export.returncode or tar.returncode:
            raise TaskRefused(f"{builder} export {container} failed, or tar could not unpack it")
        _output(["chmod", "-R", "u-s,g-s", str(part)])
        if (part / "etc").is_dir() and not (part / "etc").is_symlink():  # a container gets it at its start
            (part / "etc/hosts").unlink(missing_ok=True)
            (part / "etc/hosts").write_text("127.0.0.1 localhost\n")
        part.rename(root)


def _check(source: _Source, task: HarborTask, out: Path, kind: str) -> None:
    """Raise TaskRefused unless the task's solution earns more here than doing nothing."""
    solution = source.folder / "solution"
    if not (solution / "solve.sh").is_file():
        raise TaskRefused("there is no solution/solve.sh to check the task with (--unchecked takes it)")
    files = read_folder(solution)
    files["solve.sh"] = dataclasses.replace(files["solve.sh"], is_executable=True)
    env = {key: str(value) for key, value in source.section("solution").get("env", {}).items()}
    program = Harbor(str(out), [], sandbox={"kind": kind})
    untouched, why = program.verify(task)
    if untouched is None:
        raise TaskRefused(f"the verifier gives no reward: {why}")
    try:
        seconds = task.agent_seconds or _SECONDS
        done, kept, logs = program.work(task, [f"{SOLUTION}/solve.sh"], seconds, files=files, env=env)
    except TooLarge as error:
        raise TaskRefused(f"the solution leaves too much: {error}") from error
    reward, why = program.verify(task, kept, logs)
    if reward is None or reward <= untouched:
        raise TaskRefused(
            f"the solution's reward is {reward}, {untouched:g} without it (the solution: {done}; {why})"
        )
    log.info("%s: reward %g, %g without the solution", task.name, reward, untouched)


def _output(words: Sequence[str], seconds: float | None = None) -> str:
    """Return the output of a command line. Raise TaskRefused if it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=True)
    except subprocess.TimeoutExpired as error:
        raise TaskRefused(f"{' '.join(words[:3])} did not end within {seconds:g} s") from error
    except subprocess.CalledProcessError as error:
        raise TaskRefused(f"{' '.join(words)} failed: {error.stderr.strip()[-500:]!a}") from error
    return done.stdout
