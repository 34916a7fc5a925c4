"""Whether two runs ended with the same state to the last bit: weights, master weights, optimizer and random generators of their last checkpoints."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.soak.recipe import newest_checkpoint
from mrl.training.checkpoint.folder import EXTRA_FILE, MANIFEST, file_names, name_of


def differences(run: Path, other: Path) -> list[str]:
    """Sentences; none where the last checkpoints of both run folders are of one step and equal. The loop's own state, which has times, is left out."""
    steps = [newest_checkpoint(each) for each in (run, other)]
    if steps[0] != steps[1] or not steps[0]:
        return [f"{run} ended at step {steps[0]}, {other} at step {steps[1]}"]
    folders = [each / "checkpoints" / name_of(step) for each, step in zip((run, other), steps, strict=True)]
    names = sorted({name for folder in folders for name in file_names(folder)} - {EXTRA_FILE, MANIFEST})
    return [
        f"checkpoint file {name} differs" for name in names if not _equal(*(each / name for each in folders))
    ]


def _equal(path: Path, other: Path) -> bool:
    """Byte by byte, but for pickles, whose bytes say too which of their parts were one object."""
    if not (path.is_file() and other.is_file()):
        return False
    first, second = path.read_bytes(), other.read_bytes()
    return first == second or (path.suffix == ".pickle" and _same(pickle.loads(first), pickle.loads(second)))


def _same(one: object, other: object) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(np.array_equal(one, other))  # type: ignore[arg-type] arrays, tensors, numbers, text
