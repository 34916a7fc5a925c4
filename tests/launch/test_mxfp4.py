"""`mrl train` from a folder of gpt-oss as it is published, mxfp4: engines serve what the trainer read, and the export is wide."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mrl.config.sections.model import NewModelSection
from mrl.observe.metrics_log import read
from mrl.tokenizer_folder import load_tokenizer
from tests.launch.command import run
from tests.launch.greedy_samples import compared
from tests.launch.tiny_runs import words
from tests.published import publish_mxfp4, publish_task

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def published(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task's folder with a tiny gpt-oss in mxfp4, and with `wide` beside its `model`."""
    folder = tmp_path_factory.mktemp("mxfp4")
    new = NewModelSection(
        family="gpt_oss", num_layers=2, hidden_size=64, expert_size=64, num_experts=4, head_dim=32
    )
    publish_task(task, folder, new, publish_mxfp4)
    return folder


def test_published_mxfp4_weights_are_trained_served_and_exported(published: Path, tmp_path: Path) -> None:
    task = published / "task"
    more = ("loop.steps=2", "training.spec=local", "training.layout={ep: 2, dp: 2}", "rollout.dtype=float32")
    run("train", *words(task, tmp_path, "run", *more), log=tmp_path / "log")
    rows = read(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["optim/grad_norm"] > 0 and row["policy/rollout_difference_max"] < 1e-4 for row in rows[1:])

    run("export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), log=tmp_path / "log")
    trained, before = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "out", published / "wide")
    )
    assert {name: tensor.shape for name, tensor in trained.items()} == {n: t.shape for n, t in before.items()}
    experts = "model.layers.1.mlp.experts.down_proj"
    moved = (trained[experts] - before[experts].float()).abs()
    assert 0 < moved.max() < 5e-3  # two steps at 1e-3
    assert trained[experts].std() > 0.02
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.slow
def test_an_mxfp4_folder_is_evaluated_in_bfloat16_where_vllm_has_its_kernel(
    published: Path, tmp_path: Path
) -> None:
    """On CPUs with AMX: greedy responses are those of the wide twin, but where that is torn between two tokens."""
    task, log = published / "task", tmp_path / "log"
    asked = words(task, tmp_path, "eval", "loop.validation.num_prompts=64", "--out", f"{tmp_path}/out")
    if not torch.cpu._is_amx_tile_supported():
        with pytest.raises(AssertionError, match=r"(?s)exit 2.*CPUs with AMX, which this machine lacks"):
            run("eval", *asked, log=log)
        return
    run("eval", *asked, "rollout.dtype=bfloat16", log=log)
    tokenizer = load_tokenizer(str(task / "model"))
    assert compared(tmp_path / "out/samples.jsonl", tokenizer, published / "wide", torn=0.02) > 6
    with pytest.raises(AssertionError, match=r"(?s)exit 2.*float32 is not supported for quantization method"):
        run("eval", *asked[:-1], f"{tmp_path}/wide", "rollout.dtype=float32", log=log)
