"""What processes listen to, and who gets there: by /proc, not by what the processes say of themselves."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import stat
from collections.abc import Iterable
from pathlib import Path

import psutil

ACCEPTS = 0x10000
"""The flag of /proc/net/unix that a listener has."""


def listeners(processes: Iterable[psutil.Process]) -> dict[str, str]:
    """Address -> the process that listens there, of TCP, UDP and unix sockets. One that has ended meanwhile
    has none."""
    unix = _unix_listeners()
    found: dict[str, str] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            name = " ".join(process.cmdline())[:80]
            for each in process.net_connections("inet"):
                if each.laddr and not each.raddr:
                    found[f"{each.type.name} {each.laddr.ip} {each.laddr.port}"] = name
            for link in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    found |= {
                        f"unix {unix[os.readlink(link)]}": name for _ in [0] if os.readlink(link) in unix
                    }
    return found


def _unix_listeners() -> dict[str, str]:
    """socket:[INODE] -> path (@ and a name: abstract) of this machine's unix sockets that accept
    connections."""
    rows = [line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {f"socket:[{row[6]}]": row[7] for row in rows if int(row[3], 16) & ACCEPTS and len(row) > 7}


def is_private(address: str) -> bool:
    """Whether no other machine and, of a unix socket, no other user gets there."""
    kind, where = address.split(" ", 1)
    if kind == "unix":
        return any(_is_own(folder) for folder in Path(where).parents)
    ip = ipaddress.ip_address(where.split()[0])
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def _is_own(folder: Path) -> bool:
    status = folder.stat()
    return status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) & 0o077 == 0
