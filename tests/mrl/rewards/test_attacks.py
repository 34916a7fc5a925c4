"""No attack of the catalogue earns more than a wrong answer, outlives its limit, or leaves traces.

Numbers in the ids are the catalogue's.
"""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mrl.processes.own_time import Allowance
from mrl.rewards.code.candidate import CandidateProcess
from mrl.rewards.code.code_rules import CodeRules
from mrl.rewards.code.code_verifier import verify_program
from mrl.rewards.code.outcome import CandidateEnded
from mrl.rewards.code.sandbox import find_sandbox
from mrl.rewards.code.tasks import CodeTask, parse_task
from tests.support.plain_user import printed

RULES = CodeRules(seconds=1.5, cpu_seconds=1, memory_mib=192)
PATIENT = RULES.model_copy(update={"seconds": 60.0, "cpu_seconds": 60.0})
"""For programs that no time limit ends: a busy machine may take long."""
TASK = parse_task(
    {"entry_point": "f", "cases": [{"args": [n], "expected": n * n + 1} for n in range(3, 9)]}, place="x"
)
HONEST_WRONG = "def f(x):\n    return 0"
RIGHT = "\ndef f(x):\n    return x * x + 1\n"

LIAR = """
class Liar:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 1
    def __bool__(self): return True
    def __len__(self): return 1
    def __float__(self): return 1.0
"""

