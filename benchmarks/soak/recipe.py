"""The run that a soak disturbs: deterministic, a tiny model, two trainer ranks, two engines."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path

from mrl.prepare import arithmetic_rows

ROOT = Path(__file__).resolve().parents[2]
PHASE_SECONDS = 120
"""Deadline that detects a stopped process; no phase of so small a run takes as long on a busy machine."""


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """Arguments of one run in any folder."""

    data: Path
    """Folder of the rows and of the model, which the first run makes."""
    steps: int
    save_every: int

    def prepare(self) -> None:
        """Write the rows unless they exist."""
        if not (self.data / "train.jsonl").is_file():
            arithmetic_rows.write_arithmetic(self.data, largest=20, num_validation=8, num_sft=8)

    def command(self, folder: Path, *, program: str = "mrl.cli") -> list[str]:
        """Return the command of `mrl train` for the run FOLDER/run."""
        return [sys.executable, "-m", program, "train", *self.words(folder)]

    def words(self, folder: Path, *extra: str) -> list[str]:
        shape = (
            "{num_layers: 2, hidden_size: 64, num_heads: 2, num_kv_heads: 2, head_dim: 32, "
            "num_experts: 4, expert_size: 32}"
        )
        return [
            str(ROOT / "configs/quickstart.yaml"),
            f"run={{name: run, folder: {folder}}}",
            f"model={{path: {self.data}/model, max_length: 16, new: {shape}}}",
            f"data={{train: {self.data}/train.jsonl, validation: null}}",
            f"reward={{kind: plugin, style: verl, path: {Path(__file__).parent}/reward.py:even_digits}}",
            f"loop={{steps: {self.steps}, prompts_per_step: 4, samples_per_prompt: 4, deterministic: true}}",
            f"loop={{phase_deadline_seconds: {PHASE_SECONDS}, max_rollout_mismatch: 1e-3}}",
            f"loop.checkpoint={{every_steps: {self.save_every}, keep: 2}}",
            "loop.validation={every_steps: 0, before_training: false, after_training: false}",
            "training.optimizer={lr: 1e-4, min_lr: 1e-4, schedule: constant, warmup_steps: 0}",
            "launch.object_store_bytes=83886080",
            *extra,
        ]


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of a command that a soak starts."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **extra}


def newest_checkpoint(run_folder: Path) -> int:
    """Return the newest checkpoint's step; 0 without checkpoints."""
    folder = run_folder / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return max((int(name[5:]) for name in names if re.fullmatch(r"step-\d+", name)), default=0)
