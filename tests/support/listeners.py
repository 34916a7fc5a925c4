"""The addresses that processes listen to and who can reach them, by /proc."""

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
    """Map each TCP, UDP and unix address to the process that listens there; ended processes have none."""
    unix = _unix_listeners()
    names: dict[str, str] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            name = " ".join(process.cmdline())[:80]
            for connection in process.net_connections("inet"):
                if connection.laddr and not connection.raddr:
                    names[f"{connection.type.name} {connection.laddr.ip} {connection.laddr.port}"] = name
            for link in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    names |= {
                        f"unix {unix[os.readlink(link)]}": name for _ in [0] if os.readlink(link) in unix
                    }
    return names


def _unix_listeners() -> dict[str, str]:
    """Map socket:[INODE] to the path (@NAME if abstract) of each accepting unix socket."""
    rows = [line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {f"socket:[{row[6]}]": row[7] for row in rows if int(row[3], 16) & ACCEPTS and len(row) > 7}


def is_private(address: str) -> bool:
    """Return True if no other machine, and for a unix socket no other user, can connect."""
    kind, where = address.split(" ", 1)
    if kind == "unix":
        return any(_is_own(folder) for folder in Path(where).parents)
    ip = ipaddress.ip_address(where.split()[0])
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def _is_own(folder: Path) -> bool:
    status = folder.stat()
    return status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) & 0o077 == 0
