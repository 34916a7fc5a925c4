"""Shipped algorithm recipes load, differ as their papers do, and work in estimator and objective."""

import numpy as np
import pytest
import torch

from mrl.algorithms.objective import Objective, ValueObjective
from mrl.algorithms.recipe import shape_and_estimate
from mrl.algorithms.tokens import Segments
from mrl.config.load import load
from mrl.samples import TrainBatch
from mrl.training.optimizer import learning_rate
from tests.support.recipes import CONFIGS, cases

RECIPES = sorted(path.stem for path in (CONFIGS / "algorithm").glob("*.yaml"))
LARGE = [files for files, _, _ in cases() if files[-1].parent.name != "records"]  # those are others' settings
WITHOUT_PENALTY = "overlong: null"


def random_batch() -> TrainBatch:
    """Return 16 samples in 4 groups with prompts of 2 tokens and 1 to 6 policy tokens."""
    generator = np.random.default_rng(3)
    responses = generator.integers(1, 7, size=16)
    bounds = np.concatenate([[0], np.cumsum(responses + 2)]).astype(np.int32)
    count = int(bounds[-1])
    mask = np.ones(count, dtype=bool)
    for start in bounds[:-1]:
        mask[start : start + 2] = False
    old = -generator.random(count).astype(np.float32)
    noise = generator.normal(size=(3, count)).astype(np.float32) / 10
    arrays = {
        "old_logprobs": old,
        "rollout_logprobs": old + noise[0],
        "ref_logprobs": old + noise[1],
        "values": noise[2],
    }
    return TrainBatch(
        tokens=np.zeros(count, dtype=np.int32),
        cu_seqlens=bounds,
        loss_mask=mask,
        group_ids=np.repeat(np.array([8, 2, 5, 3]), 4),
        sample_ids=tuple(str(i) for i in range(16)),
        arrays=arrays,
    )


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_improves_rewarded_tokens(name) -> None:
    """A gradient step at the old policy raises the best sample's log-probs relative to the worst's."""
    config = load([CONFIGS / "quickstart.yaml", CONFIGS / "algorithm" / f"{name}.yaml"]).algorithm
    batch = random_batch()
    rewards = np.tile([1.0, 0.0, 0.0, 1.0], 4)
    estimated, metrics = shape_and_estimate(config, batch, rewards)
    assert all(np.isfinite(list(metrics.values())))
    arrays = {key: torch.from_numpy(values) for key, values in estimated.arrays.items()}
    arrays["loss_mask"] = torch.from_numpy(estimated.loss_mask)
    segments = Segments.of(batch.lengths())
    denominators = {"num_tokens": float(batch.loss_mask.sum()), "num_sequences": 16.0}
    logprobs = arrays["old_logprobs"].clone().requires_grad_()
    loss, figures = Objective(config)(
        logprobs=logprobs,
        entropy=torch.ones_like(logprobs),
        arrays=arrays,
        segments=segments,
        denominators=denominators,
    )
    loss.backward()
    assert logprobs.grad is not None
    per_sample = torch.zeros(16).index_add(0, segments.ids, logprobs.grad)
    won = torch.from_numpy(rewards) == 1.0
    assert float(per_sample[won].mean()) < float(per_sample[~won].mean())
    assert float(figures["policy/entropy"]) == pytest.approx(1.0)
    assert {"policy/rollout_mismatch_kl", "policy/ratio_max", "policy/clip_frac_low"} <= set(figures)


DAPO = [
    [CONFIGS / "quickstart.yaml", CONFIGS / "algorithm" / "dapo.yaml"],
    [CONFIGS / "quickstart.yaml", CONFIGS / "quickstart_dapo.yaml"],
    *(
        files
        for files in LARGE
        if files[0].stem != "gpt_oss_120b" and WITHOUT_PENALTY not in files[-1].read_text()
    ),
]


def test_every_file_with_an_overlong_penalty_is_looked_at() -> None:
    paths = {
        path
        for path in CONFIGS.rglob("*.yaml")
        if "overlong:" in (text := path.read_text()) and WITHOUT_PENALTY not in text
    }
    assert len(paths) >= 10 and paths <= {path for files in DAPO for path in files}


@pytest.mark.parametrize("files", DAPO, ids=lambda files: files[-1].stem)
def test_the_overlong_penalty_weighs_what_it_does_in_dapos_paper(files) -> None:
    """Advantages are those of rewards +1 and -1 with a penalty of 1 for overlong responses."""
    config = load(files).algorithm
    overlong = config.shaping.overlong
    assert overlong is not None
    lengths = np.array([1, overlong.max_tokens, 1, overlong.max_tokens - overlong.buffer_tokens // 2])
    bounds = np.concatenate([[0], np.cumsum(lengths + 1)]).astype(np.int32)
    mask = np.ones(bounds[-1], dtype=bool)
    mask[bounds[:-1]] = False
    batch = TrainBatch(
        tokens=np.zeros(bounds[-1], np.int32),
        cu_seqlens=bounds,
        loss_mask=mask,
        group_ids=np.zeros(4, np.int64),
        sample_ids=tuple("abcd"),
        arrays={},
    )
    estimated, _ = shape_and_estimate(config, batch, np.array([1.0, 1.0, 0.0, 0.0]))
    advantages = estimated.arrays["advantages"][bounds[1:] - 1]
    papers = np.array([1.0, 1.0 - 1.0, -1.0, -1.0 - 0.5])
    np.testing.assert_allclose(advantages, (papers - papers.mean()) / papers.std(ddof=1), atol=1e-5)


@pytest.mark.parametrize("files", LARGE, ids=lambda files: files[-1].stem)
def test_large_recipes_warm_up_over_twenty_steps_of_the_loop(files) -> None:
    config = load(files)
    optimizer = config.in_updates().training.optimizer
    updates = config.algorithm.minibatches * config.algorithm.epochs
    assert updates > 1
    rates = [learning_rate(optimizer, update) for update in range(21 * updates)]
    assert rates[10 * updates - 1] == pytest.approx(0.5e-6)
    assert max(rates[: 20 * updates - 1]) < rates[20 * updates - 1] == rates[-1] == 1e-6


def test_ppo_recipe_trains_its_critic() -> None:
    config = load([CONFIGS / "quickstart.yaml", CONFIGS / "algorithm" / "ppo.yaml"]).algorithm
    assert config.needs_values
    batch, _ = shape_and_estimate(config, random_batch(), np.tile([1.0, 0.0], 8))
    arrays = {key: torch.from_numpy(values) for key, values in batch.arrays.items()}
    values = arrays["values"].clone().requires_grad_()
    loss, metrics = ValueObjective(config)(
        values=values,
        arrays=arrays | {"loss_mask": torch.from_numpy(batch.loss_mask)},
        segments=Segments.of(batch.lengths()),
        denominators={"num_tokens": float(batch.loss_mask.sum()), "num_sequences": 16.0},
    )
    loss.backward()
    error = (values - arrays["returns"]).detach()[torch.from_numpy(batch.loss_mask)]
    assert float(loss.detach()) == pytest.approx(float(error.square().mean()) / 2, rel=1e-6)
    assert float(metrics["critic/error_squared"]) == pytest.approx(float(error.square().mean()), rel=1e-6)
    assert values.grad is not None
    assert torch.equal(values.grad != 0, torch.from_numpy(batch.loss_mask))
