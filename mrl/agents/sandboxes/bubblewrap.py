"""Sandboxes of this machine's kernel, by bubblewrap.

A sandbox is a small process that holds a user, a mount and a network namespace with one bounded tmpfs. Each
command enters them and becomes bubblewrap, which adds its own user, pid, ipc, uts and cgroup namespaces, a
read-only root, no capabilities and the system-call filter of the code verifier. At a command's end the kernel
kills all that it started; the tmpfs disappears with the holder, which ends with the process that opened it.

The network namespace has only its loopback. The door listens there (`door.py`): its socket is made inside and
served from outside, so that no socket of this machine is in the sandbox.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from mrl.agents.environment import Model, SandboxLost
from mrl.agents.sandboxes import work_files
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
from mrl.agents.sandboxes.work_files import WorkFile
from mrl.errors import ConfigError
from mrl.processes.channel import read_some
from mrl.processes.lifeline import adopting_orphans, die_with_parent, keeping_lifeline
from mrl.processes.start import wait_or_kill
from mrl.rewards.code import cgroup
from mrl.rewards.code.sandbox import system_mounts
from mrl.rewards.code.scratch_mount import mount_scratch
from mrl.rewards.code.seccomp import filter_program

_MIB = 2**20
_PLACES = {WORK: "/dev/shm/work", TMP: "/dev/shm/tmp", "/dev/shm": "/dev/shm/shm"}
"""Writable folders of every sandbox, and their places on the holder's tmpfs."""
_FIRST_UID, _UIDS = 20_000, 40_000
"""User ids of sandboxes opened by root: above the system's, within a container's mapping."""
_DESCRIPTORS = 1024
_END_SECONDS = 30.0
"""Deadline for killed processes to end; one ends only when it next gets a CPU."""
_libc = ctypes.CDLL(None)
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_HOST_FOLDERS = ("/usr/share", "/etc/alternatives", "/etc/ssl/certs")
"""What programs of this machine need besides `system_mounts`."""
_ETC = "/dev/shm/etc"
_ETC_FILES = {
    "passwd": WorkFile(b"nobody:x:65534:65534:nobody:/tmp:/bin/sh\n"),
    "group": WorkFile(b"nogroup:x:65534:\n"),
    "hosts": WorkFile(b"127.0.0.1 localhost\n"),
}
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": TMP,
    "LANG": "C.UTF-8",
}


class Bubblewrap:
    """Provider of this machine's sandboxes. An image is a folder with a root's files, read-only inside; None
    stands for this machine's own /usr."""

    def open(
        self,
        *,
        image: str | None,
        mounts: Mapping[str, str],
        limits: SandboxLimits,
        model: Model | None,
        folders: Sequence[str] = (),
    ) -> BubblewrapSandbox:
        """Open a sandbox. Raises SandboxLost, or ConfigError."""
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise ConfigError(
                "sandbox.kind = bubblewrap, but bubblewrap (bwrap) is not installed; install it (Debian: "
                "apt-get install bubblewrap)"
            )
        places = [*mounts, *([image] if image is not None else [])]
        for place in places:
            if not os.path.isabs(place) or not os.path.exists(place):
                raise ConfigError(
                    f"the sandbox's image or mount {place!r} is not an absolute path of a folder"
                )
        root = [*_root(image), *(part for pair in mounts.items() for part in ("--ro-bind", *pair))]
        are_public = all(map(_is_public, places))
        return BubblewrapSandbox(bwrap, root, limits, model, folders, are_public=are_public)


