"""One device for all gloo groups of a process.

torch 2.13 gives every group that is created by name its own device, whose thread polls for messages a hundred
times per second, even if the group is unused. A Megatron trainer rank has twenty groups and a vLLM engine
fifteen, most of one rank.
"""

from __future__ import annotations

import datetime
import functools
import os
from typing import Any

import torch.distributed.distributed_c10d as c10d

_THREADS = 2
"""Collective threads per group: torch's number."""


@functools.cache
def _devices() -> list[Any]:
    """Create devices as torch does: one per interface in GLOO_SOCKET_IFNAME, else the host name's."""
    group: Any = c10d.ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [group.create_device(interface=name) for name in names] or [group.create_default_device()]


def share_device() -> None:
    """Let this process's future gloo groups share one device. The first group creates it, because its thread
    would not survive an earlier fork."""
    base: Any = c10d.ProcessGroupGloo
    if base.__name__ == "OneDeviceGloo":
        return

    class OneDeviceGloo(base):
        def __init__(self, store: c10d.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
            options = base._Options()
            options._devices, options._threads, options._timeout = _devices(), _THREADS, timeout
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = OneDeviceGloo  # type: ignore[misc]
