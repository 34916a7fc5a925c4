"""Context parallelism changes neither checkpoints nor the load-balancing loss (steps: test_layouts.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.algorithms.objective import cross_entropy
from mrl.config.sections.training import LayoutSection
from tests.mrl.training import scenarios
from tests.mrl.training.layouts import name_of
from tests.ranks import run_ranks
from tests.tiny_models import VOCAB, batch_of_tokens, write_model

pytestmark = pytest.mark.integration


def resume(folder: Path, layout: dict[str, int], out: Path) -> dict[str, Any]:
    world = LayoutSection(**layout).world_size
    return run_ranks(
        scenarios.resume_and_go_on,
        world,
        str(folder),
        layout,
        str(out / "step-00000002"),
        str(out / f"export-{world}"),
        "float32",
    )[0]


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_the_same_layout_and_without_context_parallelism(tmp_path: Path) -> None:
    folder, layout = write_model(tmp_path / "moe"), {"cp": 2, "ep": 2}
    (saved, _) = run_ranks(scenarios.save_then_go_on, 2, str(folder), layout, str(tmp_path), "float32")
    same, other = resume(folder, layout, tmp_path), resume(folder, {}, tmp_path)
    assert all(same[key] == saved[key] for key in ("digest", "metrics", "drawn"))
    for ours, theirs in zip(other["metrics"], saved["metrics"], strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)


def balanced_updates(rank: int, world: int, port: int, folder: str, layout: dict[str, int]) -> Any:
    """Run updates whose gradient is mostly the router's load-balancing loss, on segments without padding."""
    at = scenarios.worker(rank, world, port, folder, layout, router_aux_loss=0.5)
    rng = np.random.default_rng(0)
    batch = batch_of_tokens([rng.integers(0, VOCAB, 8).tolist() for _ in range(8)])
    return [at.update(batch, cross_entropy, {"num_tokens": 64}) for _ in range(2)]


@pytest.mark.parametrize(
    "layout", [{"tp": 2}, {"cp": 2}, pytest.param({"cp": 2, "tp": 2}, marks=pytest.mark.slow)], ids=name_of
)
def test_the_load_balancing_loss_is_over_all_ranks_tokens(layout: dict[str, int], tmp_path: Path) -> None:
    folder = str(write_model(tmp_path / "moe"))
    (expected,) = run_ranks(balanced_updates, 1, folder, {})
    metrics = run_ranks(balanced_updates, LayoutSection(**layout).world_size, folder, layout)[0]
    for ours, theirs in zip(metrics, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
