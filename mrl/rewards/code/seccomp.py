"""System-call filter of the sandbox: calls that no solution needs kill the process or fail.

A deny list on top of namespaces, dropped capabilities and a read-only root; it is not a boundary by itself.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Collection, Mapping

_KILL, _ALLOW = 0x80000000, 0x7FFF0000
_EPERM, _ENOSYS, _EPROTONOSUPPORT, _EAFNOSUPPORT = (0x00050000 | number for number in (1, 38, 93, 97))
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NEW_NAMESPACES = 0x7E020080
"""CLONE_NEW{TIME,CGROUP,UTS,IPC,USER,PID,NET,NS}."""
_X32_BIT = 0x40000000
_ARGUMENT = (16, 24, 32)
"""Low halves of a call's first three arguments: offsetof(seccomp_data, args)."""

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# (x86_64, aarch64) numbers; None if an architecture lacks the call. Source: the kernel's syscall tables.
_KILLED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "setns": (308, 268),
    "unshare": (272, 97),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "open_by_handle_at": (304, 265),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "sethostname": (170, 161),
    "move_pages": (279, 239),
}
_REFUSED = {
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "personality": (135, 92),
    "name_to_handle_at": (303, 264),
    "mbind": (237, 235),
    "migrate_pages": (256, 238),
    "set_mempolicy": (238, 237),
    "sched_setaffinity": (203, 122),
    "setpriority": (141, 140),
    "memfd_secret": (447, 447),
    # Memory that outlives its mapping, which no limit of a process counts.
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    # A program that lowers its priority would look as if the machine starved it.
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
}
_REFUSED_UNCOUNTED = {
    # These store descriptors, and their buffers, inside a socket, beyond the limit on open descriptors.
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "fork": (57, None),
    "vfork": (58, None),
}
_SOCKET, _SOCKETPAIR, _SETSOCKOPT = (41, 198), (53, 199), (54, 208)
_FAMILIES = {"AF_UNIX": 1, "AF_INET": 2}
"""All that loopback needs. Others reach kernel code (AF_ALG, AF_NETLINK) or the host (AF_VSOCK)."""
_TYPES, _TYPE_BITS = {"SOCK_STREAM": 1, "SOCK_DGRAM": 2, "SOCK_SEQPACKET": 5}, 0xF
_PROTOCOLS = {"default": 0, "TCP": 6, "UDP": 17}
"""Not MPTCP (262), UDP-Lite (136), SCTP (132) or DCCP (33), for the same reason."""
_SOL_SOCKET = 1
_BUFFERS = {"SO_SNDBUF": 7, "SO_RCVBUF": 8, "SO_SNDBUFFORCE": 32, "SO_RCVBUFFORCE": 33}
"""Larger socket buffers count in no address space, and those of TCP and UDP in no cgroup v1."""
_FCNTL, _F_SETPIPE_SZ = (72, 25), 1031
_CLONE, _CLONE3 = (56, 220), (435, 435)
_CLONE_THREAD = 0x00010000


def filter_program(
    machine: str | None = None, *, is_counted: bool = True, has_socketpairs: bool = True
) -> bytes:
    """Return the filter as the kernel's sock_filter array.

    Args:
        is_counted: A cgroup counts processes and kernel memory. If false, refuse also what lets them grow:
            processes (threads share the limits of theirs), descriptors passed through sockets, larger pipes,
            and all sockets but connected stream pairs, whose unread data the number of descriptors bounds.
            Queues of connections or datagrams outlive their descriptors.
        has_socketpairs: Allow stream pairs even if nothing is counted.

    Raises:
        OSError: The architecture is unknown.
    """
    machine = machine or platform.machine()
    if machine not in _AUDIT_ARCH:
        raise OSError(f"no system-call filter for {machine}; it exists for {sorted(_AUDIT_ARCH)}")
    column = list(_AUDIT_ARCH).index(machine)
    program = [
        _op(_LOAD, 4),  # offsetof(seccomp_data, arch)
        _op(_EQUAL, _AUDIT_ARCH[machine], yes=1),
        _op(_RETURN, _KILL),
        _op(_LOAD, 0),  # offsetof(seccomp_data, nr)
    ]
    if machine == "x86_64":
        program += [_op(_AT_LEAST, _X32_BIT, no=1), _op(_RETURN, _KILL)]
    refused = _REFUSED if is_counted else _REFUSED | _REFUSED_UNCOUNTED
    for table, action in ((_KILLED, _KILL), (refused, _EPERM), ({"clone3": _CLONE3}, _ENOSYS)):
        for numbers in table.values():
            number = numbers[column]
            if number is not None:
                program += [_op(_EQUAL, number, no=1), _op(_RETURN, action)]
    program += _for_call(_SETSOCKOPT[column], _refuse_buffers())
    program += _for_call(_SOCKET[column], _allowed_socket() if is_counted else [_op(_RETURN, _EAFNOSUPPORT)])
    pair = _allowed_socket()
    if not is_counted and has_socketpairs:
        pair = _allowed_socket(families={"AF_UNIX": 1}, types={"SOCK_STREAM": 1})
    elif not is_counted:
        pair = [_op(_RETURN, _EAFNOSUPPORT)]
    program += _for_call(_SOCKETPAIR[column], pair)
    if not is_counted:
        program += [
            _op(_EQUAL, _FCNTL[column], no=4),
            _op(_LOAD, _ARGUMENT[1]),
            _op(_EQUAL, _F_SETPIPE_SZ, no=1),
            _op(_RETURN, _EPERM),
            _op(_RETURN, _ALLOW),
        ]
    clone = [_op(_LOAD, _ARGUMENT[0]), _op(_ANY_BIT, _NEW_NAMESPACES, no=1), _op(_RETURN, _KILL)]
    if not is_counted:
        clone += [_op(_ANY_BIT, _CLONE_THREAD, yes=1), _op(_RETURN, _EPERM)]
    program += [*_for_call(_CLONE[column], clone), _op(_RETURN, _ALLOW)]
    return b"".join(program)


def _for_call(number: int, body: list[bytes]) -> list[bytes]:
    """Return the filter code for one call, which is allowed if no instruction refuses it."""
    body = [*body, _op(_RETURN, _ALLOW)]
    return [_op(_EQUAL, number, no=len(body)), *body]


def _require(argument: int, values: Collection[int], refusal: int, bits: int = 0) -> list[bytes]:
    """Return code that refuses a call if an argument, or these bits of it, is not among the values."""
    return [
        _op(_LOAD, _ARGUMENT[argument]),
        *([_op(_AND, bits)] if bits else []),
        *(_op(_EQUAL, value, yes=len(values) - n) for n, value in enumerate(values)),
        _op(_RETURN, refusal),
    ]


def _allowed_socket(
    families: Mapping[str, int] = _FAMILIES, types: Mapping[str, int] = _TYPES
) -> list[bytes]:
    return [
        *_require(0, families.values(), _EAFNOSUPPORT),
        *_require(1, types.values(), _EPROTONOSUPPORT, _TYPE_BITS),
        *_require(2, _PROTOCOLS.values(), _EPROTONOSUPPORT),
    ]


def _refuse_buffers() -> list[bytes]:
    refusals = [
        op for option in _BUFFERS.values() for op in (_op(_EQUAL, option, no=1), _op(_RETURN, _EPERM))
    ]
    return [
        _op(_LOAD, _ARGUMENT[1]),
        _op(_EQUAL, _SOL_SOCKET, no=1 + len(refusals)),
        _op(_LOAD, _ARGUMENT[2]),
        *refusals,
    ]


def _op(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("<HBBI", code, yes, no, value)
