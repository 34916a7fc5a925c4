"""Processes of two pools: how they meet, and the settings of their weight syncs."""

import contextlib
import datetime
import os
import time
from collections.abc import Iterator

import torch.distributed as dist

from mrl.config.sections.sync import SyncSection

HOST = "127.0.0.1"
SYNC = SyncSection(bucket_bytes=64 << 10, deadline_seconds=60.0, transport="distributed")


@contextlib.contextmanager
def store_of(rank: int, trainers: int, port: int) -> Iterator[dist.TCPStore]:
    """A client of the trainers' store; rank 0 hosts it, as in a run."""
    if rank < trainers and trainers > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{HOST}:{port}",
            rank=rank,
            world_size=trainers,
            timeout=datetime.timedelta(seconds=90),
        )
    hosts = rank == 0 and trainers == 1
    wait = datetime.timedelta(seconds=90)
    yield dist.TCPStore(HOST, port, is_master=hosts, wait_for_workers=False, timeout=wait)
    if dist.is_initialized():
        dist.destroy_process_group()


def meet(store: dist.TCPStore, size: int, name: str) -> None:
    """Until all processes are here."""
    store.add(name, 1)
    deadline = time.monotonic() + 90
    while store.add(name, 0) < size:
        assert time.monotonic() < deadline, f"not all processes came to {name}"
        time.sleep(0.02)
