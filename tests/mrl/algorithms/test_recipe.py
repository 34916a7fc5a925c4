"""Rewards to advantages as configured: order of blocks, domains, KL, samples without a reward, estimators."""

import numpy as np
import pytest
import torch

from mrl.algorithms import advantages, kl
from mrl.algorithms.advantages import ESTIMATORS, OUTCOME_ESTIMATORS
from mrl.algorithms.objective import Objective
from mrl.algorithms.outcomes import Outcomes, policy_lengths
from mrl.algorithms.recipe import shape_and_estimate
from mrl.algorithms.tokens import Segments
from mrl.config.sections.algorithm import AlgorithmSection
from mrl.loops.learn import denominators
from mrl.samples import Group, Sample, Status, TrainBatch
from mrl.training.batch import pack
from tests.support.samples import make_groups, make_sample, verdict_of


def sample(
    prompt: int,
    index: int,
    value: float | None,
    *,
    length: int = 3,
    status: Status = Status.FINISHED,
    domain: str = "default",
    parts: dict[str, float] | None = None,
    token_values: list[float] | None = None,
    is_return: bool = False,
) -> Sample:
    """Return a response of `length` tokens whose second is the environment's."""
    mask = np.ones(length, dtype=bool)
    mask[1:2] = False
    values = None if token_values is None else np.array(token_values, dtype=np.float32)
    return make_sample(
        prompt,
        index,
        length=length,
        loss_mask=mask,
        prompt_tokens=np.array([7, 8], dtype=np.int32),
        rollout_logprobs=np.full(length, -1.0, dtype=np.float32),
        status=status,
        domain=domain,
        verdict=verdict_of(value, parts=parts or {}, token_values=values, is_return=is_return),
    )


def groups_of(*samples: Sample) -> list[Group]:
    return make_groups(samples)


def per_sample(batch: TrainBatch, name: str = "advantages") -> list[float]:
    """Return the value on each sample's last token."""
    return [float(batch.arrays[name][stop - 1]) for stop in batch.cu_seqlens[1:]]


def estimated(config: dict, *samples: Sample, **arrays) -> tuple[TrainBatch, dict[str, float]]:
    groups = groups_of(*samples)
    section = AlgorithmSection.model_validate(config)
    return shape_and_estimate(section, pack(groups).with_arrays(**arrays), groups)


FOUR = [sample(1, 0, 1.0), sample(1, 1, 0.0, length=5), sample(4, 0, 0.0), sample(4, 1, 0.0)]


def test_defaults_are_grpo() -> None:
    batch, metrics = estimated({}, *FOUR)
    assert per_sample(batch) == pytest.approx([0.5**0.5, -(0.5**0.5), 0, 0], abs=2e-6)
    assert not batch.arrays["advantages"][~batch.loss_mask].any()
    assert batch.arrays["advantages"].dtype == np.float32
    assert metrics["reward/raw_mean"] == 0.25
    assert metrics["group/degenerate_samples_frac"] == 0.5
    assert policy_lengths(batch).tolist() == [2, 4, 2, 2]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_configured_estimator_runs_and_prefers_the_rewarded(name) -> None:
    values = {"values": np.zeros(22, dtype=np.float32)} if name == "gae" else {}
    batch, metrics = estimated({"estimator": {"name": name}}, *FOUR, **values)
    advantages = per_sample(batch)
    assert advantages[0] > max(advantages[1:])
    assert all(np.isfinite(list(metrics.values())))


def test_a_sample_without_a_reward_enters_nothing() -> None:
    samples = [sample(1, 0, 1.0), sample(1, 1, 0.0), sample(1, 2, None), sample(1, 3, 0.0)]
    batch, metrics = estimated({"estimator": {"name": "rloo"}}, *samples)
    assert per_sample(batch) == pytest.approx([1.0, -0.5, 0.0, -0.5])
    assert not batch.loss_mask[batch.cu_seqlens[2] : batch.cu_seqlens[3]].any()
    assert metrics["reward/no_reward"] == 1.0
    assert metrics["reward/raw_mean"] == pytest.approx(1 / 3)


