"""A checkpoint that an earlier program wrote in the current format loads, and training resumes exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrl.training.checkpoint.checkpoint_folder import latest_checkpoint
from tests.mrl.training.make_golden import EXTRA, GOLDEN, SHAPE
from tests.mrl.training.scenarios import digest_parameters, train, worker
from tests.ranks import run_ranks
from tests.tiny_models import write_model


def go_on(rank: int, world: int, port: int, model: str, path: str) -> dict[str, Any]:
    at = worker(rank, world, port, model, {})
    extra = at.load_checkpoint(path)
    return {"extra": extra, "digest": digest_parameters(at.policy), "metrics": train(at, 2)}


@pytest.mark.integration
def test_the_golden_checkpoint_goes_on_as_recorded(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", seed=1, **SHAPE)
    expected = json.loads((GOLDEN / "expected.json").read_text())
    (result,) = run_ranks(go_on, 1, str(model), str(GOLDEN / "checkpoint"))
    assert result["extra"] == EXTRA
    assert result["digest"] == expected["digest"]
    for ours, theirs in zip(result["metrics"], expected["metrics"], strict=True):
        recorded = {name: ours[name] for name in theirs}  # later versions measure more
        assert recorded == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def test_the_present_version_has_its_golden_checkpoint() -> None:
    assert latest_checkpoint(GOLDEN) == GOLDEN / "checkpoint"
    assert sum(p.stat().st_size for p in GOLDEN.parent.rglob("*") if p.is_file()) < 300_000
