"""Stores of torch.distributed that others make by an address, kept to this machine where that address is loopback's.

torch's TCPStore listens on all interfaces whatever its address says, has no password, and whoever reaches it reads and changes what
ranks tell each other. vLLM makes such stores for its data-parallel ranks and gives no socket.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import socket
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


def keep_to_loopback() -> None:
    """The stores that rank 0 of a group in this process makes from now on at an address of loopback listen there alone."""
    module: Any = importlib.import_module(
        "torch.distributed.rendezvous"
    )  # the package has a function of this name
    made = module._create_c10d_store
    if getattr(made, "keeps_to_loopback", False):
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
        return made(hostname, port, rank, world_size, timeout, use_libuv)

    create.keeps_to_loopback = True  # type: ignore[attr-defined]
    module._create_c10d_store = create


def _listener(host: str, port: int) -> socket.socket | None:
    """A socket that listens there; None for another machine's address, and where something does already: a store of this process, which
    serves several groups, or a stranger, which torch names."""
    try:
        if not ipaddress.ip_address(host).is_loopback:
            return None
    except ValueError:
        return None
    with contextlib.suppress(OSError):
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    return None
