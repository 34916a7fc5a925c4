"""gloo's groups of one process, over one device.

torch 2.13 gives every group that is made by name a device of its own, whose thread looks for messages a hundred
times a second, whether the group is used or not. A trainer rank of Megatron has twenty of them and an engine of vLLM
fifteen, most of one rank.
"""

from __future__ import annotations

import datetime
import functools
import os
from typing import Any

import torch.distributed.distributed_c10d as c10d

_THREADS = 2
"""Of each group, for its collectives: what torch takes."""


@functools.cache
def _devices() -> list[Any]:
    """As torch makes them: one for each interface that GLOO_SOCKET_IFNAME names, else that of the host's name."""
    group: Any = c10d.ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [group.create_device(interface=name) for name in names] or [group.create_default_device()]


def share_device() -> None:
    """Let the gloo groups that this process makes from now on have one device between them, which the first of them makes: it has
    a thread, which a process that is forked before would not have."""
    base: Any = c10d.ProcessGroupGloo
    if base.__name__ == "OneDeviceGloo":
        return

    class OneDeviceGloo(base):
        def __init__(self, store: c10d.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
            options = base._Options()
            options._devices, options._threads, options._timeout = _devices(), _THREADS, timeout
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = OneDeviceGloo  # type: ignore[misc]
