"""Find which fixed ports of this machine are in use, and by which process."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import psutil


def ports_in_use(ports: Mapping[int, str]) -> list[str]:
    """Return one sentence per port (number -> purpose) that cannot be listened on now."""
    return [
        f"port {port} ({purpose}) is used by {_holder(port)}"
        for port, purpose in ports.items()
        if not _is_free(port)
    ]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # A port in TIME_WAIT does not block a listener that sets this, and Ray's listeners do.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
        return True


def _holder(port: int) -> str:
    """Return pid and command line of the process that uses the port, as far as this user can see them."""
    connections = [c for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port]
    for connection in sorted(connections, key=lambda c: c.status != psutil.CONN_LISTEN):
        if connection.pid:
            try:
                words = " ".join(psutil.Process(connection.pid).cmdline())
            except psutil.Error:
                words = "command line not readable"
            return f"process {connection.pid} ({words[:120]})"
    return "a process of another user"