DENIED: dict[str, str] = {
    "1 fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "1 shell fork bomb": "import subprocess\nsubprocess.run(['/bin/sh', '-c', ':(){ :|:& };:'])\n"
    "import time; time.sleep(9)",
    "2 double fork": "import os, time\nif os.fork() == 0:\n    os.setsid()\n"
    "    if os.fork() == 0: time.sleep(60)\n    os._exit(0)",
    "3 thread bomb": "import threading, time\n"
    "for n in range(100000): threading.Thread(target=time.sleep, args=(60,)).start()",
    "4 allocate at once": "x = bytearray(100 * 2**30)",
    "4 allocate in steps": "x = []\nwhile True: x.append(bytearray(2**20))",
    "4 allocate in children": "import os\nfor n in range(8):\n    if os.fork() == 0:\n"
    "        x = bytearray(150 * 2**20)\n        import time; time.sleep(9)\nimport time; time.sleep(9)",
    "5 fill the file system": "f = open('/tmp/a', 'wb')\nwhile True: f.write(b'x' * 2**20); f.flush()",
    "5 fill shared memory": "import itertools\n"
    "for n in itertools.count(): open(f'/dev/shm/{n}', 'wb').write(b'x' * 2**20)",
    "7 busy loop": "while True: pass",
    "7 busy children": "import os\nfor n in range(4): os.fork()\nwhile True: pass",
    "8 sleep": "import time; time.sleep(1000)",
    "8 block on stdin": "import sys, time\nsys.stdin.read(); time.sleep(1000)",
    "9 ignore signals": "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: pass",
    "10 endless output": "while True: print('x' * 1000)",
    "10 endless error output": "import sys\nwhile True: sys.stderr.write('x' * 1000)",
    "10 both": "import sys\nwhile True:\n    print('x' * 100); sys.stderr.write('y' * 100)",
    "11 one long line": "import sys\nwhile True: sys.stdout.write('x' * 2**20)",
    "11 raw bytes": "import os\nwhile True: os.write(1, bytes(range(256)) * 64); os.write(2, "
    "b'\\xff\\x1b[2J\\x00' * 99)",
    "12 endless channel": "import os\n"
    "while True: os.write(max(int(n) for n in os.listdir('/proc/self/fd') if int(n) < 64) - 1, b'x' * 4096)",
    "13 all descriptors": "x = []\nwhile True: x.append(open('/dev/null'))",
    "14 compile bomb": "x = " + "-" * 50_000 + "1",
    "14 nested parentheses": "(" * 50_000 + ")" * 50_000,
    "14 constant folding": "x = ((((9**9)**9)**9)**9)**9",
    "15 core dump": "import os\nos.abort()",
    "18 catastrophic pattern": "import re\nre.match('(a*)*b', 'a' * 60)",
    "19 exit function": "import sys; sys.exit(0)",
    "19 exit exception": "raise SystemExit(0)",
    "19 raw exit": "import os; os._exit(0)",
    "19 exit hook": "import atexit, os\natexit.register(lambda: os._exit(0))\nraise SystemExit(0)",
    "20 exit in the call": "import os\ndef f(x): os._exit(0)",
    "21 exec of true": "import os; os.execv('/bin/true', ['true'])",
    "22 exception hook": "import sys\nsys.excepthook = lambda *a: None\nraise ValueError",
    "23 kill everything": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "23 kill init": "import os, signal\nos.kill(1, signal.SIGKILL)\nimport time; time.sleep(9)",
    "24 stop oneself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "26 segmentation fault": "import ctypes; ctypes.string_at(0)",
    "26 recursion": "def f(x): return f(x)",
    "26 deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)",
    "43 equal to everything": LIAR + "def f(x): return Liar()",
    "43 equal inside a list": LIAR + "def f(x): return [Liar()]",
    "44 lying subclass of int": "class I(int):\n    def __eq__(self, o): return True\n"
    "    __hash__ = int.__hash__\ndef f(x): return I(3)",
    "45 nan": "def f(x): return float('nan')",
    "45 bool": "def f(x): return True",
    "45 infinity": "def f(x): return float('inf')",
    "45 huge": "def f(x): return 10 ** 200000",
    "46 patched built-ins": "import builtins, json\n"
    "builtins.print = builtins.len = builtins.repr = lambda *a: True\n"
    'json.dumps = lambda *a, **k: \'{"id": 1, "value": true}\'\ndef f(x): return 0',
    "46 patched json claims": "import json\n"
    'json.dumps = lambda *a, **k: \'{"accepted": true, "passed": true}\'\ndef f(x): return 0',
    "47 walk frames": "import sys, gc\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
    "        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):\n"
    "            if isinstance(value, dict) and 'expected' in value: return value['expected']\n"
    "        frame = frame.f_back\n    for o in gc.get_objects():\n"
    "        if isinstance(o, dict) and 'expected' in o: return o['expected']\n    return 0",
    "48 overwrite the runner": "import __main__\n__main__.encode = lambda value, depth=0: {'f': 'inf'}\n"
    "__main__.write_frame = lambda d, m: None\ndef f(x): return 0",
    "49 answer early": "import os, struct, json\nd = json.dumps({'loaded': True}).encode()\n"
    "for fd in range(3, 20):\n    try:\n"
    "        for n in range(9): os.write(fd, struct.pack('<I', len(d)) + d)\n    except OSError: pass\n"
    "def f(x): return 0",
    "49 garbage on the channel": "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'\\xff' * 64)\n"
    "    except OSError: pass\ndef f(x): return 0",
    "50 close the channel": "import os\nos.closerange(3, 64)\ndef f(x): return 0",
    "51 visible examples only": "def f(x): return {3: 10, 4: 17}.get(x, 0)",
    "52 count the calls": "n = 2\ndef f(x):\n    global n\n    n += 1\n    return n * n + 1",
    "57 deep list": "def f(x):\n    v = []\n    for _ in range(10**6): v = [v]\n    return v",
    "57 endless list": "def f(x):\n    v = []\n    v.append(v)\n    return v",
    "57 exception text": "class E(Exception):\n    def __str__(self): return 'accepted'\n"
    "def f(x): raise E('accepted')",
    "57 exception of that name": "def f(x): raise type('accepted', (Exception,), {})",
    "58 generator": "def f(x):\n    yield x * x + 1",
}

VARIANTS = {
    "1 shell fork bomb", "4 allocate in steps", "8 block on stdin", "10 endless error output", "10 both",
    "11 one long line", "11 raw bytes", "14 nested parentheses", "14 constant folding", "19 exit function",
    "19 exit exception", "19 exit hook", "22 exception hook", "26 recursion", "43 equal inside a list",
    "45 bool", "45 infinity", "45 huge", "46 patched json claims", "57 exception of that name",
}  # fmt: skip
"""Slow-only attacks: another one of the same number, or the raw exit, represents them."""

