"""Adapters on real ranks: zero adapters change nothing; steps, layouts, checkpoints and exports agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mrl.capacity.training_memory import stage_memory
from mrl.config.sections.lora import LoraSection
from mrl.config.sections.training import LayoutSection, TrainingSection
from mrl.errors import CheckpointError
from mrl.models.adapters import adapters
from mrl.models.facts import ModelSize
from mrl.training.checkpoint.checkpoint_folder import read_manifest
from mrl.training.checkpoint.reader import DistributedCheckpoint
from mrl.training.hf import export_folder, peft
from mrl.training.hf.adapted import AdaptedWeights
from mrl.training.hf.hf_folder import read_config
from tests.mrl.training import adapter_runs
from tests.mrl.training.layouts import OneRank, require_close
from tests.mrl.training.scenarios import digests_of_folder
from tests.ranks import run_ranks
from tests.tiny_models import random_batch

pytestmark = pytest.mark.integration

TARGETS = {
    "qwen3_moe": ("attention", "routed_experts"),
    "deepseek_v3": ("attention", "mlp", "shared_experts", "routed_experts"),
}


def lora_of(family: str) -> LoraSection:
    return LoraSection(rank=4, alpha=8.0, targets=TARGETS[family])


class Lives:
    """A family's run on one rank, made on first use."""

    def __init__(self, root: Path, one_rank: OneRank) -> None:
        self._root, self._one_rank = root, one_rank
        self._made: dict[str, dict[str, Any]] = {}

    def of(self, family: str) -> tuple[Path, Path, dict[str, Any]]:
        """Return the model's folder, that of checkpoint and export, and the rank's results."""
        folder, out = self._one_rank.of(family)[0], self._root / family
        if family not in self._made:
            changes = {"lora": lora_of(family)}
            (self._made[family],) = run_ranks(adapter_runs.life, 1, str(folder), {}, str(out), changes)
        return folder, out, self._made[family]


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory, one_rank_of: OneRank) -> Lives:
    return Lives(tmp_path_factory.mktemp("lora"), one_rank_of)


def check_life(result: dict[str, Any]) -> None:
    """The reference is bitwise the policy before its first update, and its swap leaves no trace."""
    if result["before"] is not None:
        for name in ("logprobs", "entropy"):
            np.testing.assert_array_equal(result["reference_before"][name], result["before"][name])
            np.testing.assert_array_equal(result["reference"][name], result["before"][name])
        assert np.abs(result["arrays"]["logprobs"] - result["before"]["logprobs"]).max() > 1e-3
    assert result["swapped"] == result["digest"] != result["loaded"]
    assert "lease" in result["leased"]


def test_a_zero_adapter_changes_no_bit(lives: Lives, one_rank_of: OneRank) -> None:
    """Log-probs and the parameters that engines read stay bitwise equal."""
    folder, _, result = lives.of("qwen3_moe")
    check_life(result)
    whole = one_rank_of.of("qwen3_moe")[1]
    np.testing.assert_array_equal(result["before"]["logprobs"], whole["arrays"]["logprobs"])
    assert [result["loaded"]] == digests_of_folder(folder, {}, dtype="float32")


@pytest.mark.parametrize(
    ("dtype", "recompute", "bound"), [("float32", "full", 1e-4), ("bfloat16", "off", 0.02)]
)
def test_a_step_is_the_full_step_restricted(dtype, recompute, bound, one_rank_of, tmp_path) -> None:
    """dA = s B^T dW and dB = s dW A^T, with the full model's dW at the same weights."""
    folder, _ = one_rank_of.of("deepseek_v3")
    arguments = str(folder), str(tmp_path), lora_of("deepseek_v3"), dtype, recompute
    (difference,) = run_ranks(adapter_runs.restricted_step, 1, *arguments)
    assert difference < bound


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3_moe", {"tp": 2, "pp": 2}), ("deepseek_v3", {"tp": 2, "ep": 2})],
    ids=["qwen3_moe-tp2-pp2", "deepseek_v3-tp2-ep2"],
)
def test_layouts_agree_and_resume(family: str, layout: dict[str, int], lives: Lives, tmp_path: Path) -> None:
    """Metrics, log-probs, merged weights and memory match one rank's, which also resumes the checkpoint."""
    folder, out, one = lives.of(family)
    lora, world = lora_of(family), LayoutSection(**layout).world_size
    results = run_ranks(adapter_runs.life, world, str(folder), layout, str(tmp_path), {"lora": lora})
    batch = random_batch(10, seed=1)
    for rank in results:
        check_life(rank)
        for ours, theirs in zip(rank["metrics"] + rank["more"], one["metrics"] + one["more"], strict=True):
            assert ours == pytest.approx(theirs, abs=5e-5)
        if rank["arrays"] is not None:
            assert len(rank["samples"]) == batch.num_samples
            np.testing.assert_allclose(rank["arrays"]["logprobs"], one["arrays"]["logprobs"], atol=2e-5)
    assert [rank["loaded"] for rank in results] == digests_of_folder(folder, layout, dtype="float32")
    check_memory(folder, layout, lora, results)
    merged, expected = (load_file(at / "merged" / "model.safetensors") for at in (tmp_path, out))
    require_close(merged, expected)
    (resumed,) = run_ranks(
        adapter_runs.resumed, 1, str(folder), {}, str(tmp_path / "step-000002"), {"lora": lora}
    )
    for ours, theirs in zip(resumed["more"], one["more"], strict=True):
        assert ours == pytest.approx(theirs, abs=5e-5)


