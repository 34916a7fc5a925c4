"""Samples are chosen by whole prompts, evenly, within a limit; a resumed run's later ones count."""

import json
from collections import Counter
from typing import Any

from mrl.report.samples_shown import SamplesShown
from tests.support.run_folders import sample_row


def shown(rows, **options: Any) -> dict[str, Any]:
    samples = SamplesShown(**{"max_bytes": 10**9, **options})
    for row in rows:
        samples.add(row)
    return samples.tree()


def test_what_fits_is_there_in_the_order_of_steps() -> None:
    rows = [sample_row(step, step) for step in (1, 2, 3)]
    assert shown(reversed(rows))["rows"] == rows


def test_more_than_fits_leaves_whole_prompts_spread_over_the_run() -> None:
    rows = [sample_row(prompt // 10, prompt, index) for prompt in range(4000) for index in (0, 1)]
    tree = shown(rows, max_bytes=200_000)
    sizes = Counter(row["sample_id"].partition(".")[0] for row in tree["rows"])
    assert set(sizes.values()) == {2} and tree["seen"] == 8000
    assert 150_000 < sum(len(json.dumps(row)) for row in tree["rows"]) <= 200_000
    by_quarter = Counter(row["step"] // 100 for row in tree["rows"])
    assert set(by_quarter) == {0, 1, 2, 3} and max(by_quarter.values()) < 2 * min(by_quarter.values())
    assert tree == shown(rows, max_bytes=200_000), "another choice of the same file"


def test_one_prompt_is_never_left_out_however_long() -> None:
    assert len(shown([sample_row(1, 1, response="x" * 10**6)], max_bytes=10)["rows"]) == 1


def test_the_samples_of_some_steps() -> None:
    tree = shown((sample_row(step, step) for step in range(10)), steps=(4, 6))
    assert [row["step"] for row in tree["rows"]] == [4, 5, 6] and tree["outside"] == 7


def test_what_a_resumed_run_made_again_replaces_what_was_there() -> None:
    first, again = sample_row(2, 5, response="dead"), sample_row(2, 5, response="alive")
    assert [row["response"] for row in shown([sample_row(1, 4), first, again])["rows"]] == [
        "answer 0 of step 1",
        "alive",
    ]


def test_reasons_are_counted_without_what_differs_in_each() -> None:
    tree = shown(sample_row(1, prompt) for prompt in range(50))
    assert tree["counts"]["reason"] == [("…, not …", 50)]
    assert dict(tree["counts"]["domain"]) == {"maths": 25, "code": 25}


def test_rows_of_another_version_or_with_odd_values_are_shown() -> None:
    rows = [{"step": 1, "text": "old"}, {"response": 3, "step": "x", "sample_id": None}, {"domain": ["a"]}]
    assert len(shown(rows)["rows"]) == 3