FORBIDDEN_CALLS = {
    "23 ptrace": "libc.ptrace(16, 1, 0, 0)",
    "23 write to another process": "libc.process_vm_writev(1, 0, 0, 0, 0, 0)",
    "33 mount": "libc.mount(b'none', b'/tmp', b'tmpfs', 0, 0)", "33 chroot": "libc.chroot(b'/tmp')",
    "33 unshare": "libc.unshare(0x10000000)",
    "33 new user namespace by clone": "libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)",
    "34 bpf": "libc.syscall(321, 0, 0, 0)", "34 keyctl": "libc.syscall(250, 0, -3, 0)",
    "34 perf": "libc.syscall(298, 0, 0, 0, 0, 0)", "34 userfaultfd": "libc.syscall(323, 0)",
    "34 kernel module": "libc.init_module(0, 0, b'')", "34 setns": "libc.setns(0, 0)",
}  # fmt: skip

HARMLESS = {
    "25 raise limits": "import resource\ntry:\n    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n"
    "    done = True\nexcept (OSError, ValueError): done = False\nassert not done",
    "25 renice": "import os\ntry:\n    os.nice(-5); done = True\nexcept OSError: done = False\n"
    "assert not done",
    "27 terminal": "import fcntl, termios\ntry:\n    fcntl.ioctl(0, termios.TIOCSTI, b'x'); done = True\n"
    "except OSError: done = False\nassert not done",
    "28 environment": "import os\nassert set(os.environ) <= {'HOME', 'PATH', 'LANG', 'OMP_NUM_THREADS', "
    "'PWD', 'LC_CTYPE'}, os.environ",
    "28 other processes": "import os\nassert len([n for n in os.listdir('/proc') if n.isdigit()]) <= 3",
    "28 keys and homes": "import os, sys\n"
    "for path in ('/root', '/home', '/etc/passwd', '/etc/shadow', '/var', '/run', '/sys', '/mnt', '/srv'):\n"
    "    assert not os.path.exists(path) or sys.executable.startswith(path + '/'), path",
    "30 write to the root": "import os\n"
    "for path in ('/', '/usr', '/usr/bin', '/usr/lib', '/lib', '/dev', '/proc', '/proc/sys/kernel'):\n"
    "    try:\n        open(path + '/planted', 'w'); done = True\n    except OSError: done = False\n"
    "    assert not done, path",
    "32 replace the interpreter": "import os, sys\ntry:\n    os.remove(sys.executable); done = True\n"
    "except OSError: done = False\nassert not done",
    "33 capabilities": "caps = [l for l in open('/proc/self/status') if l.startswith('Cap')]\n"
    "assert all(int(l.split()[1], 16) == 0 for l in caps), caps",
    "33 no new privileges": "assert 'NoNewPrivs:\\t1' in open('/proc/self/status').read()",
    "33 not root": "import os\nassert os.getuid() == 65534",
    "34 kernel settings": "try:\n    open('/proc/sys/kernel/core_pattern', 'w').write('x'); done = True\n"
    "except OSError: done = False\nassert not done",
    "34 sysrq": "try:\n    open('/proc/sysrq-trigger', 'w').write('x'); done = True\n"
    "except OSError: done = False\nassert not done",
    "36 devices": "import os\nassert set(os.listdir('/dev')) <= {'null','zero','full','random','urandom',"
    "'tty','console','ptmx','pts','shm','fd','stdin','stdout','stderr','core'}, os.listdir('/dev')",
    "36 shared memory": "import os\nassert os.listdir('/dev/shm') == []",
    "37 network devices": "assert [l.split(':')[0].strip() for l in open('/proc/net/dev')"
    " if ':' in l] == ['lo']",
    "37 connect": "import socket\ntry:\n"
    "    socket.create_connection(('1.1.1.1', 53), timeout=1); done = True\nexcept OSError: done = False\n"
    "assert not done",
    "37 names": "import socket\ntry:\n    socket.getaddrinfo('example.com', 80); done = True\n"
    "except OSError: done = False\nassert not done",
    "37 raw socket": "import socket\ntry:\n"
    "    socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); done = True\nexcept OSError: done = False\n"
    "assert not done",
    "16 io_uring": "import ctypes\nassert ctypes.CDLL(None).syscall(425, 1, 0) == -1",
}
SEEN_TO_FAIL = """
for name, text in %r.items():
    try: exec(text, {})
    except BaseException as error: print(name, repr(error))
print('all looked at')
"""


