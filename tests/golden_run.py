"""The folder of a run whose one checkpoint is the golden one, made without an engine."""

from __future__ import annotations

import shutil
from pathlib import Path

from mrl.config.load import dump, load
from tests.mrl.training.make_golden import GOLDEN, SHAPE
from tests.tiny_models import write_model

ROOT = Path(__file__).parents[1]
STEP = 2


def write_golden_model(folder: Path) -> Path:
    """The model that the golden checkpoint's run started from."""
    return write_model(folder, seed=1, **SHAPE)


def write_run(parent: Path, model: Path) -> Path:
    """A run called `run` of 128 ranks, stopped after STEP steps."""
    words = [f"run={{name: run, folder: {parent}}}", f"model.path={model}", "training.layout={dp: 128}"]
    folder = parent / "run"
    shutil.copytree(GOLDEN / "checkpoint", folder / "checkpoints" / f"step-{STEP:06d}")
    (folder / "config.yaml").write_text(dump(load([ROOT / "configs/quickstart.yaml"], words)))
    return folder
