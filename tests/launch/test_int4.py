"""`mrl train` from a folder of DeepSeek-V3's kind in int4, as Kimi-K2-Thinking is published: engines serve what the trainer
read, and the export is wide."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mrl.config.sections.model import NewModelSection
from mrl.observe.metrics_log import read
from tests.launch.command import run
from tests.launch.tiny_runs import words
from tests.published import publish_int4, publish_task

pytestmark = pytest.mark.integration


def test_published_int4_weights_are_trained_served_and_exported(task: Path, tmp_path: Path) -> None:
    new = NewModelSection(
        family="deepseek_v3", num_layers=2, hidden_size=64, expert_size=64, num_experts=4, head_dim=32
    )
    publish_task(task, tmp_path, new, publish_int4)
    more = ("loop.steps=2", "training.layout={ep: 2, dp: 2}", "rollout.dtype=float32")
    run("train", *words(tmp_path / "task", tmp_path, "run", *more), log=tmp_path / "log")
    rows = read(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["optim/grad_norm"] > 0 and row["policy/rollout_difference_max"] < 1e-4 for row in rows[1:])

    run("export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), log=tmp_path / "log")
    trained, before = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "out", tmp_path / "wide")
    )
    assert {name: tensor.shape for name, tensor in trained.items()} == {n: t.shape for n, t in before.items()}
    experts = "model.layers.1.mlp.experts.2.down_proj.weight"
    moved = (trained[experts] - before[experts].float()).abs()
    assert 0 < moved.max() < 5e-3  # two steps at 1e-3
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