def test_shaping_runs_in_its_order() -> None:
    """Clip to 10, overlong -0.5 (policy length 4 of max 5, buffer 2), halved for truncation, minus 1."""
    config = {
        "estimator": {"name": "dr_grpo"},
        "shaping": {
            "clip": [-10.0, 10.0],
            "overlong": {"max_tokens": 5, "buffer_tokens": 2},
            "stop_properly": 0.5,
            "missing_eos_penalty": 1.0,
        },
    }
    samples = [sample(1, 0, 30.0, length=5, status=Status.TRUNCATED), sample(1, 1, 0.0)]
    batch, metrics = estimated(config, *samples)
    shaped = (10.0 - 0.5) * 0.5 - 1.0
    assert per_sample(batch) == pytest.approx([shaped / 2, -shaped / 2])
    assert metrics["reward/clipped_frac"] == 0.5
    assert metrics["reward/shaped_mean"] == pytest.approx(shaped / 2)


CUT = [
    sample(1, 0, 1.0),
    sample(1, 1, 0.0, length=5, status=Status.TRUNCATED),
    sample(4, 0, 1.0, length=4, status=Status.TRUNCATED, domain="code"),
    sample(4, 1, 0.0, domain="code"),
]


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"])
def test_masked_truncated_samples_stay_in_the_statistics_and_leave_the_loss(name) -> None:
    """The others' advantages are the whole group's; masked samples have neither advantage nor loss mask."""
    whole, _ = estimated({"estimator": {"name": name}}, *CUT)
    config = {"estimator": {"name": name}, "shaping_by_domain": {"default": {"mask_truncated": True}}}
    batch, metrics = estimated(config, *CUT)
    start, stop = batch.cu_seqlens[1:3]
    assert metrics["reward/masked_truncated"] == 1.0
    assert not batch.loss_mask[start:stop].any()
    assert not batch.arrays["advantages"][start:stop].any()
    kept = np.delete(np.arange(batch.num_tokens), np.arange(start, stop))
    assert np.array_equal(batch.loss_mask[kept], whole.loss_mask[kept])
    assert np.array_equal(batch.arrays["advantages"][kept], whole.arrays["advantages"][kept])
    assert whole.arrays["advantages"][whole.loss_mask].all()
    counts = denominators(batch)
    assert (counts["num_tokens"], counts["num_sequences"]) == (2 + 3 + 2, 3)


def test_masked_truncated_samples_get_no_gradient_from_any_term() -> None:
    """Policy loss, KL and entropy give none; the sample's own domain decides."""
    config = {
        "shaping": {"mask_truncated": True},
        "kl": {"location": "loss", "kind": "k3", "coefficient": 0.1},
        "entropy": {"coefficient": 0.1},
    }
    batch, _ = estimated(config, *CUT)
    generator = torch.Generator().manual_seed(0)
    logprobs, entropy, reference = (torch.rand(batch.num_tokens, generator=generator) for _ in range(3))
    logprobs.requires_grad_()
    entropy.requires_grad_()
    arrays = {"loss_mask": torch.from_numpy(batch.loss_mask), "ref_logprobs": reference}
    arrays["advantages"] = torch.from_numpy(batch.arrays["advantages"])
    segments = Segments.of(batch.lengths())
    loss, _ = Objective(AlgorithmSection.model_validate(config))(
        logprobs=logprobs, entropy=entropy, arrays=arrays, segments=segments, denominators=denominators(batch)
    )
    loss.backward()
    for gradient in (logprobs.grad, entropy.grad):
        assert gradient is not None
        reached = torch.zeros(4).index_add(0, segments.ids, gradient.abs()) > 0
        assert reached.tolist() == [True, False, False, True]


def test_domains_are_shaped_apart() -> None:
    config = {
        "estimator": {"name": "reinforce_pp", "whiten": "off"},
        "shaping_by_domain": {"code": {"clip": [0.0, 3.0]}},
    }
    samples = [
        sample(1, 0, 1.0, domain="maths"),
        sample(1, 1, 0.0, domain="maths"),
        sample(2, 0, 5.0, domain="code"),
        sample(2, 1, 5.0, domain="code"),
    ]
    batch, _ = estimated(config, *samples)
    assert per_sample(batch) == pytest.approx([1.0, 0.0, 3.0, 3.0])


