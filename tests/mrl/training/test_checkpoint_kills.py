"""A save killed at any point leaves a valid checkpoint and does not disturb the next save."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from mrl.training.checkpoint.checkpoint_folder import latest_checkpoint, prune
from tests.mrl.training.scenarios import digest_parameters, train, worker
from tests.ranks import run_ranks
from tests.tiny_models import write_model

pytestmark = pytest.mark.integration

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


class Snapshots:
    """Copies of the folder before each file operation inside it: the state that a kill there leaves."""

    def __init__(self, folder: Path, copies: Path) -> None:
        self._folder, self._copies, self.names = folder, copies, []
        self._on = False
        sys.addaudithook(self._hear)

    def __enter__(self) -> Snapshots:
        self._on = True
        return self

    def __exit__(self, *error: object) -> None:
        self._on = False
        self._take("end")

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._on and event in EVENTS and str(arguments[0]).startswith(str(self._folder)):
            self._on = False
            self._take(event)
            self._on = True

    def _take(self, event: str) -> None:
        name = f"{len(self.names):03d}-{event}"
        shutil.copytree(self._folder, self._copies / name)
        self.names.append(name)


def save_watched(rank: int, world: int, port: int, model: str, out: str, beside: bool) -> dict[str, Any]:
    """Save twice and watch the second save, which removes the first; then resume from every leftover.

    `beside`: train a step between the start and the commit of the second save.
    """
    at = worker(rank, world, port, model, {})
    folder, copies = Path(out, "checkpoints"), Path(out, "copies")
    digests = {}
    train(at, 1)
    at.save_checkpoint(folder / "step-000001", {"step": 1})
    digests["step-000001"] = digest_parameters(at.policy)
    train(at, 1)
    digests["step-000002"] = digest_parameters(at.policy)
    with Snapshots(folder, copies) as snapshots:
        at.save_checkpoint(folder / "step-000002", {"step": 2}, beside=beside)
        if beside:
            train(at, 1)
            at.commit_checkpoint()
        prune(folder, keep=1)
    taken = []
    for name in snapshots.names:
        latest = latest_checkpoint(copies / name)
        assert latest is not None, f"no checkpoint after a kill at {name}"
        taken.append(latest.name)
    for name in (n for n, latest in zip(snapshots.names, taken, strict=True) if latest == "step-000001"):
        assert at.load_checkpoint(copies / name / "step-000001") == {"step": 1}
        assert digest_parameters(at.policy) == digests["step-000001"]
        at.save_checkpoint(copies / name / "step-000002", {"step": 2})
        prune(copies / name, keep=2)
        assert sorted(p.name for p in (copies / name).iterdir()) == ["step-000001", "step-000002"]
    assert at.load_checkpoint(copies / snapshots.names[-1] / "step-000002") == {"step": 2}
    assert digest_parameters(at.policy) == digests["step-000002"]
    return {"names": snapshots.names, "taken": taken}


@pytest.mark.parametrize("beside", [False, True], ids=["at once", "beside training"])
def test_a_kill_at_any_point_of_a_save_leaves_a_valid_checkpoint(beside: bool, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", num_hidden_layers=2)
    (saves,) = run_ranks(save_watched, 1, str(model), str(tmp_path), beside)
    assert len(saves["names"]) >= 15 and {n[4:] for n in saves["names"]} >= {"open", "os.mkdir", "os.rename"}
    switch = saves["taken"].index("step-000002")
    assert switch > 0 and set(saves["taken"][switch:]) == {"step-000002"}, saves["taken"]
    assert saves["names"][switch - 1].endswith("os.rename"), "the new checkpoint appears by its rename alone"
