"""The clock of a step: phases add up, waits are counted separately, taking restarts both."""

import pytest

from mrl.observe import phases
from mrl.observe.phases import PhaseClock


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(phases.time, "monotonic", lambda: now[0])

    def move(seconds: float) -> None:
        now[0] += seconds

    return move


def test_phases_and_waits_add_up_until_taken(pass_time) -> None:
    clock = PhaseClock()
    for seconds in (1.0, 2.0):
        with clock.phase("generate"):
            assert clock.current == "generate"
            pass_time(seconds)
            with clock.waiting():
                pass_time(0.5)
    assert clock.take() == {"time/generate_seconds": 4.0}
    assert clock.take_waited() == 1.0
    assert clock.take() == {}
    assert clock.take_waited() == 0.0


def test_a_wait_that_fails_was_a_wait(pass_time) -> None:
    clock = PhaseClock()

    def lose() -> None:
        with clock.phase("update"), clock.waiting():
            pass_time(3.0)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        lose()
    assert clock.take_waited() == 3.0
    assert clock.current == "update", "where the error came from"