@pytest.fixture(scope="module", autouse=True)
def host_is_unchanged() -> Iterator[None]:
    """Check that no attack leaves a process, file, cgroup, socket or mount."""
    find_sandbox()
    before = _host()
    yield
    deadline = time.monotonic() + 5.0
    while _host() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _host() == before


def _host() -> dict[str, object]:
    process = psutil.Process()
    groups = [p for p in Path("/sys/fs/cgroup").glob("**/mrl-*") if p.name.startswith(f"mrl-{os.getpid()}-")]
    return {
        "children": [
            c.pid for c in process.children(recursive=True) if "bwrap" in c.name() or "candidate" in c.name()
        ],
        "descriptors": process.num_fds(),
        "temporary": sorted(os.listdir("/tmp")).count("planted"),
        "segments": [n for n in os.listdir("/dev/shm") if n.isdigit()],
        "cgroups": [str(g) for g in groups],
        "mounts": len(Path("/proc/self/mounts").read_text().splitlines()),
    }


def _checked(program: str, *, task: CodeTask = TASK, rules: CodeRules = RULES) -> tuple[float | None, str]:
    start = time.monotonic()
    verdict = verify_program(program, task, rules)
    assert time.monotonic() - start < 2 * PATIENT.seconds, "what hangs would hang for 1000 s"
    assert len(verdict.reason) < 600
    return verdict.value, verdict.reason


def test_the_honest_references() -> None:
    assert _checked(RIGHT, rules=PATIENT)[0] == 1.0
    assert _checked(HONEST_WRONG, rules=PATIENT)[0] == 0.0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in VARIANTS)) for name in DENIED]
)
def test_attack_earns_nothing(name: str) -> None:
    program = DENIED[name]
    if "def f" not in program:
        program += "\n" + HONEST_WRONG
    value, reason = _checked(program)
    assert value == 0.0, reason


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("23 ptrace", "33 unshare", "34 bpf")))
        for name in FORBIDDEN_CALLS
    ],
)
def test_forbidden_call_ends_the_program(name: str) -> None:
    """test_bounds.py checks the filter's answer to each call."""
    program = f"import ctypes\nlibc = ctypes.CDLL(None)\n{FORBIDDEN_CALLS[name]}\n" + RIGHT
    value, reason = _checked(program, rules=PATIENT)
    assert value == 0.0
    assert reason.startswith("forbidden call"), reason


def test_attacks_have_no_effect() -> None:
    """Each program asserts that its attack failed; any other end is printed."""
    assert printed(find_sandbox(), SEEN_TO_FAIL % HARMLESS, PATIENT) == "all looked at\n"


def test_output_attacks_are_told_apart() -> None:
    assert _checked(DENIED["10 endless output"], rules=PATIENT)[1].startswith("output limit")


@pytest.mark.parametrize(
    "name", ["19 raw exit", "21 exec of true", "10 endless output", "7 busy loop", "1 fork bomb", "8 sleep"]
)
def test_attacks_on_programs_that_read_standard_input(name: str) -> None:
    task = parse_task({"cases": [{"stdin": "3", "stdout": "10"}]}, place="x")
    assert _checked(DENIED[name], task=task)[0] == 0.0


@pytest.mark.parametrize(
    "name",
    [
        "43 equal to everything", "19 raw exit", "47 walk frames", "49 answer early", "57 deep list",
        "46 patched built-ins",
    ],
)  # fmt: skip
def test_attacks_on_asserts(name: str) -> None:
    task = parse_task(
        {"entry_point": "f", "test": "def check(candidate):\n    assert candidate(3) == 10\n"}, place="x"
    )
    program = DENIED[name] + ("" if "def f" in DENIED[name] else "\n" + HONEST_WRONG)
    assert _checked(program, task=task)[0] == 0.0