class BubblewrapSandbox(Sandbox):
    """An open sandbox (`providers.Sandbox`)."""

    def __init__(
        self,
        bwrap: str,
        root: Sequence[str],
        limits: SandboxLimits,
        model: Model | None,
        folders: Sequence[str],
        *,
        are_public: bool,
    ) -> None:
        """`root`: bubblewrap's arguments for the root; `are_public`: any user can read it."""
        self._bwrap, self._root, self._limits = bwrap, root, limits
        self._places = _PLACES | {path: f"/dev/shm/folder-{n}" for n, path in enumerate(folders)}
        self._deadline = time.monotonic() + limits.boot_seconds
        self._stack = contextlib.ExitStack()
        self._cgroup = cgroup.make_cgroup(
            memory_bytes=(limits.memory_mib + limits.disk_mib) * _MIB,
            processes=limits.processes + 3,
            cpus=limits.cpus,
        )
        if self._cgroup is not None:
            self._stack.callback(self._cgroup.close, deadline_seconds=_END_SECONDS)
        self._uid = None
        if os.geteuid() == 0:
            if are_public:
                self._uid = _FIRST_UID + os.getpid() % _UIDS
            elif self._cgroup is None:
                raise ConfigError(
                    "the sandbox's image or a mount is in a folder that other users cannot read, and root's "
                    "own processes have no limits without a cgroup; move it, or change the folder's mode"
                )
        try:
            self._boot(model)
        except BaseException:
            self._stack.close()
            raise

    @property
    def model(self) -> Model | None:
        return self._model

    def describe(self) -> str:
        """Return one line for the log: the boundary, and the limits that apply."""
        user = "this user's id, mapped to nobody" if self._uid is None else "a user id of its own"
        memory = (
            "memory, processes and CPUs by cgroup"
            if self._cgroup is not None
            else "no cgroup here: memory looked at four times a second, processes by rlimit, CPUs not limited"
        )
        return f"bubblewrap: namespaces, read-only root, system-call filter, {user}, {memory}"

    def close(self) -> None:
        """End all its processes and remove its files."""
        self._stack.close()

    def run(self, command: Sequence[str], *, seconds: float, env: Mapping[str, str] | None = None) -> Exit:
        """Run a command in WORK to its end, and end all processes that it leaves."""
        began = time.monotonic()
        with adopting_orphans(), contextlib.ExitStack() as stack:
            status, status_in = os.pipe()
            stack.callback(os.close, status)
            reports = _Status(status)
            try:
                process = self._start(command, _ENVIRONMENT | dict(env or {}), status_in)
            except (OSError, subprocess.SubprocessError) as error:
                raise SandboxLost(
                    f"a command could not enter the sandbox: {_reason(status, error)}"
                ) from error
            finally:
                os.close(status_in)
            assert process.stdout is not None
            stack.enter_context(process.stdout)
            stack.callback(wait_or_kill, process, 0.0)
            first = reports.first_process(process, self._limits.boot_seconds)
            stack.callback(os.close, first)
            output = CommandOutput(process.stdout.fileno(), OUTPUT_BYTES)
            memory = None if self._cgroup is not None else _MemoryWatch(process.pid, self._limits.memory_mib)
            timed_out = wait_for_command(
                process,
                output,
                seconds=seconds,
                door=self._door,
                kill=lambda: _kill(process, first),
                exceeds=memory,
            )
            # Bubblewrap may end a moment before the last of its namespace's processes. Killed at its start
            # (for memory), it leaves them running.
            _kill_first(first)
            if not select.select([first], [], [], _END_SECONDS)[0]:
                raise SandboxLost("processes of a command did not end when they were killed")
            with contextlib.suppress(ChildProcessError):  # reaped by bubblewrap
                os.waitid(os.P_PIDFD, first, os.WEXITED)
            code = reports.exit_code()
        if self._cgroup is not None:
            out_of_memory = self._cgroup.memory_was_exceeded()
        else:
            out_of_memory = memory is not None and memory.was_exceeded
        # Bubblewrap's own process can be what the kernel kills for memory.
        if code is None and not timed_out and not out_of_memory:
            raise SandboxLost(f"bubblewrap could not run a command: {output.text()[-300:]!a}")
        return Exit(
            128 + signal.SIGKILL if code is None else code,
            time.monotonic() - began,
            output.text(),
            timed_out=timed_out,
            out_of_memory=out_of_memory,
        )

    def write(self, files: Mapping[str, WorkFile], folder: str = WORK) -> None:
        """Write files by their paths below a folder; replace what is there. Raises TooLarge."""
        try:
            with self._as_owner():
                work_files.write_below(self._folders[folder], files)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise TooLarge(
                f"{len(files)} files do not fit into the disk of {self._limits.disk_mib} MiB"
            ) from error

    def read(self, patterns: Sequence[str], folder: str = WORK) -> dict[str, WorkFile]:
        """Return the matching regular files below a folder. Raises TooLarge."""
        with self._as_owner():
            files = work_files.read_below(
                self._folders[folder], patterns, most_bytes=KEPT_MIB * _MIB, most_files=KEPT_FILES
            )
        if files is None:
            raise TooLarge(f"the files to keep are more than {KEPT_FILES} or {KEPT_MIB} MiB")
        return files

    def _boot(self, model: Model | None) -> None:
        """Start the holder of the namespaces, and open what is needed of it."""
        report, report_in = socket.socketpair()
        with report, report_in:
            try:
                holder = subprocess.Popen(
                    ["cat"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    start_new_session=True,
                    preexec_fn=_holding(
                        self._uid,
                        self._limits,
                        [*self._places.values(), _ETC],
                        report_in,
                        has_door=model is not None,
                    ),
                )
            except (OSError, subprocess.SubprocessError) as error:
                report_in.close()
                raise SandboxLost(
                    f"the sandbox cannot boot: {_reason(report.fileno(), error)}; bubblewrap needs user "
                    "namespaces, which this machine must allow"
                ) from error
            self._stack.callback(_end, holder)
            self._door, self._model = None, None
            if model is not None:
                _, (descriptor,), *_ = socket.recv_fds(report, 1, 1)
                listener = socket.socket(fileno=descriptor)
                self._door = Door(listener, model)
                self._stack.callback(self._door.close)
                self._model = Model(f"http://127.0.0.1:{listener.getsockname()[1]}", model.key, model.name)
        self._namespaces = [self._opened(f"/proc/{holder.pid}/ns/{name}") for name in ("user", "mnt", "net")]
        self._folders = {
            folder: self._opened(f"/proc/{holder.pid}/root{place}") for folder, place in self._places.items()
        }
        etc = self._opened(f"/proc/{holder.pid}/root{_ETC}")
        with self._as_owner():
            work_files.write_below(etc, _ETC_FILES)

    @contextlib.contextmanager
    def _as_owner(self) -> Iterator[None]:
        """Act as the user of its files: the tmpfs knows no other one."""
        if self._uid is None:
            yield
            return
        with keeping_lifeline():
            _libc.setfsgid(self._uid)  # of this thread alone
            _libc.setfsuid(self._uid)
            try:
                yield
            finally:
                _libc.setfsuid(os.geteuid())
                _libc.setfsgid(os.getegid())

    def _opened(self, path: str) -> int:
        descriptor = os.open(path, os.O_RDONLY)
        self._stack.callback(os.close, descriptor)
        return descriptor

    def _start(self, command: Sequence[str], env: Mapping[str, str], status: int) -> subprocess.Popen[bytes]:
        filter_fd = os.memfd_create("mrl")
        try:
            os.write(filter_fd, filter_program())
            os.lseek(filter_fd, 0, os.SEEK_SET)
            words = [
                self._bwrap,
                # The network namespace is the holder's.
                *("--unshare-all", "--share-net", "--new-session", "--die-with-parent"),
                *("--cap-drop", "ALL", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox"),
                *self._root,
                *("--proc", "/proc", "--dev", "/dev"),
                *(word for folder, place in self._places.items() for word in ("--bind", place, folder)),
                *("--remount-ro", "/proc", "--remount-ro", "/dev", "--remount-ro", "/"),
                *("--chdir", WORK, "--json-status-fd", str(status), "--seccomp", str(filter_fd)),
                *("--", *command),
            ]
            return subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(filter_fd, status),
                cwd="/",
                env=env,  # not in the arguments, which other users of this machine can read
                start_new_session=True,
                preexec_fn=_entering(
                    self._uid,
                    self._namespaces,
                    self._cgroup.procs if self._cgroup is not None else [],
                    self._limits,
                    status,
                ),
            )
        finally:
            os.close(filter_fd)


def _root(image: str | None) -> list[str]:
    """Return bubblewrap's arguments for the root's files."""
    if image is None:
        folders = [folder for folder in _HOST_FOLDERS if os.path.isdir(folder)]
        return [
            *system_mounts(),
            *(word for folder in folders for word in ("--ro-bind", folder, folder)),
            *(word for name in _ETC_FILES for word in ("--ro-bind", f"{_ETC}/{name}", f"/etc/{name}")),
        ]
    mounts: list[str] = []
    for path in sorted(Path(image).iterdir()):  # one by one, so that further folders can be added to the root
        place = f"/{path.name}"
        if path.is_symlink():
            mounts += ["--symlink", os.readlink(path), place]
        elif place not in (WORK, TMP, "/proc", "/dev"):
            mounts += ["--ro-bind", str(path), place]
    return mounts


def _is_public(path: str) -> bool:
    """Return True if other users can read a folder and pass those above it."""
    real = Path(path).resolve()
    return all(folder.stat().st_mode & 0o001 for folder in (real, *real.parents)) and bool(
        real.stat().st_mode & 0o004
    )


def _holding(
    uid: int | None, limits: SandboxLimits, places: Sequence[str], report: socket.socket, *, has_door: bool
) -> Callable[[], None]:
    """Return what the holder runs before it becomes `cat`. It sends the door's socket, or its error."""
    parent = os.getpid()

    def prepare() -> None:
        _become(uid)
        die_with_parent(parent)
        mount_scratch(limits.disk_mib * _MIB, places)
        os.unshare(os.CLONE_NEWNET)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))
        if has_door:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                socket.send_fds(report, [b"."], [listener.fileno()])

    return _reporting(prepare, report.fileno())


