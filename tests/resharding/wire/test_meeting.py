"""Processes meet through a store, in a local file or at a port, and read each other's messages."""

import threading
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from mrl.errors import WeightSyncError
from mrl.resharding.wire.meeting import TCP, Meeting, published_by


@pytest.mark.parametrize("kind", ["a file", "a port"])
def test_ranks_meet_and_those_that_miss_one_say_whom(kind: str, tmp_path: Path) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = f"{TCP}127.0.0.1:{server.port}" if kind == "a port" else str(tmp_path / "a # file?")
    heard: dict[int, list[str]] = {}

    def join(rank: int) -> None:
        met = Meeting(store, "one", rank, 3).meet(60.0, lambda: None, message=f"I am {rank}")
        heard[rank] = [published_by(met, other) for other in range(3)]

    ranks = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [heard.get(rank) for rank in range(3)] == [["I am 0", "I am 1", "I am 2"]] * 3
    with pytest.raises(WeightSyncError, match=r"ranks \[1\] of 2 did not join in time"):
        Meeting(store, "two", 0, 2).meet(0.3, lambda: None)
