"""Checks that every layout has to pass: against one rank, transformers, and the loaded folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mrl.config.sections.training import LayoutSection
from mrl.models.families import family_of
from tests.mrl.training import scenarios
from tests.ranks import run_ranks
from tests.tiny_models import random_batch, reference_logprobs, write_model

CORRECTION = "e_score_correction_bias"
"""How the name of a router's correction bias ends in a folder."""

BOUNDS = (5e-6, 5e-5)
"""Relative bounds of the metrics of two updates: float32 sums round, and Adam's first step, which is near
lr x sign(gradient), turns the rounding of near-zero gradients into a sign."""
DELTA_NETS = 2
"""Factor on these bounds for models with delta nets, which round more: 5.8e-5 seen, 4 of 3,072 elements."""


def name_of(layout: dict[str, int]) -> str:
    return "-".join(f"{axis}{size}" for axis, size in layout.items()) or "one"


def check_forward(results: list[dict[str, Any]], folder: Path) -> None:
    """Check log-probs and entropies against transformers' to 1e-5, each sample from exactly one rank.

    Delta nets amplify rounding, depending on the machine's kernels and mostly in few tokens. Their reference
    is float64: the RMS error is at most twice that of transformers' float32, a token's at most 16 times."""
    batch = random_batch(10, seed=1)
    logprobs, entropy = reference_logprobs(folder, batch, temperature=scenarios.TEMPERATURE)
    bound, rounding = 1e-5, None
    if "linear_num_key_heads" in (folder / "config.json").read_text():
        rounded = logprobs
        logprobs, entropy = reference_logprobs(
            folder, batch, temperature=scenarios.TEMPERATURE, dtype=torch.float64
        )
        rounding = _root_mean_square(rounded - logprobs)
        bound = max(bound, 16 * rounding)
    outputs = [result for result in results if result["arrays"] is not None]
    assert sorted(np.concatenate([r["samples"] for r in outputs]).tolist()) == list(range(10))
    gaps = []
    for result in outputs:
        spans = [np.arange(batch.cu_seqlens[i], batch.cu_seqlens[i + 1]) for i in result["samples"]]
        index = np.concatenate(spans)
        np.testing.assert_allclose(result["arrays"]["logprobs"], logprobs[index], atol=bound)
        np.testing.assert_allclose(result["arrays"]["entropy"], entropy[index], atol=bound)
        gaps.append(result["arrays"]["logprobs"] - logprobs[index])
    assert rounding is None or _root_mean_square(np.concatenate(gaps)) < 2 * rounding


def _root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.square(values).mean()))


def check_layout(
    layout: dict[str, int],
    folder: Path,
    one_rank: dict[str, Any],
    out: Path,
    stand_ins: Path | None = None,
    **changes: Any,
) -> list[dict[str, Any]]:
    """Compare a layout with one rank's results; return the results of the layout's ranks."""
    world = LayoutSection(**layout).world_size
    arguments = str(folder), layout, str(out), changes
    results = run_ranks(scenarios.forward_update_export, world, *arguments, stand_ins=stand_ins)
    check_forward(results, folder)
    slack = DELTA_NETS if "linear_num_key_heads" in (folder / "config.json").read_text() else 1
    for result in results:
        for bound, ours, theirs in zip(BOUNDS, result["metrics"], one_rank["metrics"], strict=True):
            assert ours == pytest.approx(theirs, rel=slack * bound, abs=2e-5)
        for index, offset, size in result["spans"]:
            assert offset >= 0 and offset + size <= result["memory"][index]
    original, loaded = (load_file(f / "model.safetensors") for f in (folder, out / "loaded"))
    assert original.keys() == loaded.keys()
    assert all(torch.equal(original[name], loaded[name]) for name in original)
    require_close(load_file(out / "trained" / "model.safetensors"), one_rank["trained"], slack=slack)
    return results


def require_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], *, slack: int = 1) -> None:
    """Check weights after Adam's first steps; the sign of a near-zero gradient, so its step, is rounding."""
    for name, expected in theirs.items():
        far = ((ours[name] - expected).abs() >= 1e-5).sum()
        assert far <= max(1, slack * expected.numel() // 1000), (
            f"{name}: {far} elements of {expected.numel()} differ"
        )


def check_family(
    family: str, layout: dict[str, int], one_rank_of: OneRank, out: Path, **changes: Any
) -> None:
    """Check the layout, that router margins match one rank's, and that correction biases stay unchanged."""
    folder, expected = one_rank_of.of(family)
    results = check_layout(layout, folder, expected, out, **changes)
    for result in results:
        if result["arrays"] is not None and layout.get("dp", 1) == 1:
            margins = result["arrays"]["router_margin"], expected["arrays"]["router_margin"]
            np.testing.assert_allclose(*margins, atol=1e-5)
    before, after = (load_file(f / "model.safetensors") for f in (folder, out / "trained"))
    biases = [name for name in before if name.endswith(CORRECTION)]
    assert bool(biases) == bool(family_of(json.loads((folder / "config.json").read_text())).correction)
    for bias in biases:  # frozen, and always float32
        assert before[bias].any() and torch.equal(before[bias], after[bias]), bias


class OneRank:
    """A family's folder and one rank's results from it; computed on first use."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, tuple[Path, dict[str, Any]]] = {}

    def of(self, family: str) -> tuple[Path, dict[str, Any]]:
        if family not in self._made:
            folder = write_model(self._root / family, family)
            out = self._root / f"{family}-out"
            result = run_ranks(scenarios.forward_update_export, 1, str(folder), {}, str(out), {})[0]
            trained = load_file(out / "trained" / "model.safetensors")
            self._made[family] = folder, result | {"trained": trained}
        return self._made[family]
