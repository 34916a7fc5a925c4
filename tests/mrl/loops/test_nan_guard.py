"""NaN and infinity stop a run and name the samples; unusual batches do not."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.errors import NumericError
from mrl.loops.group_filter import trainable
from mrl.loops.nan_guard import BadNumbers, check_batch, check_finite_rewards, check_update
from mrl.observe.samples_log import write_named
from mrl.samples import Group, Sample, Verdict, VerdictKind
from mrl.training.batch import pack
from tests.support.samples import make_groups, make_sample, verdict_of


def sample(prompt: int, index: int, value: float | None, **fields: Any) -> Sample:
    return make_sample(prompt, index, verdict=verdict_of(value), **fields)


def group(number: int, *samples: Sample) -> Group:
    (made,) = make_groups(samples)
    assert made.prompt.index == number
    return made


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_no_number_is_named_and_written_down(value: float, tmp_path: Path) -> None:
    groups = [group(4, sample(4, 0, 1.0), sample(4, 1, value), sample(4, 2, None))]
    with pytest.raises(NumericError, match=r"reward is not finite in 1 sample\(s\): 4\.1;") as caught:
        check_finite_rewards(groups)
    error: BadNumbers = pickle.loads(pickle.dumps(caught.value))
    assert error.sample_ids == ("4.1",) and str(error) == str(caught.value)
    write_named(tmp_path / "bad.jsonl", 3, error.groups, error.sample_ids, reason=str(error))
    (row,) = map(json.loads, (tmp_path / "bad.jsonl").read_text().splitlines())
    assert (row["step"], row["sample_id"], row["reward"]) == (3, "4.1", str(value))
    bad = groups[0].samples[1]
    assert row["tokens"] == [*bad.prompt_tokens, *bad.response_tokens] and "not finite" in row["why"]


def test_an_infinite_process_reward_is_named_and_a_missing_one_is_fine() -> None:
    tokens = {"fine": [0.0, np.nan, 1.0], "bad": [0.0, np.inf, 1.0]}
    for name, values in tokens.items():
        verdict = Verdict(VerdictKind.SCORED, 1.0, token_values=np.array(values, np.float32))
        groups = [group(0, dataclasses.replace(sample(0, 0, 1.0), verdict=verdict))]
        if name == "fine":
            check_finite_rewards(groups)
        else:
            with pytest.raises(BadNumbers, match=r"0\.0"):
                check_finite_rewards(groups)


def test_a_bad_log_prob_counts_only_where_it_is_trained_on() -> None:
    batch = pack([group(0, sample(0, 0, 1.0), sample(0, 1, 0.0))])
    values = np.zeros(batch.num_tokens, np.float32)
    values[0] = np.nan
    check_batch(batch.with_arrays(old_logprobs=values), ["old_logprobs"])
    values[-1] = -np.inf
    with pytest.raises(BadNumbers, match=r"old_logprobs is not finite in 1 sample\(s\): 0\.1;"):
        check_batch(batch.with_arrays(old_logprobs=values), ["old_logprobs"])


def test_a_refused_optimizer_step_ends_with_all_samples_of_its_minibatch() -> None:
    batch = pack([group(n, sample(n, 0, 1.0), sample(n, 1, 0.0)) for n in range(4)])
    check_update(batch, {"skipped": 0.0, "grad_norm": 1.0, "loss": 0.5}, "policy")
    with pytest.raises(BadNumbers, match=r"loss nan or gradient norm 0 .* 3 more") as caught:
        check_update(batch, {"skipped": 1.0, "grad_norm": 0.0}, "critic")
    assert caught.value.sample_ids == batch.sample_ids


def test_an_empty_response_is_left_out_and_an_empty_group_is_gone() -> None:
    empty = sample(0, 1, 0.0, length=0)
    alone = group(1, sample(1, 0, 0.0, length=0))
    assert [len(g.samples) for g in trainable([group(0, sample(0, 0, 1.0), empty), alone])] == [1]
    assert pack(trainable([alone])).num_tokens == 0
