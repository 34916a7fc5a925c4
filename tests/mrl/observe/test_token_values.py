"""samples.jsonl has the batch's values for single tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from mrl.observe.samples_log import SamplesLog
from mrl.observe.token_values import TokenValues
from mrl.samples import TrainBatch
from mrl.training.batch import pack
from tests.support.samples import make_groups, make_sample, verdict_of


def texts(tokens: np.ndarray) -> list[str]:
    return [f"<{token}>" for token in tokens]


def batch_of(samples, **arrays: np.ndarray) -> TrainBatch:
    return pack(make_groups(samples)).with_arrays(**arrays)


def test_values_are_those_of_the_response_of_that_sample() -> None:
    samples = [make_sample(0, 0, num_prompt=2, length=3), make_sample(0, 1, num_prompt=2, length=2)]
    logprobs = np.array([0, 0, *samples[0].rollout_logprobs, 0, 0, *samples[1].rollout_logprobs], np.float32)
    advantages = np.array([9, 9, 1, 2, 3, 9, 9, -1.00001, -1.00002], np.float32)
    batch = batch_of(
        samples,
        old_logprobs=logprobs + np.float32(np.log(2)),
        advantages=advantages,
        age=np.array([0, 0, 1, 1, 1, 0, 0, 1, 2], np.float32),
    )
    values = TokenValues(batch, texts)
    first, second = (values.values(sample) for sample in samples)
    assert first["text"] == texts(samples[0].response_tokens)
    np.testing.assert_allclose(first["logprob"], samples[0].rollout_logprobs, atol=1e-4)
    assert (first["ratio"], first["age"], first["advantage"], first["policy"]) == (2.0, 1, [1, 2, 3], 1)
    assert (second["advantage"], second["age"]) == (-1.0, [1, 2]), "equal ones are one number"


def test_tokens_of_an_environment_are_marked_and_what_the_batch_lacks_is_left_out() -> None:
    sample = make_sample(0, 0, length=3, loss_mask=np.array([True, False, True]))
    values = TokenValues(batch_of([sample]), texts).values(sample)
    assert values["policy"] == [1, 0, 1] and values.keys() == {"text", "policy", "logprob"}


def test_a_response_without_tokens_has_no_values() -> None:
    sample = make_sample(0, 0, length=0)
    assert TokenValues(batch_of([sample]), texts).values(sample) == {"text": []}


def test_the_first_samples_of_a_step_come_with_their_tokens(tmp_path: Path) -> None:
    samples = [make_sample(group, 0, verdict=verdict_of(1.0)) for group in range(4)]
    log = SamplesLog(tmp_path / "samples.jsonl", limit=3, limit_tokens=2)
    log.write(1, make_groups(samples), tokens=TokenValues(batch_of(samples), texts))
    log.write(1, make_groups(samples), kind="validation")
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert ["tokens" in row for row in rows] == [True, True, False, False, False, False]
