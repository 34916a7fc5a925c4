"""Limits of a run with and without a cgroup; each program asserts one rule and fails if it is broken."""

import functools
import itertools
import struct

import pytest

from mrl.rewards.code import sandbox, seccomp
from mrl.rewards.code.code_rules import CodeRules
from mrl.rewards.code.code_verifier import verify_program
from mrl.rewards.code.tasks import parse_task
from tests.support.plain_user import printed

RULES = CodeRules(seconds=60.0, cpu_seconds=60.0, memory_mib=192)
TASK = parse_task({"entry_point": "f", "cases": [{"args": [3], "expected": 10}]}, place="x")
RIGHT = "\ndef f(x):\n    return x * x + 1\n"
HELPERS = """
import ctypes, errno, fcntl, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def refused(call, *numbers):
    try:
        done = call()
    except OSError as error:
        code = error.errno
    else:
        code = ctypes.get_errno() if done == -1 else 0
    return code in numbers
"""

REFUSED = {
    "memory file": "assert refused(lambda: os.memfd_create('x'), errno.EPERM)",
    "segment": "assert refused(lambda: libc.shmget(0, 4096, 0o1600), errno.EPERM)",
    "message queue": "assert refused(lambda: libc.msgget(0, 0o1600), errno.EPERM)",
    "semaphores": "assert refused(lambda: libc.semget(0, 9, 0o1600), errno.EPERM)",
    "named queue": "assert refused(lambda: libc.mq_open(b'/x', 0o102, 0o600, None), errno.EPERM)",
    "watches": "assert refused(lambda: libc.inotify_init1(0), errno.EPERM)",
    "run me last": "assert refused(lambda: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)), "
    "errno.EPERM)",
    "timers": "t = ctypes.c_long()\nn = 0\n"
    "while libc.timer_create(0, None, ctypes.byref(t)) == 0 and n < 999: n += 1\nassert n <= 64, n",
}
FAMILIES = {
    "AF_VSOCK": 40, "AF_ALG": 38, "AF_NETLINK": 16, "AF_PACKET": 17, "AF_INET6": 10, "AF_KCM": 41,
    "AF_XDP": 44,
}  # fmt: skip
USUAL = """
import asyncio, tempfile
left, right = socket.socketpair()
left.sendall(b'x')
assert right.recv(1) == b'x'
asyncio.run(asyncio.sleep(0))
for n in range(200): open(f'/tmp/{n}', 'w').write('text')
with tempfile.TemporaryFile() as file: file.write(bytes(2**20))
"""
LOOPBACK = """
server = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(server.getsockname())
"""
PARK = """
left, right = socket.socketpair()
with open('/tmp/parked', 'w') as file:
    assert refused(lambda: socket.send_fds(left, [b'x'], [file.fileno()]), errno.EPERM)
assert refused(lambda: fcntl.fcntl(os.pipe()[0], fcntl.F_SETPIPE_SZ, 2**20), errno.EPERM)
"""
MANY_FILES = """
n = 0
try:
    for n in range(30_000):
        if n % 2: os.mkdir(f'/tmp/{n}')
        else: os.symlink('x', f'/dev/shm/{n}')
except OSError as error:
    assert error.errno == errno.ENOSPC
assert 2_000 < n < 5_000, n
"""
HOLD_ALL = """
import mmap
held, kept = 0, []
step = 4 * 2**20
def hold(make):
    global held
    try:
        for _ in range(400):
            kept.append(make())
            held += step
    except (OSError, MemoryError, AssertionError):
        pass
def in_a_file(folder):
    file = open(f'{folder}/{len(kept)}', 'wb', buffering=0)
    assert file.write(bytes(step)) == step
def unmapped_segment():
    number = libc.shmget(0, step, 0o1600)
    assert number >= 0
    libc.shmat.restype = ctypes.c_void_p
    address = libc.shmat(number, None, 0)
    ctypes.memset(address, 1, step)
    libc.shmdt(ctypes.c_void_p(address))
def memory_file():
    number = os.memfd_create('x')
    assert os.write(number, bytes(step)) == step
    return number
hold(memory_file)
hold(unmapped_segment)
hold(lambda: in_a_file('/tmp'))
hold(lambda: in_a_file('/dev/shm'))
hold(lambda: mmap.mmap(-1, step))
kept = None
"""


