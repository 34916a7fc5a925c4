"""Sandbox for untrusted programs; without it no program runs.

Bubblewrap gives separate user, pid, mount, network, ipc, uts and cgroup namespaces, a read-only root with
only an interpreter, a small writable /tmp, an empty environment and a new session. Below it are a system-call
filter, resource limits and, if this process may create one, a cgroup. A run started by root gets its own user
id. Without a cgroup the candidate may not start processes, and one limit covers its address space, files,
pipes and sockets, so that the limits of one process bound the run. `describe` reports which limits apply.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mrl.errors import RewardError
from mrl.rewards.code import cgroup
from mrl.rewards.code.code_rules import FILE_MIB, PROCESSES, CodeRules
from mrl.rewards.code.scratch_mount import SHM, TMP, mount_scratch
from mrl.rewards.code.seccomp import filter_program

_MIB = 2**20
_DESCRIPTORS = 64
_PIPE_BYTES = 32 * 1024
"""Pipe capacity per descriptor (a pipe has two); F_SETPIPE_SZ is refused if no cgroup counts pipes."""
_PACKET_BYTES = 64 * 1024
"""Excess over a socket's buffer, because one packet is always accepted whole."""
_SOCKET_BUFFER = Path("/proc/sys/net/core/wmem_default")
_FIRST_RUN_UID, _RUN_UIDS = 20_000, 40_000
"""User ids of runs started by root: above the system's, within a container's mapping."""
_RUNNER = Path(__file__).with_name("runner.py")
_PROBE_SECONDS = 30.0
_END_SECONDS = 2.0
_STOP_SECONDS = 30.0
"""Deadline to stop all processes; one stops only when it next gets a CPU."""
_PROBLEM_BYTES = 500


