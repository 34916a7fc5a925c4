"""`mrl tune` before its ranks start: its messages and requirements."""

from typing import Any

import pytest

from mrl.config.sections.tune import TuneSection
from mrl.launch.commands.tune import amount_of_work


def section(**changes: Any) -> TuneSection:
    return TuneSection.model_validate({"data": {"train": "rows.jsonl"}, "output": "out"} | changes)


@pytest.mark.parametrize(
    ("changes", "num_rows", "expected"),
    [
        ({"batch_rows": 8}, 24, ["24 rows, 3 steps of 8 rows in order, 1 epochs; learning rate 1e-05"]),
        (
            {"batch_rows": 8, "steps": 100, "objective": {"name": "dpo"}, "optimizer": {"warmup_steps": 5}},
            24,
            [
                "24 rows, 100 steps of 8 rows drawn with replacement, 33.3 epochs; "
                "learning rate 1e-06 after 5 steps of warm-up"
            ],
        ),
        (
            {"epochs": 2, "optimizer": {"lr": 1e-3, "schedule": "cosine", "decay_steps": 9, "min_lr": 1e-4}},
            24,
            [
                "24 rows, 1 steps of 256 rows in order, 10.7 epochs; learning rate 0.001, cosine to 0.0001",
                "warning: tune.batch_rows = 256 is more than the 24 rows, so a step repeats rows; "
                "set tune.batch_rows to 24 or fewer",
            ],
        ),
    ],
)  # fmt: skip
def test_a_start_says_how_much_it_will_do(changes, num_rows, expected) -> None:
    assert amount_of_work(section(**changes), num_rows) == expected