def _entering(
    uid: int | None, namespaces: Sequence[int], procs: Sequence[int], limits: SandboxLimits, report: int
) -> Callable[[], None]:
    """Return what a command's process runs before it becomes bubblewrap."""
    parent = os.getpid()
    of_resources = {
        resource.RLIMIT_DATA: limits.memory_mib * _MIB,
        resource.RLIMIT_FSIZE: limits.disk_mib * _MIB,
        resource.RLIMIT_NPROC: limits.processes + 3,
        resource.RLIMIT_NOFILE: _DESCRIPTORS,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_CORE: 0,
    }

    def prepare() -> None:
        for descriptor in procs:
            os.write(descriptor, b"0")
        _become(uid)
        die_with_parent(parent)
        for namespace in namespaces:
            os.setns(namespace)
        for kind, limit in of_resources.items():
            hard = resource.getrlimit(kind)[1]
            least = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (least, least))

    return _reporting(prepare, report)


def _reporting(prepare: Callable[[], None], report: int) -> Callable[[], None]:
    """Return a function that also writes its error to a descriptor: Popen reports only that one happened."""

    def reporting() -> None:
        try:
            prepare()
        except BaseException as error:
            os.write(report, repr(error).encode()[:500])
            raise

    return reporting


def _reason(report: int, error: Exception) -> str:
    """Return the error that `_reporting` wrote, else the one that was raised."""
    with contextlib.suppress(BlockingIOError):
        return os.read(report, 500).decode("utf-8", "replace") or str(error)
    return str(error)


