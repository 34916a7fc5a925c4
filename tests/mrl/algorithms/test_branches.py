"""Samples of several token sequences: one reward and one place in the group, every policy token trained once.

A sample with branches is compared with the same tokens as one response, in which the branches' prompts are an
environment's tokens.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mrl.algorithms.advantages import ESTIMATORS
from mrl.algorithms.objective import Objective
from mrl.algorithms.recipe import shape_and_estimate
from mrl.algorithms.tokens import Segments
from mrl.config.sections.algorithm import AlgorithmSection
from mrl.loops.learn import denominators
from mrl.loops.staleness import token_counts
from mrl.observe.samples_log import row_of
from mrl.pool.group_bytes import size_of
from mrl.samples import Group, Prompt, Sample, TrainBatch
from mrl.training.batch import first_versions, minibatches, pack, staleness_of
from mrl.trajectories.group_messages import decode_group, encode_group
from tests.support.samples import make_sample, verdict_of

PROMPTS = [Prompt(n, np.array([1, 2], np.int32), "?", None) for n in range(2)]


def branched(prompt: int, index: int, value: float | None) -> Sample:
    """Return a sample of three sequences with 3, 2 and 4 policy tokens of the versions 5, 6 and 7.

    The last one has a reward on its last token, as programs have it."""
    *branches, main = (
        make_sample(
            prompt,
            index,
            num_prompt=2 + number,
            length=length,
            policy_versions=np.full(length, 5 + number, np.int32),
            response_text=f"sequence {number}",
        )
        for number, length in enumerate((3, 2, 4))
    )
    rewards = None if value is None else np.array([np.nan] * 3 + [value], np.float32)
    verdict = verdict_of(value, token_values=rewards, is_return=value is not None)
    return dataclasses.replace(main, branches=tuple(branches), verdict=verdict)


def joined(sample: Sample) -> Sample:
    """Return the sample's sequences as one, with the later ones' prompts as tokens of an environment."""
    first, *later = sample.sequences

    def along(name: str, nothing: object, dtype: type) -> np.ndarray:
        pieces = [getattr(first, name)]
        for sequence in later:
            prompt = sequence.prompt_tokens
            pieces += [prompt if name == "response_tokens" else np.full(len(prompt), nothing)]
            pieces += [getattr(sequence, name)]
        return np.concatenate(pieces).astype(dtype)

    mask, verdict = along("loss_mask", False, np.bool_), sample.verdict
    if later and verdict is not None and verdict.token_values is not None:
        padded = np.full(len(mask), np.nan, np.float32)
        padded[-len(verdict.token_values) :] = verdict.token_values
        verdict = dataclasses.replace(verdict, token_values=padded)
    return dataclasses.replace(
        sample,
        prompt_tokens=first.prompt_tokens,
        response_tokens=along("response_tokens", 0, np.int32),
        loss_mask=mask,
        rollout_logprobs=along("rollout_logprobs", 0.0, np.float32),
        policy_versions=along("policy_versions", -1, np.int32),
        branches=(),
        verdict=verdict,
    )


def groups(form=lambda sample: sample) -> list[Group]:
    """Return two groups of three samples; all but one per group have branches."""
    values = [[1.0, 0.0, 0.5], [0.0, None, 1.0]]
    return [
        Group(
            PROMPTS[n],
            tuple(
                form(branched(n, k, value) if k else make_sample(n, k, verdict=verdict_of(value)))
                for k, value in enumerate(row)
            ),
        )
        for n, row in enumerate(values)
    ]


def estimated(config: dict, form=lambda sample: sample) -> tuple[TrainBatch, dict[str, float]]:
    made, section = groups(form), AlgorithmSection.model_validate(config)
    batch = pack(made)
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.normal(size=batch.num_tokens).astype(np.float32)
        for name in ("old_logprobs", "ref_logprobs", "values")
    }
    return shape_and_estimate(section, batch.with_arrays(**arrays), made)


CONFIGS = [{"estimator": {"name": name}} for name in sorted(ESTIMATORS)]
CONFIGS += [
    {"estimator": {"name": name}, "kl": {"location": "reward", "coefficient": 0.1}}
    for name in sorted(ESTIMATORS)
    if name not in ("gdpo", "grpo_process", "maxrl", "rloo_process")
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_estimators_see_one_sample(config: dict) -> None:
    (batch, metrics), (whole, expected) = estimated(config), estimated(config, joined)
    assert batch.num_samples == 14 and whole.num_samples == 6
    assert np.array_equal(batch.tokens, whole.tokens) and metrics == expected
    assert np.array_equal(batch.loss_mask, whole.loss_mask)
    for array in ("advantages", *(["returns"] if "returns" in whole.arrays else [])):
        assert np.array_equal(batch.arrays[array], whole.arrays[array])


@pytest.mark.parametrize("name", ["gae", "reinforce_pp", "rloo_process", "grpo_process"])
def test_earlier_conversations_share_the_last_ones_reward(name: str) -> None:
    """The reward comes after all of them: a better sample's first conversation has the higher advantage."""
    made = [Group(PROMPTS[0], tuple(branched(0, k, value) for k, value in enumerate((1.0, 0.0))))]
    batch = pack(made)
    nothing = np.zeros(batch.num_tokens, np.float32)
    section = AlgorithmSection.model_validate({"estimator": {"name": name}})
    batch, _ = shape_and_estimate(section, batch.with_arrays(values=nothing, old_logprobs=nothing), made)
    first = [batch.spans(np.array([place]))[0].stop - 1 for place in (0, 3)]
    better, worse = batch.arrays["advantages"][first]
    assert better > worse


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "constant"])
def test_the_loss_counts_a_sample_once_in_any_microbatches(mode: str) -> None:
    """Each segment in a micro-batch of its own gives the loss and the gradient of whole samples."""
    aggregation = {"mode": mode} | ({"length": 16} if mode == "constant" else {})
    config = AlgorithmSection.model_validate({"estimator": {"name": "rloo"}, "aggregation": aggregation})
    results = []
    for form in (lambda sample: sample, joined):
        batch, _ = estimated({"estimator": {"name": "rloo"}, "aggregation": aggregation}, form)
        logprobs = torch.linspace(-2, -0.5, batch.num_tokens, dtype=torch.float64, requires_grad=True)
        divisors, total = denominators(batch), torch.zeros((), dtype=torch.float64)
        for span, segment in zip(
            batch.spans(np.arange(batch.num_samples)), range(batch.num_samples), strict=True
        ):
            arrays = {
                name: torch.from_numpy(batch.arrays[name][span]).double()
                for name in ("advantages", "rollout_logprobs", "old_logprobs")
            }
            arrays["loss_mask"] = torch.from_numpy(batch.loss_mask[span])
            values = {name: array[[segment]] for name, array in batch.samples.items()}
            loss, _ = Objective(config)(
                logprobs=logprobs[span],
                entropy=torch.ones_like(logprobs[span]),
                arrays=arrays,
                segments=Segments.of(batch.lengths()[[segment]], values=values),
                denominators=divisors,
            )
            total = total + loss
        total.backward()
        results.append((float(total.detach()), logprobs.grad, divisors))
    (loss, gradient, divisors), (expected, its_gradient, its_divisors) = results
    assert divisors == its_divisors and loss == pytest.approx(expected, rel=1e-12)
    assert torch.allclose(gradient, its_gradient, rtol=1e-12, atol=0) and bool(gradient.any())