def test_kl_in_the_reward_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """reinforce_pp without whitening: minus 0.1 * k1 on each policy token, summed from the right."""
    config = {
        "estimator": {"name": "reinforce_pp", "whiten": "off"},
        "kl": {"location": "reward", "kind": "k1", "coefficient": 0.1},
    }
    monkeypatch.setattr(kl, "CLAMP", 1.0)
    old = np.zeros(5, dtype=np.float32)
    reference = np.array([9, 9, -0.5, 9, -3.0], dtype=np.float32)
    batch, metrics = estimated(config, sample(1, 0, 2.0), old_logprobs=old, ref_logprobs=reference)
    assert batch.arrays["advantages"].tolist() == pytest.approx([0, 0, 2.0 - 0.1 - 0.05, 0, 2.0 - 0.1])
    assert metrics["reward/kl_reference"] == pytest.approx(0.75)
    assert metrics["reward/kl_clamped_frac"] == 0.5


def test_gdpo_reads_the_verifiers_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advantages, "EPS", 1e-4)
    config = {"estimator": {"name": "gdpo", "part_weights": {"correct": 1.0, "format": 0.5}}}
    golden = [
        [(1.0, 0.2), (0.0, 0.4), (1.0, 0.6), (0.0, 0.8)],
        [(0.0, 1.0), (0.0, 0.0), (1.0, 0.0), (0.0, 1.0)],
    ]
    samples = [
        sample(p, i, sum(pair), parts={"correct": pair[0], "format": pair[1]})
        for p, row in enumerate(golden)
        for i, pair in enumerate(row)
    ]
    batch, _ = estimated(config, *samples)
    expected = [0.358619376231, -1.33240532727, 1.33240532727, -0.358619376231]
    assert per_sample(batch)[:4] == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match=r"names style, but the verifiers return parts: correct, format"):
        estimated({"estimator": {"name": "gdpo", "part_weights": {"style": 1.0}}}, *samples)


def test_process_rewards_reach_the_estimators_that_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """token_values are NaN if there is no step end; environment tokens are left out."""
    nan = float("nan")
    samples = [
        sample(1, 0, 1.0, length=4, token_values=[1.0, 9.0, nan, 0.0]),
        sample(1, 1, 0.0, length=4, token_values=[0.0, 9.0, nan, 1.0]),
    ]
    with monkeypatch.context() as patched:
        patched.setattr(advantages, "DDOF", 0)
        patched.setattr(advantages, "EPS", 0.0)
        batch, _ = estimated({"estimator": {"name": "grpo_process"}}, *samples)
    assert batch.arrays["advantages"].tolist() == [0, 0, 0, 0, -1, -1, 0, 0, 0, 0, 1, 1]
    summed, _ = estimated({"estimator": {"name": "reinforce_pp", "whiten": "off"}}, *samples)
    assert summed.arrays["advantages"].tolist() == [0, 0, 2, 0, 1, 1, 0, 0, 1, 0, 1, 1]
    apart, _ = estimated({"estimator": {"name": "rloo_process", "whiten": "off"}}, *samples)
    # process: mean of each sample 0.5, shaped 2 r - 1 at step ends; outcome: +-1 on the last token
    assert apart.arrays["advantages"].tolist() == [0, 0, 1, 0, 0, 0, 0, 0, -1, 0, 0, 0]
    plain, _ = estimated({}, *samples)
    assert per_sample(plain) == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=2e-6)


def test_a_return_is_not_added_to_the_rewards_that_it_is_the_sum_of() -> None:
    """Two of three samples sum up rewards of turns; the third has an outcome as well."""
    nan = float("nan")
    samples = [
        sample(1, 0, 1.5, token_values=[0.5, nan, 1.0], is_return=True),
        sample(1, 1, 1.0, token_values=[nan, nan, 1.0], is_return=True),
        sample(1, 2, 1.0, token_values=[0.5, nan, 0.0]),
    ]
    batch, _ = estimated({"estimator": {"name": "reinforce_pp", "whiten": "off"}}, *samples)
    assert batch.arrays["advantages"].reshape(3, 5)[:, [2, 4]].tolist() == [
        [1.5, 1.0],
        [1.0, 1.0],
        [1.5, 1.0],
    ]
    plain, _ = estimated({}, *samples)
    assert per_sample(plain)[0] > 0 > per_sample(plain)[1], "an estimator of outcomes has the sums"


