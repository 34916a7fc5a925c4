"""The order of a planned session's windows at one trainer rank: pack while the previous one is in flight."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mrl.models.layout import Layout
from mrl.resharding.planner.slot_plan import WindowPart
from mrl.resharding.transfer import run_session
from mrl.resharding.transfer.collectives import RankGroup
from mrl.resharding.transfer.transports import PeerTransport
from tests.resharding.planned import plan_of, world_of

CPU = torch.device("cpu")
PART = plan_of(world_of(Layout(tp=2, pp=2), Layout(tp=2, dp=2))).part(0)
NUM_WINDOWS = len(PART.windows)


class Alone(RankGroup):
    """One rank that records its calls to the others."""

    def __init__(self, events: list[Any]) -> None:
        super().__init__(None, 5.0, CPU)
        self._events = events

    def run_on_all(self, action: Callable[[], Any]) -> Any:
        result = super().run_on_all(action)
        self._events.append("agreed")
        return result


class Recorder:
    """A lane that sends nothing, and fails on request."""

    def __init__(self, events: list[Any], broken: int | None = None) -> None:
        self._events, self._broken = events, broken

    def bucket(self, turn: int) -> torch.Tensor:
        if turn == self._broken:
            raise ValueError("the lane broke on purpose")
        return torch.full((1,), turn)

    def prepare(self, turn: int, window: WindowPart) -> None:
        """Do nothing: packed bytes go as they are."""

    def start(self, turn: int, window: WindowPart, received: torch.Tensor | None) -> None:
        self._events.append(("start", turn))

    def finish(self, turn: int) -> None:
        self._events.append(("finish", turn))

    def drain(self) -> None:
        self._events.append("drain")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []
    monkeypatch.setattr(
        run_session, "run_copies", lambda table, arrays, bucket: seen.append(("pack", int(bucket)))
    )
    return seen


def test_a_window_is_packed_between_the_start_and_the_end_of_the_one_before(events: list[Any]) -> None:
    run_session._send_windows([], PART, [], Recorder(events), Alone(events))
    expected: list[Any] = []
    for turn in range(NUM_WINDOWS):
        expected += [("pack", turn), ("finish", turn - 1), "agreed", ("start", turn)]
    assert NUM_WINDOWS > 3 and events == [*expected, ("finish", NUM_WINDOWS - 1), "drain", "agreed"]


def test_what_is_under_way_is_ended_before_a_rank_says_that_it_failed(events: list[Any]) -> None:
    """Otherwise bytes of a failed session could arrive in the next one's buckets."""
    with pytest.raises(ValueError, match="broke on purpose"):
        run_session._send_windows([], PART, [], Recorder(events, broken=2), Alone(events))
    assert events[-2:] == [("start", 1), ("finish", 1)]


class Counted(RankGroup):
    """Records exchanges and waits without performing them."""

    def __init__(self, events: list[Any]) -> None:
        super().__init__(None, 5.0, CPU)
        self._events = events

    def exchange(self, sends: Any, receives: Any) -> list[Any]:
        self._events.append([data.data_ptr() for _, data in sends[::2]])  # each is followed by its digest
        return [len(self._events)]

    def wait(self, works: Any) -> None:
        self._events.append(("waited", works))


def test_peers_are_sent_to_out_of_two_buckets_in_turn_and_waited_for_once_a_window() -> None:
    seen: list[Any] = []
    lane = PeerTransport(Counted(seen), PART, {slot: slot for slot in range(4)})
    received = torch.empty(max(w.bucket_bytes for w in PART.windows), dtype=torch.uint8)
    for turn, window in enumerate(PART.windows):
        first = lane.bucket(turn).data_ptr()
        assert first != lane.bucket(turn + 1).data_ptr() and first == lane.bucket(turn + 2).data_ptr()
        lane.start(turn, window, received)
        assert seen.pop() == [first + message.offset for message in window.sends]
        lane.finish(turn)
        assert seen.pop() == ("waited", [1])
    assert sum(len(window.sends) for window in PART.windows) > 0
