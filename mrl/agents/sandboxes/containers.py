"""Sandboxes that docker or podman make, by their command lines.

A sandbox is a container without network, whose first process reads this process's pipe: it ends with it, and
the container is removed then. At a command's end that process kills all others, without starting one, which a
full container would not allow. The model's door is a mounted unix socket; a few lines of Python, which the
image must have, give it an address inside.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import select
import shutil
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, ClassVar, cast

from mrl.agents.environment import Model, SandboxLost
from mrl.agents.sandboxes.command_wait import CommandOutput, wait_for_command
from mrl.agents.sandboxes.door import Door
from mrl.agents.sandboxes.providers import (
    KEPT_FILES,
    KEPT_MIB,
    OUTPUT_BYTES,
    TMP,
    WORK,
    Exit,
    Sandbox,
    SandboxLimits,
    TooLarge,
)
from mrl.agents.sandboxes.work_files import WorkFile, matches
from mrl.errors import ConfigError

_MIB = 2**20
_USER = "65534:65534"
"""User of commands, who has no capabilities. The first process is root's and has CAP_KILL alone."""
_IDLE = "sleep 2147483647 &"
_HOLDER = f"echo; {_IDLE} while read line; do kill -9 -1; wait; sleep 0; {_IDLE} echo; done"
"""Program of the first process: for each line, kill all others and reap them. The idle process is the child
whose end gives `sleep 0` a place; while the shell waits for that one, it reaps all others."""
_DOOR, _PORT = "/run/mrl-door", 28765
_STARTED = "mrl: started\n"
"""First line of a command's output, before the command can write. Without it the container is at fault."""
_CLI_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR", "XDG_", "DOCKER_", "CONTAINER", "PODMAN_")
"""Prefixes of variables that the command line needs itself; a command's values of them are arguments."""
_BYTES_PER_INODE = 8192
_NUMBERS = itertools.count()
_RELAY = """
import os, socket, sys, threading
def copy(source, target):
    try:
        while True:
            data = source.recv(65536)
            if not data: break
            target.sendall(data)
    except OSError: pass
    try: target.shutdown(socket.SHUT_WR)
    except OSError: pass
def serve():
    while True:
        inside = listener.accept()[0]
        outside = socket.socket(socket.AF_UNIX)
        outside.connect(sys.argv[1])
        for pair in ((inside, outside), (outside, inside)):
            threading.Thread(target=copy, args=pair, daemon=True).start()
listener = socket.create_server(("127.0.0.1", int(sys.argv[2])))
child = os.fork()
if child == 0:
    listener.close()
    os.execvp(sys.argv[3], sys.argv[3:])
threading.Thread(target=serve, daemon=True).start()
status = os.waitpid(child, 0)[1]
os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
"""
"""Serve the door's socket at a port of the loopback while a command runs; exit as it does."""


class Docker:
    """Provider of containers by `docker`."""

    cli: ClassVar[str] = "docker"

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        """`arguments`: further ones of `run`, such as [--runtime, runsc]."""
        self._arguments = tuple(arguments)

    def open(
        self,
        *,
        image: str | None,
        mounts: Mapping[str, str],
        limits: SandboxLimits,
        model: Model | None,
        folders: Sequence[str] = (),
    ) -> ContainerSandbox:
        """Open a sandbox. Raises SandboxLost, or ConfigError."""
        if image is None:
            raise ConfigError(f"sandbox.kind = {self.cli} needs sandbox.image, the name of an image")
        if image.startswith("-"):  # the command line would take it for an option
            raise ConfigError(f"sandbox.image = {image!r} is not the name of an image")
        if shutil.which(self.cli) is None:
            raise ConfigError(f"sandbox.kind = {self.cli}, but there is no command {self.cli}; install it")
        return ContainerSandbox(self.cli, image, mounts, limits, model, self._arguments, folders)


class Podman(Docker):
    """Provider of containers by `podman`."""

    cli: ClassVar[str] = "podman"


