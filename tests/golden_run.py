"""The folder of a run with the golden checkpoint, made without an engine."""

from __future__ import annotations

import shutil
from pathlib import Path

from mrl.capacity.auto_settings import resolve_auto
from mrl.config.load import dump, load
from tests.mrl.training.make_golden import GOLDEN, SHAPE
from tests.tiny_models import write_model

ROOT = Path(__file__).parents[1]
STEP = 2


def write_golden_model(folder: Path) -> Path:
    """Write the model with which the golden checkpoint's run started."""
    return write_model(folder, seed=1, **SHAPE)


def write_run(parent: Path, model: Path) -> Path:
    """Write a run called `run` of 128 ranks, stopped after STEP steps."""
    words = [f"run={{name: run, folder: {parent}}}", f"model.path={model}", "training.layout={dp: 128}"]
    folder = parent / "run"
    shutil.copytree(GOLDEN / "checkpoint", folder / "checkpoints" / f"step-{STEP:06d}")
    config = load([ROOT / "configs/quickstart.yaml"], words)
    (folder / "config.yaml").write_text(dump(resolve_auto(config, gpus=False, memory_bytes=8 << 30)))
    return folder
