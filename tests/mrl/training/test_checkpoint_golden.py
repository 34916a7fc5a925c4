"""Checkpoints that earlier versions of this program wrote load, and training goes on as it did then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrl.training.checkpoint.checkpoint_folder import VERSION, latest_checkpoint
from tests.mrl.training.make_golden import EXTRA, FOLDER, SHAPE
from tests.mrl.training.scenarios import digest_parameters, train, worker
from tests.ranks import run_ranks
from tests.tiny_models import write_model

VERSIONS = sorted(path.name for path in FOLDER.iterdir())


def go_on(rank: int, world: int, port: int, model: str, path: str) -> dict[str, Any]:
    at = worker(rank, world, port, model, {})
    extra = at.load_checkpoint(path)
    return {"extra": extra, "digest": digest_parameters(at.policy), "metrics": train(at, 2)}


@pytest.mark.integration
@pytest.mark.parametrize("version", VERSIONS)
def test_a_checkpoint_of_each_version_goes_on_as_recorded(version: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", seed=1, **SHAPE)
    expected = json.loads((FOLDER / version / "expected.json").read_text())
    (found,) = run_ranks(go_on, 1, str(model), str(FOLDER / version / "checkpoint"))
    assert found["extra"] == EXTRA
    assert found["digest"] == expected["digest"]
    for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        recorded = {name: ours[name] for name in theirs}  # later versions measure more
        assert recorded == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def test_the_present_version_has_its_golden_checkpoint() -> None:
    assert f"version-{VERSION}" in VERSIONS
    assert latest_checkpoint(FOLDER / f"version-{VERSION}") == FOLDER / f"version-{VERSION}/checkpoint"
    assert sum(p.stat().st_size for p in FOLDER.rglob("*") if p.is_file()) < len(VERSIONS) * 300_000
