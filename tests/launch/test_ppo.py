"""PPO through the real loop in short: the critic warms up alone, and both are saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.files import CONFIGS
from mrl.observe.metrics_log import read
from tests.launch.command import run

pytestmark = pytest.mark.integration


def test_the_critic_warms_up_alone_and_is_saved(task: Path, tmp_path: Path) -> None:
    words = [
        *(str(CONFIGS / f"{name}.yaml") for name in ("quickstart", "quickstart_ppo")),
        f"run={{name: run, folder: {tmp_path}}}",
        f"model={{path: {task}/model, max_length: 16}}",
        f"data.train={task}/train.jsonl",
        f"data.validation={task}/validation.jsonl",
        "rollout.enforce_eager=true",
        "algorithm.shaping={missing_eos_penalty: 0.5}",  # a random model earns nothing else
        "loop={steps: 2, prompts_per_step: 4, samples_per_prompt: 4}",
        "loop.validation={every_steps: 0, before_training: false, after_training: false}",
        "critic.warmup_steps=1",
        "routing.replay=trainer",
    ]
    run("train", *words, log=tmp_path / "log", seconds=400)
    first, second = read(tmp_path / "run/metrics.jsonl")
    for row in (first, second):
        assert row["critic/loss"] >= 0 and row["critic/grad_norm"] > 0 and row["critic/skipped"] == 0
        assert "critic/explained_variance" in row and "critic/return_mean" in row
    assert first["critic/value_mean"] != second["critic/value_mean"]
    assert "optim/grad_norm" not in first and "policy/loss" not in first
    assert (
        0.9 < second["routing/agreement_min"] <= second["routing/agreement"] <= 1
        and "routing/agreement" not in first
    )
    assert second["optim/optimizer_steps"] == 1.5 and second["critic/optimizer_steps"] == 3.5  # means of two
    # two updates per step: warm-up is 10 steps for the policy, which starts in step 2, and 5 for the critic
    assert second["optim/lr"] == pytest.approx(1.5e-4 * 1.5 / 20)
    assert second["critic/lr"] == pytest.approx(5.0e-4 * 3.5 / 10)
    assert (tmp_path / "run/checkpoints/step-000002/critic/metadata.json").is_file()
