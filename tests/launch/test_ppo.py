"""PPO through the real loop in short: the critic warms up alone, both are saved, and a poisoned critic ends the run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.files import CONFIGS
from mrl.observe.metrics_log import read
from tests.launch.command import Command, run

pytestmark = pytest.mark.integration


@pytest.fixture
def words(task: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Command-line words of a small run in this test's folder."""

    def make(*more: str) -> list[str]:
        return [
            *(str(CONFIGS / f"{name}.yaml") for name in ("quickstart", "quickstart_ppo")),
            f"run={{name: run, folder: {tmp_path}}}",
            f"model={{path: {task}/model, max_length: 16}}",
            f"data.train={task}/train.jsonl",
            f"data.validation={task}/validation.jsonl",
            "rollout.enforce_eager=true",
            "algorithm.shaping={missing_eos_penalty: 0.5}",  # a random model earns nothing else
            "loop.steps=2",
            "loop.prompts_per_step=4",
            "loop.samples_per_prompt=4",
            "loop.validation={every_steps: 0, before_training: false, after_training: false}",
            *more,
        ]

    return make


def test_the_critic_warms_up_alone_and_is_saved(words: Callable[..., list[str]], tmp_path: Path) -> None:
    run("train", *words("critic.warmup_steps=1", "routing.replay=trainer"), log=tmp_path / "log", seconds=400)
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
    # two updates a step: warm-up of 10 steps for the policy, whose first update is in step 2, and of 5 for the critic
    assert second["optim/lr"] == pytest.approx(1.5e-4 * 1.5 / 20)
    assert second["critic/lr"] == pytest.approx(5.0e-4 * 3.5 / 10)
    assert (tmp_path / "run/checkpoints/step-000002/critic/metadata.json").is_file()


def test_a_poisoned_critic_ends_the_run_before_anything_is_trained(words, task, tmp_path) -> None:
    poisoned = tmp_path / "poisoned"
    shutil.copytree(task / "model", poisoned)
    file = poisoned / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with Command("train", *words(f"critic.path={poisoned}"), log=tmp_path / "log") as command:
        code = command.wait(seconds=400)
        command.assert_nothing_left()
    assert code == 1 and "values is not finite in" in command.output, command.output[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "run/bad_samples.jsonl").read_text().splitlines()]
    assert rows and all(row["step"] == 1 and "values" in row["why"] for row in rows)
    assert not list((tmp_path / "run").glob("checkpoints/*"))