class ContainerSandbox(Sandbox):
    """An open sandbox (`providers.Sandbox`)."""

    def __init__(
        self,
        cli: str,
        image: str,
        mounts: Mapping[str, str],
        limits: SandboxLimits,
        model: Model | None,
        arguments: Sequence[str],
        folders: Sequence[str] = (),
    ) -> None:
        self._cli, self._limits = cli, limits
        self._name = f"mrl-{os.getpid()}-{next(_NUMBERS)}-{os.urandom(4).hex()}"
        self._known: set[str] = set()
        """Commands that it has."""
        self._stack = contextlib.ExitStack()
        try:
            self._door = self._model = None
            if model is not None:
                folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="mrl-door-"))
                self._door = _door(Path(folder), model)
                self._stack.callback(self._door.close)
                self._model = Model(f"http://127.0.0.1:{_PORT}", model.key, model.name)
                mounts = {**mounts, f"{folder}/door": _DOOR}
            words = container_arguments(cli, self._name, image, mounts, limits, arguments, folders)
            self._boot(words)
        except BaseException:
            self._stack.close()
            raise

    @property
    def model(self) -> Model | None:
        return self._model

    def describe(self) -> str:
        """Return one line for the log: the boundary, and the limits that apply."""
        return f"{self._cli}: container without network and capabilities, read-only root, cgroup limits"

    def close(self) -> None:
        """End all its processes and remove its files."""
        self._stack.close()

    def run(self, command: Sequence[str], *, seconds: float, env: Mapping[str, str] | None = None) -> Exit:
        """Run a command in WORK to its end, and end all processes that it leaves."""
        words = list(command)
        if self._model is not None:
            words = ["python3", "-c", _RELAY, f"{_DOOR}/socket", str(_PORT), *words]
        for name in {command[0], words[0]} - self._known:
            if self._executed(["sh", "-c", 'command -v -- "$1"', "sh", name])[0] != 0:
                raise SandboxLost(f"the container has no command {name!r}")
            self._known.add(name)
        began = time.monotonic()
        words = ["sh", "-c", f"printf '{_STARTED.strip()}\\n'; exec \"$@\"", "sh", *words]
        process = self._start(words, {"HOME": TMP, "LANG": "C.UTF-8"} | dict(env or {}), subprocess.DEVNULL)
        with process, contextlib.ExitStack() as stack:
            stack.callback(process.kill)
            assert process.stdout is not None
            output = CommandOutput(process.stdout.fileno(), OUTPUT_BYTES, head_bytes=len(_STARTED))

            def kill() -> None:
                self._kill_all()
                process.kill()
                process.wait()

            timed_out = wait_for_command(process, output, seconds=seconds, door=self._door, kill=kill)
        if output.head != _STARTED.encode():
            raise SandboxLost(f"the container could not run a command: {output.text()[-300:]!a}")
        self._kill_all()
        return Exit(
            137 if timed_out or process.returncode < 0 else process.returncode,
            time.monotonic() - began,
            output.text().removeprefix(_STARTED),
            timed_out=timed_out,
            out_of_memory=process.returncode != 0 and self._was_out_of_memory(),
        )

    def write(self, files: Mapping[str, WorkFile], folder: str = WORK) -> None:
        """Write files by their paths below a folder; replace what is there. Raises TooLarge."""
        status, output = self._executed(["tar", "-x", "-f", "-", "-C", folder], _tar(files))
        if status != 0:
            self._was_out_of_memory()
            raise TooLarge(f"{len(files)} files cannot be written: {output[-300:]!a}")

    def read(self, patterns: Sequence[str], folder: str = WORK) -> dict[str, WorkFile]:
        """Return the matching regular files below a folder. Raises TooLarge."""
        words = ["tar", "-c", "-f", "-", "-C", folder, "."]
        with self._start(words, {}, subprocess.DEVNULL, quiet=True) as process:
            try:
                assert process.stdout is not None
                stream = TimedStream(process.stdout.fileno(), self._limits.boot_seconds)
                return read_tar(stream, patterns, most_bytes=self._limits.disk_mib * _MIB)
            except (tarfile.TarError, TimeoutError) as error:
                raise SandboxLost(f"files of the container cannot be read: {error}") from error
            finally:
                process.kill()

    def _boot(self, words: Sequence[str]) -> None:
        errors = os.memfd_create("mrl")
        self._stack.callback(os.close, errors)
        try:
            holder = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            )
        except OSError as error:
            raise SandboxLost(f"the container cannot boot: {error}") from error
        self._stack.callback(self._remove, holder)
        assert holder.stdin is not None and holder.stdout is not None
        self._lines, self._answers = holder.stdin, holder.stdout
        if not self._is_answered():
            reason = os.pread(errors, 1 << 16, 0)[-300:].decode("utf-8", "replace").strip()
            raise SandboxLost(
                f"the container did not boot within {self._limits.boot_seconds:g} s "
                f"(sandbox.boot_seconds): {reason!a}"
            )

    def _is_answered(self) -> bool:
        """Return True if the first process writes a line in time."""
        ready = select.select([self._answers], [], [], self._limits.boot_seconds)[0]
        return bool(ready) and os.read(self._answers.fileno(), 1) == b"\n"

    def _remove(self, holder: subprocess.Popen[bytes]) -> None:
        for words in (["kill"], ["rm", "--force"]):  # podman waits before it kills, if only `rm` is called
            with contextlib.suppress(SandboxLost):  # it is removed, too, once its first process has ended
                self._managed(*words)
        holder.kill()
        holder.wait()
        for stream in (holder.stdin, holder.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _managed(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the command line about this container. Raises SandboxLost if it does not end."""
        try:
            return subprocess.run(
                [self._cli, *words, self._name],
                capture_output=True,
                text=True,
                check=False,
                timeout=self._limits.boot_seconds,
            )
        except subprocess.TimeoutExpired as error:
            raise SandboxLost(f"{self._cli} {words[0]} did not end within {error.timeout:g} s") from error

    def _start(
        self, words: Sequence[str], env: Mapping[str, str], stdin: int, *, quiet: bool = False
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            exec_arguments(self._cli, self._name, words, env, reads=stdin == subprocess.PIPE),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else subprocess.STDOUT,
            env={**os.environ, **{name: v for name, v in env.items() if not _is_for_cli(name)}},
            start_new_session=True,
        )

    def _executed(self, words: Sequence[str], data: bytes | None = None) -> tuple[int, str]:
        """Return the status and the output of a short command of ours."""
        stdin = subprocess.DEVNULL if data is None else subprocess.PIPE
        with self._start(words, {}, stdin) as process:
            try:
                output, _ = process.communicate(data, timeout=self._limits.boot_seconds)
            except subprocess.TimeoutExpired as error:
                process.kill()
                raise SandboxLost(f"the container did not answer within {error.timeout:g} s") from error
        return process.returncode, output.decode("utf-8", "replace")

    def _kill_all(self) -> None:
        """Kill all processes of commands, and wait until others can start. Raises SandboxLost."""
        deadline = time.monotonic() + self._limits.boot_seconds
        with contextlib.suppress(BrokenPipeError):
            self._lines.write(b"\n")
            self._lines.flush()
        if not self._is_answered():
            raise SandboxLost("the container's first process has ended")
        while self._executed(["true"])[0] != 0:
            if time.monotonic() > deadline:
                raise SandboxLost("the container takes no more commands")

    def _was_out_of_memory(self) -> bool:
        """Return True if the kernel killed one of its processes for memory. Raises SandboxLost if it has
        ended."""
        state = self._managed("inspect", "--format", "{{.State.Running}} {{.State.OOMKilled}}")
        if not state.stdout.startswith("true"):
            raise SandboxLost(f"the container ended: {(state.stdout + state.stderr)[-300:]!a}")
        return state.stdout.split()[1:] == ["true"]


def container_arguments(
    cli: str,
    name: str,
    image: str,
    mounts: Mapping[str, str],
    limits: SandboxLimits,
    arguments: Sequence[str] = (),
    folders: Sequence[str] = (),
) -> list[str]:
    """Return the command that runs a container until its standard input ends."""
    disk = f"rw,exec,nosuid,nodev,mode=1777,size={limits.disk_mib}m"
    if cli == "docker":  # podman has no such option; its cgroup counts inodes as memory
        disk += f",nr_inodes={limits.disk_mib * _MIB // _BYTES_PER_INODE}"
    return [
        *(cli, "run", "--rm", "--interactive", "--name", name, "--label", "mrl=sandbox"),
        *("--network", "none", "--read-only", "--cap-drop", "ALL"),
        *(["--read-only-tmpfs=false"] if cli == "podman" else []),  # else /run and /var/tmp are writable
        *("--security-opt", "no-new-privileges", "--cap-add", "KILL", "--user", "0:0", "--workdir", WORK),
        *("--memory", f"{limits.memory_mib + limits.disk_mib}m", "--cpus", f"{limits.cpus:g}"),
        *("--pids-limit", str(limits.processes + 8)),
        *("--ulimit", "nofile=1024:1024", "--ulimit", "core=0:0"),
        *(word for folder in (WORK, TMP, *folders) for word in ("--tmpfs", f"{folder}:{disk}")),
        *("--shm-size", f"{limits.disk_mib}m"),
        *(word for here, inside in mounts.items() for word in ("--volume", f"{here}:{inside}:ro")),
        *arguments,
        *("--entrypoint", "sh", image, "-c", _HOLDER),
    ]


def exec_arguments(
    cli: str, name: str, words: Sequence[str], env: Mapping[str, str], *, reads: bool = False
) -> list[str]:
    """Return the command that executes another one in a container. Values of variables come by its own
    environment, which other users cannot read, except those that it needs itself."""
    return [
        *(cli, "exec", *(["--interactive"] if reads else []), "--user", _USER, "--workdir", WORK),
        *(
            word
            for variable, value in env.items()
            for word in ("--env", f"{variable}={value}" if _is_for_cli(variable) else variable)
        ),
        *(name, *words),
    ]


class TimedStream:
    """Bytes of a pipe, until a deadline."""

    def __init__(self, descriptor: int, seconds: float) -> None:
        self._descriptor, self._seconds = descriptor, seconds
        self._deadline = time.monotonic() + seconds
        self.position = 0
        """Number of bytes that were read."""

    def read(self, size: int) -> bytes:
        """Return some bytes, and none at the end. Raises TimeoutError."""
        left = self._deadline - time.monotonic()
        if left <= 0 or not select.select([self._descriptor], [], [], left)[0]:
            raise TimeoutError(f"they did not arrive within {self._seconds:g} s (sandbox.boot_seconds)")
        data = os.read(self._descriptor, size)
        self.position += len(data)
        return data


def read_tar(stream: TimedStream, patterns: Sequence[str], *, most_bytes: int) -> dict[str, WorkFile]:
    """Return the matching regular files of an archive that arrives.

    Args:
        most_bytes: All files of the archive together; a file with holes can be larger than any disk.

    Raises:
        TooLarge: Its files are more or larger than that, or than what is kept.
        TarError: It is not complete.
        TimeoutError: It did not arrive in time.
    """
    files: dict[str, WorkFile] = {}
    left = KEPT_MIB * _MIB
    with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r|") as archive:
        for member in archive:
            most_bytes -= member.size
            if most_bytes < 0:
                raise TooLarge(f"the files are larger than the disk: {member.name!a} has {member.size} bytes")
            path = member.name.removeprefix("./")
            if not member.isreg() or not matches(path, patterns):
                continue
            left -= member.size
            if left < 0 or len(files) == KEPT_FILES:
                raise TooLarge(f"the files to keep are more than {KEPT_FILES} or {KEPT_MIB} MiB")
            content = archive.extractfile(member)
            assert content is not None, "it is a regular file"
            files[path] = WorkFile(content.read(), bool(member.mode & 0o100))
        # tarfile takes an end between two members for the archive's, which has a block of zeros.
        if stream.position < archive.offset + tarfile.BLOCKSIZE:
            raise tarfile.ReadError("the archive is not complete")
    return files


def _tar(files: Mapping[str, WorkFile]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for path, file in files.items():
            member = tarfile.TarInfo(path)
            member.mode = 0o755 if file.is_executable or file.kind == "folder" else 0o644
            if file.kind == "folder":
                member.type = tarfile.DIRTYPE
            elif file.kind == "link":
                member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(file.data)
            else:
                member.size = len(file.data)
            archive.addfile(member, io.BytesIO(file.data))
    return stream.getvalue()


def _door(folder: Path, model: Model) -> Door:
    """Return a door whose socket is in a folder that only this user and the container can reach."""
    place = folder / "door"
    place.mkdir()
    place.chmod(0o755)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place / "socket"))
    (place / "socket").chmod(0o666)  # for the container's user; TemporaryDirectory is 0700
    listener.listen()
    return Door(listener, model)


def _is_for_cli(variable: str) -> bool:
    return variable.startswith(_CLI_VARIABLES)
