"""Responses of any origin are scored in order and in groups; bad rows are refused first."""

import asyncio
from typing import Any

import numpy as np
import pytest

import mrl
from mrl.config.sections.data import DataEntry
from mrl.data.row_shapes import as_prompt, read_row
from mrl.rewards.contract import request_for
from mrl.rewards.plugins.plugin_verifier import load_plugin
from mrl.rewards.pool.trial import trial_sample
from tests.support.plugin_rewards import PLUGINS

NO_TOKENS = np.zeros(0, np.int32)


def test_verdicts_come_in_the_order_of_the_rows() -> None:
    reward = mrl.load_reward({"kind": "maths", "domains": {"form": {"kind": "format"}}})
    rows = [{"response": f"#### {n}", "ground_truth": str(n - n % 3)} for n in range(40)]
    rows.insert(20, {"response": "<think>a</think><answer>b</answer>", "domain": "form"})
    values = [verdict.value for verdict in mrl.score(reward, rows)]
    assert values.pop(20) == 1.0
    assert values == [1.0 if n % 3 == 0 else 0.0 for n in range(40)]


@pytest.mark.parametrize("prompt", ["3+4", [{"role": "user", "content": "3+4"}]])
def test_functions_get_the_columns_that_they_get_in_a_run(prompt: Any) -> None:
    """TRL functions take a row's columns by name."""
    row = {"prompt": prompt, "ground_truth": "7", "domain": "sums", "tag": "easy", "level": 2}
    reward = mrl.load_reward(
        {"kind": "plugin", "path": f"{PLUGINS}:trl_columns", "style": "trl", "workers": 1}
    )
    (scored,) = mrl.score(reward, [{**row, "response": "it is 7"}])
    entry = DataEntry(path="f")
    read = as_prompt(
        read_row(row, place="f:1", entry=entry, shape="trl"), index=0, tokens=NO_TOKENS, text="3+4"
    )
    request = request_for(trial_sample(read, "it is 7"), read, ground_truth="7", deadline_seconds=1.0)
    in_a_run = asyncio.run(load_plugin(reward).score(request))  # type: ignore[union-attr] of single samples
    assert scored.value == 1.0 and in_a_run is not None
    assert scored.parts == in_a_run.parts
    assert {"ground_truth", "level"} <= scored.parts.keys() and scored.parts["messages"] == (prompt != "3+4")


def test_rows_of_one_prompt_are_scored_as_a_group() -> None:
    path = f"{PLUGINS}:native_group"
    reward = mrl.load_reward({"kind": "plugin", "path": path, "group": True, "workers": 1})
    rows = [{"response": "7" + "!" * n, "prompt": p, "ground_truth": "7"} for n, p in enumerate("xyxxy")]
    assert [v.value for v in mrl.score(reward, rows)] == [1.0, 1.0, 0.0, 0.0, 0.0], "the shortest of x, of y"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "1", "ground_truth": "1"},
         "row 2: column `response` must be a text; the row's columns: answer"),
        ({"response": "1"}, "row 2: the row has no ground truth"),
        ({"response": "1", "domain": "chess"}, "row 2: domain 'chess' has no verifier"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_scored_is_named_before_any_is(row: dict[str, str], message: str) -> None:
    reward = mrl.load_reward({"domains": {"default": {"kind": "maths"}}})
    with pytest.raises(mrl.DataError, match=message):
        mrl.score(reward, [{"response": "1", "ground_truth": "1"}, row])


def test_a_verifier_without_an_answer_by_the_deadline_is_told() -> None:
    path = f"{PLUGINS}:blocks"
    reward = mrl.load_reward({"kind": "plugin", "path": path, "workers": 1, "deadline_seconds": 600})
    with pytest.raises(mrl.RewardError, match=r"1 of 1 responses had no verdict after 0.5 s"):
        mrl.score(reward, [{"response": "hang", "ground_truth": "1"}], deadline_seconds=0.5)