@dataclasses.dataclass(frozen=True, slots=True)
class CodeSandbox:
    """Sandbox features of this machine; detected once per process."""

    bwrap: str
    python: str
    has_cgroup: bool
    own_uid: bool
    has_scratch: bool
    """True if the writable file system has bounded inodes."""

    def describe(self) -> str:
        """Return one line for the log: the limits that apply."""
        limits = (
            "memory, processes and CPU by cgroup"
            if self.has_cgroup
            else "no cgroup here: address space by rlimit and no further process for the candidate"
        )
        if not self.has_scratch:
            limits += ", files by the cgroup" if self.has_cgroup else ", nothing writable"
        user = "its own user id" if self.own_uid else "this process's user id, mapped to nobody"
        return f"bubblewrap namespaces, no network, read-only root, system-call filter; {user}; {limits}"

    def rlimits(self, rules: CodeRules) -> dict[str, int]:
        """Return the limits that the runner sets on itself before it reads the program."""
        limits = {
            "RLIMIT_AS": rules.memory_mib * _MIB,
            "RLIMIT_SIGPENDING": 64,
            "RLIMIT_CPU": int(rules.cpu_seconds) + 2,  # fallback: the waiting process checks the time itself
            "RLIMIT_FSIZE": FILE_MIB * _MIB,
            "RLIMIT_CORE": 0,
            "RLIMIT_NOFILE": _DESCRIPTORS,
            "RLIMIT_MEMLOCK": 0,
        }
        limits["RLIMIT_NPROC"] = PROCESSES
        if self.has_cgroup:
            return limits
        memory = rules.memory_mib * _MIB - self.scratch_bytes(rules)
        held = _socket_bytes() if self.has_socketpairs(rules) else _DESCRIPTORS * _PIPE_BYTES
        return limits | {"RLIMIT_AS": memory - held}

    def has_socketpairs(self, rules: CodeRules) -> bool:
        """Return True if sockets are allowed: a cgroup counts them, or all fit in a quarter of the memory."""
        return self.has_cgroup or 4 * _socket_bytes() <= rules.memory_mib * _MIB

    def scratch_bytes(self, rules: CodeRules) -> int:
        """Return the size of the writable file system; without a cgroup it is part of the run's memory."""
        if self.has_cgroup:
            return FILE_MIB * _MIB
        return min(FILE_MIB, rules.memory_mib // 2) * _MIB if self.has_scratch else 0


@functools.lru_cache(maxsize=1)
def find_sandbox() -> CodeSandbox:
    """Return the sandbox of this machine; raise RewardError with what is missing if there is none."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise RewardError(
            "code verifier: bubblewrap (bwrap) is not installed and programs are not run without a sandbox; "
            "install it (Debian: apt-get install bubblewrap)"
        )
    cgroup.remove_empty_cgroups()
    probe = cgroup.make_cgroup(memory_bytes=256 * _MIB, processes=16)
    if probe is not None:
        probe.close()
    problems: list[str] = []
    for boundary in _candidates(bwrap, has_cgroup=probe is not None):
        problem = _trial(boundary)
        if not problem:
            return boundary
        problems.append(f"{boundary.python}{' as another user' if boundary.own_uid else ''}: {problem}")
    raise RewardError(
        "code verifier: the sandbox cannot be set up here, and programs are not run without one. Tried: "
        + " | ".join(problems)
        + ". Allow user namespaces for this process, or score programs elsewhere by reward.kind=plugin"
    )


def _candidates(bwrap: str, *, has_cgroup: bool) -> list[CodeSandbox]:
    own_python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    pythons = [
        own_python,
        *(path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(path)),
    ]
    users = [(python, os.geteuid() == 0) for python in pythons]
    # The kernel does not enforce root's process limit: without a cgroup only another user is acceptable.
    if os.geteuid() == 0 and has_cgroup:
        users.append((pythons[0], False))
    return [
        CodeSandbox(bwrap, python, has_cgroup, own_uid=own_uid, has_scratch=has_scratch)
        for has_scratch in (True, False)
        for python, own_uid in users
    ]


def _trial(boundary: CodeSandbox) -> str:
    """Return why a boundary does not work, or "" if it does."""
    try:
        run = SandboxRun(boundary, CodeRules())
    except OSError as error:
        return str(error)
    with run:
        ready, _, _ = select.select([run.replies], [], [], _PROBE_SECONDS)
        data = os.read(run.replies, 64) if ready else b""
        if b"ready" in data:
            return ""
        run.process.kill()
        _, errors = run.process.communicate(timeout=_PROBE_SECONDS)
        return ascii(errors.decode("utf-8", "replace").strip()[-200:]) or "no answer"


class SandboxRun:
    """Process tree inside the boundary; leaving the `with` block ends all of it."""

    def __init__(self, boundary: CodeSandbox, rules: CodeRules) -> None:
        self._cgroup = (
            cgroup.make_cgroup(memory_bytes=rules.memory_mib * _MIB + 32 * _MIB, processes=PROCESSES + 3)
            if boundary.has_cgroup
            else None
        )
        if boundary.has_cgroup and self._cgroup is None:
            raise RewardError("code verifier: a cgroup could be created at start-up but not any more")
        requests_out, self.requests = os.pipe()
        self.replies, replies_in = os.pipe()
        filter_fd, runner_fd = (
            _in_memory(
                filter_program(
                    is_counted=boundary.has_cgroup, has_socketpairs=boundary.has_socketpairs(rules)
                )
            ),
            _in_memory(_RUNNER.read_bytes()),
        )
        problem, problem_in = os.pipe()
        try:
            passed = (requests_out, replies_in, filter_fd, runner_fd)
            self.process = subprocess.Popen(
                _command(boundary, rules, *passed),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=passed,
                env={},
                cwd="/",
                start_new_session=True,
                preexec_fn=_preparation(boundary, self._cgroup, rules, problem_in),
            )
        except BaseException as error:
            os.close(self.requests)
            os.close(self.replies)
            if self._cgroup is not None:
                self._cgroup.close()
            if isinstance(error, subprocess.SubprocessError):
                os.close(problem_in)
                problem_in = -1
                cause = os.read(problem, _PROBLEM_BYTES).decode("utf-8", "replace")
                raise OSError(cause or str(error)) from error
            raise
        finally:
            os.close(problem)
            if problem_in >= 0:
                os.close(problem_in)
            os.close(requests_out)
            os.close(replies_in)
            os.close(filter_fd)
            os.close(runner_fd)
        self.end = os.pidfd_open(self.process.pid)
        """Readable once the sandbox has ended."""

    def __enter__(self) -> SandboxRun:
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None and not stream.closed:
                stream.close()
        self.process.wait()
        for descriptor in (self.requests, self.replies, self.end):
            os.close(descriptor)
        if self._cgroup is not None:
            self._cgroup.close()

    def _kill(self) -> None:
        """Kill the sandbox's first process, which ends all others; bubblewrap then reaps it and ends."""
        if self.process.poll() is None:
            for pid in _children(self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=_END_SECONDS)
        self.process.kill()

    def pause(self) -> None:
        """Stop all its processes, and those they start meanwhile, until `resume`, or raise RewardError."""
        deadline = time.monotonic() + _STOP_SECONDS
        while running := [pid for pid in _below(self.process.pid) if not _is_stopped(pid)]:
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            if time.monotonic() > deadline:
                raise RewardError("code verifier: a program's processes did not stop between two cells")
            time.sleep(0.001)

    def resume(self) -> None:
        """Continue its processes."""
        for pid in _below(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the whole run, including ended processes; 0 if no cgroup counts them."""
        return self._cgroup.cpu_seconds() if self._cgroup is not None else 0.0

    def memory_was_exceeded(self) -> bool:
        return self._cgroup is not None and self._cgroup.memory_was_exceeded()


def _socket_bytes() -> int:
    """Return the bytes that all sockets of a program can buffer at their default size."""
    return _DESCRIPTORS * (int(_SOCKET_BUFFER.read_text()) + _PACKET_BYTES)


def _below(pid: int) -> list[int]:
    """Return all descendants of a process."""
    descendants = _children(pid)
    for child in descendants:
        descendants += _children(child)
    return descendants


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] in b"TtZX"
    return True


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _preparation(
    boundary: CodeSandbox, group: cgroup.Cgroup | None, rules: CodeRules, problem: int
) -> Callable[[], None]:
    """Return what the new process runs before it becomes bubblewrap: join the cgroup, change user, mount. It
    writes its error to the descriptor `problem`, because Popen reports only that one happened."""
    descriptors = group.procs if group is not None else []
    size = boundary.scratch_bytes(rules)
    uid = _FIRST_RUN_UID + os.getpid() % _RUN_UIDS if boundary.own_uid else None

    stack_bytes, hard = rules.memory_mib * _MIB, resource.getrlimit(resource.RLIMIT_STACK)[1]
    if hard != resource.RLIM_INFINITY:
        stack_bytes = min(stack_bytes, hard)

    def prepare() -> None:
        step = f"have a stack of {stack_bytes} bytes"
        try:
            resource.setrlimit(resource.RLIMIT_STACK, (stack_bytes, hard))
            step = "join its cgroup"
            for descriptor in descriptors:
                os.write(descriptor, b"0")
            step = f"become user {uid}"
            if uid is not None:
                for stream in range(3):
                    os.fchmod(stream, 0o666)  # so that the user can open /dev/stdin
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
            step = "make a user namespace and mount its writable files"
            if boundary.has_scratch:
                mount_scratch(size)
        except BaseException as error:
            os.write(problem, f"cannot {step}: {error}".encode()[:_PROBLEM_BYTES])
            raise

    return prepare


def _command(
    boundary: CodeSandbox, rules: CodeRules, requests: int, replies: int, filter_fd: int, runner_fd: int
) -> list[str]:
    files = _python_files(boundary.python)
    return [
        boundary.bwrap,
        *("--unshare-all", "--new-session", "--die-with-parent", "--clearenv", "--cap-drop", "ALL"),
        *("--uid", "65534", "--gid", "65534", "--hostname", "sandbox"),
        *system_mounts(),
        *(part for path in files for part in ("--ro-bind", path, path)),
        *("--proc", "/proc", "--dev", "/dev"),
        *_writable(boundary, rules),
        *("--ro-bind-data", str(runner_fd), "/runner.py"),
        *("--remount-ro", "/proc", "--remount-ro", "/dev", "--remount-ro", "/"),
        *("--chdir", "/tmp", "--setenv", "HOME", "/tmp", "--setenv", "PATH", "/usr/bin:/bin"),
        *("--setenv", "LANG", "C.UTF-8", "--setenv", "OMP_NUM_THREADS", "1"),
        *("--seccomp", str(filter_fd)),
        *("--", boundary.python, "-I", "-S", "/runner.py", str(requests), str(replies)),
    ]


def system_mounts() -> list[str]:
    """Return bubblewrap's arguments for this machine's programs and libraries, read-only."""
    mounts = [part for path in _system_folders() for part in ("--ro-bind", path, path)]
    for name in ("bin", "lib", "lib64", "sbin"):
        path = Path("/") / name
        if path.is_symlink():
            mounts += ["--symlink", os.readlink(path), str(path)]
        elif path.exists():
            mounts += ["--ro-bind", str(path), str(path)]
    return [*mounts, "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]


@functools.cache
def _system_folders() -> list[str]:
    """Return the folders of /usr that a program needs; others, such as /usr/src, may contain anything."""
    names = [
        f"{part}{name}"
        for part in ("", "local/")
        for name in ("bin", "sbin", "lib", "lib64", "lib32", "libexec")
    ]
    paths = [f"/usr/{name}" for name in (*names, "share/zoneinfo")]
    return [path for path in paths if os.path.isdir(path)]


@functools.cache
def _python_files(python: str) -> list[str]:
    """Return a non-system interpreter and its libraries, but not the rest of its folder (maybe a home)."""
    prefix = Path(python).parent.parent
    if prefix in (Path("/usr"), Path("/usr/local")):
        return []
    whole = (prefix / "conda-meta").is_dir()  # the whole folder belongs to the environment
    files = [Path(python)]
    for folder in (prefix / "lib", prefix / "lib64"):
        files += [folder] if whole else [*folder.glob("python3.*"), *folder.glob("libpython*.so*")]
    return [str(path) for path in files if path.exists()]


def _writable(boundary: CodeSandbox, rules: CodeRules) -> list[str]:
    """Return the mounts of /tmp and /dev/shm: bounded in inodes or by the cgroup, else read-only."""
    if boundary.has_scratch:
        return ["--bind", TMP, "/tmp", "--bind", SHM, "/dev/shm"]
    if not boundary.has_cgroup:
        return ["--dir", "/tmp"]
    size = str(boundary.scratch_bytes(rules))
    return [
        *("--size", size, "--perms", "1777", "--tmpfs", "/dev/shm"),
        *("--size", size, "--perms", "1777", "--tmpfs", "/tmp"),
    ]


def _in_memory(data: bytes) -> int:
    """Return a descriptor of an unnamed file with this content, at its start."""
    descriptor = os.memfd_create("mrl")
    os.write(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