def test_a_test_that_catches_everything_cannot_hide_a_breach() -> None:
    test = "def check(candidate):\n    try:\n        candidate(3)\n    except BaseException:\n        pass\n"
    task = parse_task({"entry_point": "f", "test": test}, place="x")
    assert verify_program("import os\ndef f(x): os._exit(0)", task, RULES).value == 0.0
    assert verify_program("def f(x): return 0", task, PATIENT).value == 1.0


def test_an_argument_changed_in_place_changes_nothing_here() -> None:
    test = (
        "def check(candidate):\n    rows = [1, 2]\n    assert candidate(rows) == 2\n"
        "    assert rows == [1, 2]\n    assert candidate(rows) == 2\n"
    )
    task = parse_task({"entry_point": "f", "test": test}, place="x")
    assert (
        verify_program("def f(rows):\n    n = len(rows)\n    rows.clear()\n    return n", task, PATIENT).value
        == 1.0
    )


def test_nothing_passes_from_one_sample_to_the_next() -> None:
    """30, 31: files, compiled caches and shared memory of one run are gone in the next."""
    plant = "import os\nfor d in ('/tmp', '/dev/shm'): open(d + '/planted', 'w').write('x')\n"
    look = "import os\nassert not any(os.path.exists(d + '/planted') for d in ('/tmp', '/dev/shm'))\n"
    assert verify_program(plant + RIGHT, TASK, PATIENT).value == 1.0
    assert verify_program(look + RIGHT, TASK, PATIENT).value == 1.0


def test_the_hosts_services_cannot_be_reached() -> None:
    """38: a server on the host's loopback and an abstract unix socket of the host."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        hidden = stack.enter_context(socket.socket(socket.AF_UNIX))
        hidden.bind(f"\0mrl-test-{os.getpid()}")
        hidden.listen()
        reach = (
            "import socket\ndef tried(kind, address):\n    try:\n        s = socket.socket(kind)\n"
            "        s.settimeout(1); s.connect(address); return True\n    except OSError: return False\n"
            f"assert not tried(socket.AF_INET, ('127.0.0.1', {server.getsockname()[1]}))\n"
            f"assert not tried(socket.AF_UNIX, '\\0mrl-test-{os.getpid()}')\n"
        )
        assert verify_program(reach + RIGHT, TASK, PATIENT).value == 1.0


def test_two_samples_may_listen_on_the_same_port() -> None:
    """39; without a cgroup neither may listen."""
    listen = "import socket\ns = socket.create_server(('127.0.0.1', 18765))\n" + RIGHT
    boundary = find_sandbox()
    with contextlib.ExitStack() as both:
        for _ in range(2):
            session = both.enter_context(CandidateProcess(boundary, PATIENT, Allowance.of(60.0)))
            if boundary.has_cgroup:
                session.load(listen, "f")
            else:
                with pytest.raises(CandidateEnded):
                    session.load(listen, "f")


SEARCH = """
def f(x):
    first, second = bytes(reversed(b'546372819')), bytes(reversed(b'918273645'))
    found = 0
    for line in open('/proc/self/maps'):
        if 'rw' not in line:
            continue
        start, end = (int(v, 16) for v in line.split()[0].split('-'))
        with open('/proc/self/mem', 'rb', buffering=0) as memory:
            try:
                memory.seek(start)
                data = memory.read(end - start)
            except (OSError, ValueError, OverflowError):
                continue
        at = data.find(first)
        while at >= 0:
            found += data[at + 9 : at + 18] == second
            at = data.find(first, at + 1)
    return found
"""


def test_the_test_is_nowhere_inside() -> None:
    """29, 47: search the whole process memory for a text that only the test has."""
    secret = "918273645546372819"
    test = f"SECRET = '{secret}'\ndef check(candidate):\n    assert candidate(0) == 0, SECRET\n"
    task = parse_task({"entry_point": "f", "test": test}, place="x")
    assert verify_program(SEARCH, task, CodeRules()).value == 1.0
    holds_it = SEARCH + f"held = '{secret}'\n"
    assert verify_program(holds_it, task, CodeRules()).value == 0.0, "the search would not find it"
