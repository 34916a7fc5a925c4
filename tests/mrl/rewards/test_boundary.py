"""Attacks beyond the limits, in each sandbox: with a cgroup, without one, and for a plain user."""

import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from mrl.rewards.code import cgroup, sandbox
from mrl.rewards.code.cells import Cells
from mrl.rewards.code.code_rules import CodeRules
from mrl.rewards.code.sandbox import CodeSandbox, SandboxRun, find_sandbox
from tests.support.plain_user import printed, run_as_plain_user

MIB = 2**20
LIMITS = {"seconds": 60.0, "cpu_seconds": 60.0, "memory_mib": 128}
RULES = CodeRules(**LIMITS)  # type: ignore[arg-type]

Run = Callable[[str], str]


@pytest.fixture(scope="module")
def strict() -> CodeSandbox:
    """The sandbox of a machine without cgroups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cgroup, "make_cgroup", lambda **limits: None)
        return find_sandbox.__wrapped__()


@pytest.fixture(scope="module")
def plain_users() -> dict[str, str]:
    """Run this file's programs as a plain user; map each to its output or end."""
    programs = [*map(asked, REFUSED.values()), *map(flooding, FLOODS.values()), LISTING, THREADS]
    return dict(zip(programs, run_as_plain_user(programs, LIMITS), strict=True))