def test_a_loss_of_the_users_own_gets_scores() -> None:
    batch, _ = estimated({"loss": {"name": "custom", "function": "mine:loss"}}, *FOUR)
    assert per_sample(batch, "scores") == [1, 0, 0, 0]
    assert "scores" not in estimated({}, *FOUR)[0].arrays


def test_plain_rewards_and_groups_agree() -> None:
    groups = groups_of(*FOUR)
    config = AlgorithmSection()
    by_groups, _ = shape_and_estimate(config, pack(groups), groups)
    by_rewards, _ = shape_and_estimate(config, pack(groups), np.array([1.0, 0, 0, 0]))
    assert np.array_equal(by_groups.arrays["advantages"], by_rewards.arrays["advantages"])


WHITENED = [{}, {"whiten": "tokens"}]


@pytest.mark.parametrize("whitening", WHITENED)
@pytest.mark.parametrize("name", sorted(OUTCOME_ESTIMATORS - {"gdpo", "maxrl"}))  # without a KL in the reward
def test_a_row_a_sample_gives_what_a_row_a_token_does(name, whitening, monkeypatch) -> None:
    """A KL of 0 in the reward makes rewards per token; ragged samples, some without a reward or a token."""
    rows: list[int] = []
    estimator = ESTIMATORS[name]
    monkeypatch.setitem(ESTIMATORS, name, lambda r, s: rows.append(len(r.mask)) or estimator(r, s))
    rng, samples = np.random.default_rng(1), []
    for prompt, index in np.ndindex(6, 4):
        value, domain = (0.0, 0.0, 0.3, 1.0, None)[rng.integers(5)], "code" if prompt % 2 else "maths"
        samples.append(sample(prompt, index, value, length=int(rng.integers(0, 30)), domain=domain))
    config = {"estimator": {"name": name, **whitening}, "shaping": {"mask_truncated": True}}
    by_sample, ours = estimated(config, *samples)
    zero = {"kl": {"location": "reward", "kind": "k1", "coefficient": 0.1}}
    zeros = np.zeros(by_sample.num_tokens, np.float32)
    by_token, theirs = estimated(config | zero, *samples, old_logprobs=zeros, ref_logprobs=zeros)
    assert rows == [by_sample.num_samples, by_sample.num_tokens]
    assert np.array_equal(by_sample.loss_mask, by_token.loss_mask)
    actual, expected = (batch.arrays["advantages"] for batch in (by_sample, by_token))
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-15)
    assert actual.any() and ours == pytest.approx({n: theirs[n] for n in ours}, abs=1e-12)


def test_bad_input() -> None:
    groups = groups_of(*FOUR)
    batch = pack(groups)
    with pytest.raises(ValueError, match="outcomes: 3 samples, but the batch has 4"):
        shape_and_estimate(AlgorithmSection(), batch, np.zeros(3))
    with pytest.raises(ValueError, match="rewards: inf in sample 1"):
        shape_and_estimate(AlgorithmSection(), batch, np.array([0, np.inf, 0, 0]))
    gae = AlgorithmSection.model_validate({"estimator": {"name": "gae"}})
    with pytest.raises(ValueError, match="no values, but gae needs them"):
        shape_and_estimate(gae, batch, np.zeros(4))
    kl = AlgorithmSection.model_validate({"kl": {"location": "reward", "coefficient": 0.1}})
    with pytest.raises(ValueError, match=r"no old_logprobs, but kl.location = reward needs it"):
        shape_and_estimate(kl, batch, np.zeros(4))
    with pytest.raises(ValueError, match="finished: 1 entries, but there are 2 rewards"):
        Outcomes(np.zeros(2), np.ones(1, bool), np.zeros(2, bool), ("a", "b"))
    with pytest.raises(ValueError, match=r"sample 1.0: 2 token_values for 3 tokens"):
        Outcomes.of(groups_of(sample(1, 0, 1.0, token_values=[1.0, 2.0])))