def _become(uid: int | None) -> None:
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


class _Status:
    """Reports of bubblewrap about a command."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor, self._data, self._is_over = descriptor, b"", False

    def first_process(self, process: subprocess.Popen[bytes], seconds: float) -> int:
        """Return a descriptor of the first process of a command's pid namespace. It becomes readable once all
        of the namespace's processes have ended."""
        deadline = time.monotonic() + seconds
        while not self._reports() and not self._is_over and (left := deadline - time.monotonic()) > 0:
            select.select([self.descriptor], [], [], left)
        pid = self._reports().get("child-pid", process.pid)
        try:
            return os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended
            return os.pidfd_open(process.pid)

    def exit_code(self) -> int | None:
        """Return the command's exit code; None if it never began, or was killed."""
        return self._reports().get("exit-code")

    def _reports(self) -> dict[str, int]:
        while data := read_some(self.descriptor):
            self._data += data
        self._is_over = data is None
        lines = self._data.split(b"\n")[:-1]
        return {name: value for line in lines for name, value in json.loads(line).items()}


class _MemoryWatch:
    """Check of a command's memory where no cgroup counts it."""

    def __init__(self, pid: int, most_mib: int) -> None:
        """`pid`: process above all of the command."""
        self._pid, self._most_kib = pid, most_mib * 1024
        self.was_exceeded = False

    def __call__(self) -> bool:
        """Return True if all processes below together have more memory than they may."""
        self.was_exceeded |= sum(map(_memory_kib, _below(self._pid))) > self._most_kib
        return self.was_exceeded


def _below(pid: int) -> list[int]:
    """Return all descendants of a process."""
    descendants: list[int] = []
    ahead = [pid]
    while ahead:
        with contextlib.suppress(OSError):
            parent = ahead.pop()
            for task in os.listdir(f"/proc/{parent}/task"):
                with contextlib.suppress(OSError):
                    children = Path(f"/proc/{parent}/task/{task}/children").read_text().split()
                    ahead += map(int, children)
                    descendants += map(int, children)
    return descendants


def _memory_kib(pid: int) -> int:
    """Return the memory of a process, with its share of what it shares; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


def _kill(process: subprocess.Popen[bytes], first: int) -> None:
    """Kill a command's first process, which ends all others; bubblewrap then ends by itself."""
    _kill_first(first)
    wait_or_kill(process, _END_SECONDS)


def _kill_first(first: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(first, signal.SIGKILL)


def _end(holder: subprocess.Popen[bytes]) -> None:
    holder.kill()
    holder.wait()
    assert holder.stdin is not None
    holder.stdin.close()
