"""Groups that share one device behave like groups with their own, deadlines included."""

from __future__ import annotations

import datetime
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mrl.cpu import gloo
from tests.ranks import run_ranks

pytestmark = pytest.mark.integration

NUM_GROUPS = 5
DEADLINE_SECONDS = 3.0


def loops() -> int:
    """Return the number of this process's threads that poll for gloo messages."""
    return sum(path.read_text() == "gloo_tcp_loop\n" for path in Path("/proc/self/task").glob("*/comm"))


def groups_of_two(rank: int, world_size: int, port: int) -> tuple[int, list[float], float]:
    """Return the threads, each group's sum, and the seconds until a sum without its other rank failed."""
    gloo.share_device()
    gloo.share_device()  # as by a second engine in the process
    assert loops() == 0, "a process that is forked now would not have the thread"
    at = f"tcp://127.0.0.1:{port}"
    timeout = datetime.timedelta(seconds=DEADLINE_SECONDS)
    dist.init_process_group("gloo", init_method=at, rank=rank, world_size=world_size, timeout=timeout)
    groups = [dist.new_group([0, 1], timeout=timeout) for _ in range(NUM_GROUPS)]
    sums = []
    for number, group in enumerate(groups):
        value = torch.tensor([10.0**number * (rank + 1)])
        dist.all_reduce(value, group=group)
        sums.append(float(value))
    begun = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            dist.all_reduce(torch.ones(1), group=groups[2])
    seconds = time.monotonic() - begun
    store = dist.distributed_c10d._get_default_store()  # type: ignore[no-untyped-call]
    store.set(f"failed-{rank}", b"")
    store.wait(["failed-0", "failed-1"], datetime.timedelta(seconds=60))
    if rank == 0:  # it owns the store, and leaves last
        store.wait(["seen"], datetime.timedelta(seconds=60))
    store.set("seen", b"")
    return loops(), sums, seconds


def test_one_thread_serves_all_groups_and_a_deadline_is_kept() -> None:
    for rank, (threads, sums, seconds) in enumerate(run_ranks(groups_of_two, 2)):
        assert threads == 1
        assert sums == [3.0 * 10.0**number for number in range(NUM_GROUPS)]
        if rank == 0:
            assert seconds >= DEADLINE_SECONDS