@pytest.fixture(params=["as here", "no cgroup"])
def boundary(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> sandbox.CodeSandbox:
    """This machine's sandbox, and the one without cgroups."""
    if request.param == "no cgroup":
        monkeypatch.setattr(sandbox.cgroup, "make_cgroup", lambda **limits: None)
    new_sandbox = sandbox.find_sandbox.__wrapped__()
    monkeypatch.setattr("mrl.rewards.code.code_verifier.find_sandbox", lambda: new_sandbox)
    return new_sandbox


def holds(program: str) -> None:
    verdict = verify_program(HELPERS + program + RIGHT, TASK, RULES)
    assert verdict.value == 1.0, verdict.reason


def test_what_no_limit_counts_is_refused(boundary: sandbox.CodeSandbox) -> None:
    """Calls that are not refused are printed."""
    tries = "\n".join(
        f"try: exec({text!r})\nexcept BaseException as e: print({name!r}, e)"
        for name, text in REFUSED.items()
    )
    assert printed(boundary, f"{HELPERS}\n{tries}\nprint('all tried')", RULES) == "all tried\n"


def test_sockets_are_of_two_families(boundary: sandbox.CodeSandbox) -> None:
    holds(
        "".join(
            f"assert refused(lambda: socket.socket({n}, {kind}), errno.EAFNOSUPPORT), {name!r}\n"
            for name, n in FAMILIES.items()
            for kind in (1, 2, 3, 5)
        )
    )


def test_what_programs_usually_do_still_works(boundary: sandbox.CodeSandbox) -> None:
    holds(USUAL + LOOPBACK * boundary.has_cgroup)


def test_inodes_are_bounded(boundary: sandbox.CodeSandbox) -> None:
    assert boundary.has_scratch, "this machine lets bubblewrap make namespaces, so it lets us"
    holds(MANY_FILES)


def test_the_sum_of_what_a_run_holds_is_its_limit(boundary: sandbox.CodeSandbox) -> None:
    """A cgroup's limit leaves 32 MiB for the kernel's own needs."""
    holds(HOLD_ALL + f"assert held <= {192 + 32 * boundary.has_cgroup} * 2**20, held\n")
    if not boundary.has_cgroup:
        holds(PARK)


def test_without_a_bounded_file_system_nothing_is_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kernels let only bubblewrap create a namespace."""
    monkeypatch.setattr(sandbox.cgroup, "make_cgroup", lambda **limits: None)
    monkeypatch.setattr(sandbox, "mount_scratch", _not_permitted)
    new_sandbox = sandbox.find_sandbox.__wrapped__()
    monkeypatch.setattr("mrl.rewards.code.code_verifier.find_sandbox", lambda: new_sandbox)
    assert "nothing writable" in new_sandbox.describe()
    holds(
        "for folder in ('/tmp', '/dev/shm', '/dev', '/'):\n"
        "    assert refused(lambda: open(folder + '/x', 'w'), errno.EROFS, errno.EACCES), folder\n"
    )


def _not_permitted(size_bytes: int) -> None:
    raise PermissionError("no namespaces for this program")


@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_of_each_machine_decides_each_call(machine: str, is_counted: bool) -> None:
    """The filter is interpreted here, so any machine can check the filter of another."""
    decides = functools.partial(decision, machine, is_counted=is_counted)
    for table, action in ((seccomp._KILLED, seccomp._KILL), (seccomp._REFUSED, seccomp._EPERM)):
        here = [numbers for numbers in table.values() if numbers[machine == "aarch64"] is not None]
        assert {decides(numbers) for numbers in here} == {action}
    uncounted = seccomp._ALLOW if is_counted else seccomp._EPERM
    here = [n for n in seccomp._REFUSED_UNCOUNTED.values() if n[machine == "aarch64"] is not None]
    assert {decides(numbers) for numbers in here} == {uncounted}
    assert decides(seccomp._FCNTL, 3, seccomp._F_SETPIPE_SZ) == uncounted
    assert decides(seccomp._FCNTL, 3, 1) == decides((0, 63)) == seccomp._ALLOW  # 0 and 63: read
    sockets = set(
        itertools.product(range(64), (0, 1, 2, 3, 5, 6, 1 | 0o2004000), (0, 1, 6, 17, 33, 132, 136, 262))
    )
    counted = set(itertools.product((1, 2), (1, 2, 5, 1 | 0o2004000), (0, 6, 17)))
    pairs = set(itertools.product((1,), (1, 1 | 0o2004000), (0, 6, 17)))
    for numbers, allowed in ((seccomp._SOCKET, set()), (seccomp._SOCKETPAIR, pairs)):
        passed = {arguments for arguments in sockets if decides(numbers, *arguments) == seccomp._ALLOW}
        assert passed == (counted if is_counted else allowed)
    assert decides(seccomp._SOCKETPAIR, 1, 1, 0, has_socketpairs=is_counted) == (
        seccomp._ALLOW if is_counted else seccomp._EAFNOSUPPORT
    )
    options = {o for o in range(80) if decides(seccomp._SETSOCKOPT, 3, 1, o) != seccomp._ALLOW}
    assert options == set(seccomp._BUFFERS.values())
    assert decides(seccomp._SETSOCKOPT, 3, 6, 7) == seccomp._ALLOW
    assert decides(seccomp._CLONE, 0x10000000) == decides(seccomp._CLONE, 0x10010000) == seccomp._KILL
    assert decides(seccomp._CLONE, 17) == uncounted
    assert decides(seccomp._CLONE, 0x3D0F00) == seccomp._ALLOW, "a thread's"


def decision(
    machine: str,
    numbers: tuple[int, int | None],
    *arguments: int,
    is_counted: bool,
    has_socketpairs: bool = True,
) -> int:
    """Return the filter's answer to a call, by the kernel's rules for classic BPF."""
    number = numbers[machine == "aarch64"]
    assert number is not None
    data = struct.pack("<IIQ6Q", number, seccomp._AUDIT_ARCH[machine], 0, *(*arguments, *[0] * 6)[:6])
    code = _filter(machine, is_counted, has_socketpairs)
    at = loaded = 0
    while True:
        operation, yes, no, value = struct.unpack_from("<HBBI", code, at)
        at += 8
        if operation == seccomp._RETURN:
            return value
        if operation == seccomp._LOAD:
            (loaded,) = struct.unpack_from("<I", data, value)
            continue
        if operation == seccomp._AND:
            loaded &= value
            continue
        holds_here = {
            seccomp._EQUAL: loaded == value,
            seccomp._AT_LEAST: loaded >= value,
            seccomp._ANY_BIT: bool(loaded & value),
        }[operation]
        at += 8 * (yes if holds_here else no)


@functools.cache
def _filter(machine: str, is_counted: bool, has_socketpairs: bool) -> bytes:
    return seccomp.filter_program(machine, is_counted=is_counted, has_socketpairs=has_socketpairs)