@pytest.fixture(params=["the machine's", "without a cgroup", "a plain user's"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def run(kind: str, request: pytest.FixtureRequest) -> Run:
    """Return a function that runs a program and returns its output or end."""
    if kind == "a plain user's":
        return request.getfixturevalue("plain_users").__getitem__
    boundary = request.getfixturevalue("strict") if kind == "without a cgroup" else find_sandbox()
    return lambda program: printed(boundary, program, RULES)


def asked(program: str) -> str:
    return f"done = []\n{program}\nprint(done)"


REFUSED = {
    "writes below /proc": """
import os
for path in ('autogroup', 'oom_score_adj', 'comm', 'mem', 'clear_refs', 'coredump_filter', 'timerslack_ns', \
'attr/current', 'setgroups', 'uid_map'):
    for pid in ('self', '1', 'thread-self'):
        try: os.close(os.open(f'/proc/{pid}/{path}', os.O_WRONLY)); done.append((pid, path))
        except OSError: pass
""",
    "larger buffers of sockets": """
import socket
for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33):
    for family in (socket.AF_UNIX, socket.AF_INET):
        try: one = socket.socket(family) if family == socket.AF_INET else socket.socketpair()[0]
        except OSError: continue
        before = one.getsockopt(socket.SOL_SOCKET, min(option, 8))
        try: one.setsockopt(socket.SOL_SOCKET, option, 2**20); done.append((family, option))
        except OSError: pass
        if one.getsockopt(socket.SOL_SOCKET, min(option, 8)) != before: done.append('larger')
""",
    "protocols that loopback does not need": """
import socket
for kind, protocol in ((1, 262), (2, 136), (1, 132), (5, 132), (5, 0), (6, 0), (6, 33), (2, 1), (3, 1), \
(1 | 0o4000, 262)):
    try: socket.socket(socket.AF_INET, kind, protocol); done.append((kind, protocol))
    except OSError: pass
for family in (10, 16, 17, 38, 40):
    try: socket.socket(family, 1); done.append(family)
    except OSError: pass
""",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_program_needs_is_refused(name: str, run: Run) -> None:
    assert run(asked(REFUSED[name])) == "[]\n"


FILL = """
import socket
sent = 0
keep = []
def fill(one, data=b'x' * 65536):
    global sent
    one.setblocking(False)
    try:
        while True: sent += one.send(data)
    except OSError: data = data[:len(data) // 2]
"""
FLOODS = {
    "pairs of streams": """
for _ in range(100):
    pair = socket.socketpair(); keep.append(pair); fill(pair[0]); fill(pair[1])
""",
    "pairs of datagrams": """
for _ in range(100):
    pair = socket.socketpair(type=socket.SOCK_DGRAM); keep.append(pair); fill(pair[0]); fill(pair[1])
""",
    "connections that nobody accepts": """
server = socket.socket(socket.AF_UNIX); server.bind('\\0here'); server.listen(4096)
for _ in range(3000):
    with socket.socket(socket.AF_UNIX) as one: one.connect('\\0here'); fill(one)
""",
    "datagrams of closed sockets": """
for n in range(50):
    keep.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)); keep[-1].bind(f'\\0here{n}')
    for _ in range(20):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one: one.connect(f'\\0here{n}'); fill(one)
""",
    "connections over loopback": """
server = socket.create_server(('127.0.0.1', 0))
for _ in range(25):
    one = socket.create_connection(server.getsockname()); other = server.accept()[0]; \
keep.append((one, other))
    for _ in range(20): fill(one); fill(other)
""",
    "pipes": """
import os
for _ in range(100):
    pair = os.pipe(); keep.append(pair); os.set_blocking(pair[1], False)
    try:
        while True: sent += os.write(pair[1], b'x' * 4096)
    except OSError: pass
""",
}  # fmt: skip
"""Each leaves as much unread as possible in buffers of the default size."""


def flooding(flood: str) -> str:
    indented = "".join(f"    {line}\n" for line in flood.strip().splitlines())
    return f"{FILL}\ntry:\n{indented}except OSError: pass\nprint(sent)"


@pytest.mark.parametrize("name", FLOODS)
def test_what_sockets_and_pipes_hold_is_within_the_limit(name, kind, run, strict) -> None:
    output = run(flooding(FLOODS[name]))
    left = limit = RULES.memory_mib * MIB
    if kind != "the machine's" or not find_sandbox().has_cgroup:
        left = limit - strict.scratch_bytes(RULES) - strict.rlimits(RULES)["RLIMIT_AS"]
    assert output.startswith("ended: memory limit") or 0 <= int(output) <= left, f"{output} of {left}"


def test_without_a_cgroup_there_are_pairs_of_streams_where_they_fit(strict: CodeSandbox) -> None:
    """An event loop needs one pair."""
    loop = "import asyncio\nasync def f(): return 'ran'\nprint(asyncio.run(f()))"
    assert strict.has_socketpairs(RULES) and printed(strict, loop, RULES) == "ran\n"
    small = RULES.model_copy(update={"memory_mib": 64})
    assert not strict.has_socketpairs(small)
    pair = "import socket\ntry: socket.socketpair(); print('made')\nexcept OSError: print('refused')"
    assert printed(strict, pair, small) == "refused\n"


@pytest.fixture
def home() -> Iterator[Path]:
    """A home folder for a Python installation and files of answers."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))  # where the run's user may look
    for part in (folder, folder / "bin", folder / "lib"):
        part.mkdir(exist_ok=True)
        part.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def test_a_home_that_python_lies_in_is_not_shown(home: Path) -> None:
    python = Path(find_sandbox().python)
    copy = Path(shutil.copy(python, home / "bin"))
    for part in (
        *python.parent.parent.glob("lib/python3.*"),
        *python.parent.parent.glob("lib/libpython*.so*"),
    ):
        (home / "lib" / part.name).symlink_to(part)
    for secret in ("answers.jsonl", "lib/answers.jsonl", "bin/answers.jsonl"):
        (home / secret).write_text("42")
        (home / secret).chmod(0o644)
    boundary = dataclasses.replace(find_sandbox(), python=str(copy))
    look = (
        "import os, sys\nprint(os.path.dirname(os.path.dirname(sys.executable)))\n"
        "for where, _, names in os.walk(os.path.dirname(sys.executable) + '/..'):\n"
        "    print(*[n for n in names if 'answers' in n])"
    )
    output = printed(boundary, look, RULES)
    assert output.startswith(str(home)) and "answers" not in output, output


LISTING = (
    "import os\nprint(*os.listdir('/usr'), *os.listdir('/usr/local') if os.path.exists('/usr/local') else ())"
)


def test_of_the_systems_folder_only_programs_and_libraries_are_shown(run: Run) -> None:
    listed = run(LISTING)
    shown = {"bin", "sbin", "lib", "lib32", "lib64", "libexec", "local", "share"}
    assert set(listed.split()) <= shown, listed


THREADS = """
import ctypes, os, threading
libc, started, forked = ctypes.CDLL(None, use_errno=True), 0, 0
for call in (57, 58, 56):
    if os.uname().machine == 'x86_64' and libc.syscall(call, 17, 0, 0, 0, 0) >= 0: os._exit(3)
for start in (os.fork, lambda: os.posix_spawn('/bin/true', ['true'], {})):
    try: forked += start() >= 0
    except OSError: pass
go = threading.Event()
try:
    for _ in range(200): threading.Thread(target=go.wait, args=(30,), daemon=True).start(); started += 1
except RuntimeError: pass
go.set()
print(forked, 0 < started < 40)
"""


def test_without_a_cgroup_there_are_threads_and_no_processes(strict, plain_users) -> None:
    assert printed(strict, THREADS, RULES) == plain_users[THREADS] == "0 True\n"


BUSY = "import os\nfor _ in range(2):\n    if not os.fork():\n        while True: pass"


def test_what_a_cell_started_runs_only_while_a_cell_does() -> None:
    boundary = find_sandbox()
    with Cells(boundary, RULES) as cells:
        started = cells.run(BUSY)
        if not boundary.has_cgroup:
            assert "Error" in started.error
            return
        assert not started.error
        below = sandbox._below(cells._run.process.pid)
        assert len(below) >= 4 and all(map(sandbox._is_stopped, below))
        before = cells._run.cpu_seconds()
        time.sleep(0.3)
        assert cells._run.cpu_seconds() - before < 0.1, "of two processors' time"
        again = cells.run(
            "import time\nbefore = os.times().elapsed\ntime.sleep(0.2)\nos.listdir('/proc')\n'goes on'"
        )
        assert "goes on" in again.output
        assert cells._run.cpu_seconds() > before, "its children go on with it"


def test_why_a_sandbox_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as unwritable:
        group = SimpleNamespace(procs=[unwritable.fileno()], close=lambda: None)
        monkeypatch.setattr(cgroup, "make_cgroup", lambda **limits: group)
        boundary = dataclasses.replace(find_sandbox(), has_cgroup=True)
        with pytest.raises(OSError, match=r"cannot join its cgroup: .*Bad file descriptor"):
            SandboxRun(boundary, RULES)
        assert "Bad file descriptor" in sandbox._trial(boundary)