def check_memory(
    folder: Path, layout: dict[str, int], lora: LoraSection, results: list[dict[str, Any]]
) -> None:
    """Compare weights, gradients (but the one in flight) and optimizer state of each stage's first rank."""
    training = TrainingSection(layout=LayoutSection(**layout), dtype="float32", lora=lora)
    facts, sizes = ModelSize(read_config(folder), ""), training.layout.sizes()
    planned = stage_memory(facts, training)
    for stage, memory in enumerate(planned):
        place = sizes.coordinates(stage * sizes.tp * sizes.cp * sizes.dp)
        changed = {a.parameter for a in adapters(facts.family, facts.hf, sizes, place, lora)}
        table = facts.family.local_tensors(facts.hf, sizes, place)
        largest = max(int(np.prod(t.shape)) for t in table if t.name in changed)
        real = results[place.rank]["held"]
        assert memory.weights == real["weights"]
        assert memory.gradients == real["gradients"] + 4 * largest
        assert memory.optimizer == pytest.approx(real["optimizer"], rel=0.02)


def test_the_same_layout_goes_on_to_the_last_bit(lives: Lives) -> None:
    folder, out, before = lives.of("qwen3_moe")
    arguments = str(folder), {}, str(out / "step-000002"), {"lora": lora_of("qwen3_moe")}
    (after,) = run_ranks(adapter_runs.resumed, 1, *arguments)
    assert after["extra"] == {"position": 2}
    for key in ("digest", "more", "end"):
        assert after[key] == before[key], key


def test_exports_of_an_adapter_checkpoint(lives: Lives, tmp_path: Path) -> None:
    """The merged export is what the rank held; the PEFT folder's products are what was added to the base."""
    folder, out, _ = lives.of("deepseek_v3")
    checkpoint, base = out / "step-000002", load_file(folder / "model.safetensors")
    lora = read_manifest(checkpoint)["about"]["lora"]
    export_folder.export_checkpoint(
        checkpoint, tmp_path / "merged", source=folder, dtype="float32", lora=lora
    )
    ours, held = (load_file(at / "merged" / "model.safetensors") for at in (tmp_path, out))
    assert ours.keys() == held.keys() == base.keys()
    for name in held:
        torch.testing.assert_close(ours[name], held[name], atol=1e-6, rtol=1e-6)
    weights = AdaptedWeights(DistributedCheckpoint(checkpoint), folder, read_config(folder), lora)
    peft.export_adapter(weights, tmp_path / "adapter", base=str(folder), dtype="float32", tensors=list(base))
    pairs = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    changed = {name for name in base if not torch.equal(base[name], held[name])}
    assert {
        f"base_model.model.{n.removesuffix('weight')}lora_{h}.weight" for n in changed for h in "AB"
    } == set(pairs)
    for name in changed:
        a, b = (pairs[f"base_model.model.{name.removesuffix('weight')}lora_{half}.weight"] for half in "AB")
        torch.testing.assert_close(base[name] + 2.0 * b @ a, held[name], atol=1e-5, rtol=1e-5)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8.0, "LORA")
    assert {"kv_b_proj", "o_proj", "down_proj"} <= set(config["target_modules"])


def test_a_checkpoint_of_other_adapters_is_refused(lives: Lives, tmp_path: Path) -> None:
    folder, out, _ = lives.of("qwen3_moe")
    checkpoint = out / "step-000002"
    wrong = read_manifest(checkpoint)["about"]["lora"] | {"base_digest": "0"}
    with pytest.raises(CheckpointError, match="not those that the adapters were trained on"):
        export_folder.export_checkpoint(
            checkpoint, tmp_path / "a", source=folder, dtype="float32", lora=wrong
        )
    changes = {"lora": LoraSection(rank=2, targets=TARGETS["qwen3_moe"])}
    with pytest.raises(AssertionError, match=r"training.lora.rank = 4, but the run 2"):
        run_ranks(adapter_runs.resumed, 1, str(folder), {}, str(checkpoint), changes)
