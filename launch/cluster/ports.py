"""Fixed ports before they are used: which are taken, and by whom. For this machine only."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import psutil


def taken(ports: Mapping[int, str]) -> list[str]:
    """One sentence for each port (number -> what it is for) that nothing could listen on now."""
    return [
        f"port {port} ({purpose}) is held by {_holder(port)}"
        for port, purpose in ports.items()
        if not _is_free(port)
    ]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # What an ended process left in TIME_WAIT does not hinder a listener that sets this, as Ray's do.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
        return True


def _holder(port: int) -> str:
    """Process number and command line of what has the port; less where another user's processes hide it."""
    found = [c for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port]
    for connection in sorted(found, key=lambda c: c.status != psutil.CONN_LISTEN):
        if connection.pid:
            try:
                words = " ".join(psutil.Process(connection.pid).cmdline())
            except psutil.Error:
                words = "command line not readable"
            return f"process {connection.pid} ({words[:120]})"
    return "a process of another user"
