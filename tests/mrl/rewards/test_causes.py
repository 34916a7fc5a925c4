"""Each cause of failure is logged once."""

import logging

import pytest

from mrl.rewards.causes import CauseLog, cause_of


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("ValueError: char 17 at a.py:3", "ValueError: char 181 at a.py:3", True),
        ("ValueError: 'x' at a.py:3", "ValueError: 'y z' at a.py:3", True),
        ("no verdict in 10 s", "no verdict in 10.5 s", True),
        ("ValueError: x at a.py:3", "ValueError: x at a.py:31", False),
        ("ValueError: x at a.py:3", "KeyError: x at a.py:3", False),
    ],
)
def test_numbers_and_quoted_texts_make_no_other_cause(one: str, other: str, is_same: bool) -> None:
    assert (cause_of(one) == cause_of(other)) is is_same


def test_a_cause_is_logged_at_1_10_and_100_whatever_comes_between(caplog: pytest.LogCaptureFixture) -> None:
    causes = CauseLog(logging.getLogger("test"))
    for number in range(150):
        causes.note(f"sample {number}", f"ValueError: char {number} at a.py:3")
        causes.note(f"sample {number}", "KeyError: x at a.py:9")
    assert [record.getMessage() for record in caplog.records] == [
        "sample 0: ValueError: char 0 at a.py:3",
        "sample 0: KeyError: x at a.py:9",
        "sample 9 (10 of this cause): ValueError: char 9 at a.py:3",
        "sample 9 (10 of this cause): KeyError: x at a.py:9",
        "sample 99 (100 of this cause): ValueError: char 99 at a.py:3",
        "sample 99 (100 of this cause): KeyError: x at a.py:9",
    ]


def test_causes_without_end_make_no_log_without_end(caplog: pytest.LogCaptureFixture) -> None:
    causes = CauseLog(logging.getLogger("test"))
    for number in range(10_000):
        causes.note("sample", f"Error{chr(0x4E00 + number)}")
    assert len(caplog.records) < 80
