"""What a judge has answered in a run, counted and kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.rewards.judges import ledger
from mrl.rewards.judges.ledger import Ledger


def test_answers_above_a_value_are_counted_as_they_come_and_as_they_are_read(tmp_path: Path) -> None:
    """A question that two processes asked at once counts as it was answered last."""
    answers = {"a": (1.0, 0.0), "b": (0.0, 1.0), "c": (1.0, 1.0), "d": (0.5,), "e": (0.6, 2.0)}
    first = Ledger(tmp_path, "judge", above=0.5)
    for key, given in answers.items():
        for value in given:
            first.note(3, key, value)
    first.note(3)
    Ledger(tmp_path, "another", above=0.5).note(3, "a", 1.0)
    again = Ledger(tmp_path, "judge", above=0.5)
    assert first.num_above == again.num_above == 3
    assert (first.calls, first.tokens) == (again.calls, again.tokens) == (10, 30)


def test_a_long_run_s_answers_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest are known, now and in a resumed run; all are counted."""
    monkeypatch.setattr(ledger, "MOST", 90)
    for scores, held in ((1, range(5, 11)), (12, range(2, 5))):
        judge = f"of {scores}"
        long = Ledger(tmp_path, judge, above=0.5)
        for number in range(100):
            long.note(3, str(number), *[number / 99] * scores)
        for known in (long, Ledger(tmp_path, judge, above=0.5)):
            assert (known.calls, known.tokens, known.num_above) == (100, 300, 50)
            found = [number for number in range(100) if known.find(str(number)) == number / 99]
            assert len(found) in held and found == list(range(found[0], 100))
