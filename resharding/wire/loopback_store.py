"""Keep torch.distributed stores with a loopback address to this machine.

torch's TCPStore listens on all interfaces whatever its address, and has no password: whoever reaches it reads
and changes the ranks' messages. vLLM makes such stores for its data-parallel ranks and passes no socket.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import socket
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


def keep_to_loopback() -> None:
    """Make rank 0's later stores of this process with a loopback address listen on loopback only."""
    # By name: torch.distributed has a function of this name.
    module: Any = importlib.import_module("torch.distributed.rendezvous")
    original = module._create_c10d_store
    if getattr(original, "keeps_to_loopback", False):
        return

    def create(
        hostname: str, port: int, rank: int, world_size: int, timeout: Any, use_libuv: bool = True
    ) -> Any:
        if rank == 0 and (listener := _listener(hostname, port)) is not None:
            return TCPStore(
                hostname,
                port,
                world_size,
                True,
                timeout,
                multi_tenant=True,
                master_listen_fd=listener.detach(),
            )
        return original(hostname, port, rank, world_size, timeout, use_libuv)

    create.keeps_to_loopback = True  # type: ignore[attr-defined]
    module._create_c10d_store = create


def _listener(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens there; None for another machine's address, or if the port is taken: by a
    store of this process, which serves several groups, or by a stranger, which torch reports."""
    try:
        if not ipaddress.ip_address(host).is_loopback:
            return None
    except ValueError:
        return None
    with contextlib.suppress(OSError):
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    return None
