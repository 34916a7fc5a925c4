"""Anonymous shared memory: both ends see equal bytes, the owner's end frees it, other files are refused."""

import multiprocessing
import os
import signal
import tempfile
from pathlib import Path

import pytest
import torch

from mrl.errors import WeightSyncError
from mrl.resharding.wire.shared_memory import OpenedSegment, SharedSegment

FORK = multiprocessing.get_context("fork")


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:mrl-segment")


def test_both_sides_see_the_same_bytes_and_closing_unmaps() -> None:
    before, files = mapped(), len(os.listdir("/proc/self/fd"))
    owner = SharedSegment(4096)
    peer = OpenedSegment(owner.export())
    owner.buffer.copy_(torch.arange(4096) % 251)
    assert torch.equal(peer.buffer, owner.buffer)
    peer.buffer[7] = 255
    assert owner.buffer[7] == 255
    peer.close()
    owner.close()
    assert mapped() == before and len(os.listdir("/proc/self/fd")) == files


def test_closing_under_a_live_view_is_an_error_and_can_be_repeated() -> None:
    owner = SharedSegment(4096)
    peer = OpenedSegment(owner.export())
    view = peer.buffer[:16]
    with pytest.raises(WeightSyncError, match="still holds a tensor"):
        peer.close()
    del view
    peer.close()
    owner.close()


def test_a_view_in_a_reference_cycle_does_not_keep_the_mapping() -> None:
    owner = SharedSegment(4096)
    peer = OpenedSegment(owner.export())
    cycle: dict = {"view": peer.buffer[:16]}
    cycle["self"] = cycle
    del cycle
    peer.close()
    owner.close()


def test_the_memory_ends_with_a_killed_owner() -> None:
    ours, theirs = FORK.Pipe()

    def own() -> None:
        theirs.send(SharedSegment(1 << 20).export())
        signal.pause()

    process = FORK.Process(target=own, daemon=True)
    process.start()
    description = ours.recv()
    assert OpenedSegment(description).buffer.numel() == 1 << 20
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    with pytest.raises(WeightSyncError, match="gone or its pid was reused"):
        OpenedSegment(description)


@pytest.mark.parametrize("claimed", [0, 4097, -1])
def test_a_size_that_is_not_there_is_refused(claimed: int) -> None:
    owner = SharedSegment(4096)
    with pytest.raises(WeightSyncError, match="its description says"):
        OpenedSegment(owner.export() | {"num_bytes": claimed})
    owner.close()


def test_another_processes_pid_or_an_ordinary_file_is_refused() -> None:
    owner = SharedSegment(4096)
    with pytest.raises(WeightSyncError, match="pid was reused"):
        OpenedSegment(owner.export() | {"start_ticks": 1})
    with tempfile.TemporaryFile() as file:
        file.truncate(4096)
        with pytest.raises(WeightSyncError, match=r"not a memfd|not sealed"):
            OpenedSegment(owner.export() | {"fd": file.fileno()})
    owner.close()


def test_the_owner_cannot_shrink_it_under_the_peer() -> None:
    owner = SharedSegment(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(owner.export()["fd"], 4096)
    owner.close()