def test_minibatches_keep_samples_whole() -> None:
    batch, _ = estimated({"estimator": {"name": "grpo"}})
    parts = [batch.select(positions) for positions in minibatches(batch, 2)]
    assert [part.num_samples for part in parts] == [7, 7]
    assert [denominators(part)["num_sequences"] for part in parts] == [3, 2], "one has no reward"
    assert [set(part.samples["sample_tokens"].tolist()) for part in parts] == [{3.0, 9.0}, {3.0, 0.0, 9.0}]


def test_versions_follow_the_sequences() -> None:
    made = groups()
    batch, staleness, first = pack(made), staleness_of(made, version=7), first_versions(made)
    last = batch.spans(np.array([6]))[0]
    assert batch.sample_ids[6] == "0.2" and set(first[last]) == {7}
    span = batch.spans(np.array([4]))[0]
    assert staleness[span].tolist() == [0, 0, 2, 2, 2]
    assert token_counts(made[0], 7).tolist() == [8, 4, 6, 0, 0, 0, 0, 3]
    assert made[0].samples[1].num_policy_tokens == 9


def test_messages_and_checkpoints_keep_branches() -> None:
    (group, _) = groups()
    again = decode_group(encode_group(group), {0: PROMPTS[0]}.__getitem__)
    assert [len(sample.branches) for sample in again.samples] == [0, 2, 2]
    for sample, copy in zip(group.sequences(), again.sequences(), strict=True):
        for field in ("prompt_tokens", "response_tokens", "loss_mask", "rollout_logprobs", "policy_versions"):
            assert np.array_equal(getattr(sample, field), getattr(copy, field)), field
        assert sample.response_text == copy.response_text
        assert (sample.verdict is None) == (copy.verdict is None)
    assert encode_group(again) == encode_group(group) and size_of(again) == size_of(group)
    judged = group.samples[1].with_verdict(verdict_of(0.25))
    assert len(judged.branches) == 2


def test_rows_of_samples_show_branches() -> None:
    (group, _) = groups()
    rows = [row_of(1, "train", group, sample) for sample in group.samples]
    assert "branches" not in rows[0]
    assert [branch["response"] for branch in rows[1]["branches"]] == ["sequence 0", "sequence 1"]
    assert [branch["response_tokens"] for branch in rows[1]["branches"]] == [3, 2]
