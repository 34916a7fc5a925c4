"""Compare two runs' last checkpoints bit by bit: weights, master weights, optimizer, random generators."""

from __future__ import annotations

from pathlib import Path

from benchmarks.soak.recipe import newest_checkpoint
from mrl.training.checkpoint.checkpoint_folder import EXTRA_FILE, MANIFEST, file_names, name_of


def differences(run: Path, other: Path) -> list[str]:
    """Return sentences about differences between the last checkpoints, except in the loop's state (times)."""
    steps = [newest_checkpoint(folder) for folder in (run, other)]
    if steps[0] != steps[1] or not steps[0]:
        return [f"{run} ended at step {steps[0]}, {other} at step {steps[1]}"]
    folders = [path / "checkpoints" / name_of(step) for path, step in zip((run, other), steps, strict=True)]
    names = sorted({name for folder in folders for name in file_names(folder)} - {EXTRA_FILE, MANIFEST})
    return [f"checkpoint file {name} differs" for name in names if not _equal(*(f / name for f in folders))]


def _equal(path: Path, other: Path) -> bool:
    return path.is_file() and other.is_file() and path.read_bytes() == other.read_bytes()
