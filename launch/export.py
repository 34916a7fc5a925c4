"""`mrl export`: a run's checkpoint as a Hugging Face folder that transformers and vLLM load unedited. SPMD under torchrun."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from launch.spmd import run_torchrun, start_worker
from mrl.config.load import load
from mrl.config.root import Config
from mrl.errors import ConfigError
from mrl.training.checkpoint_folder import latest_checkpoint


def run_ranks(run_folder: str, out: str, *, step: int | None = None) -> int:
    """Exports the newest valid checkpoint of a run, or that of one step; torchrun's exit code."""
    _checkpoint(run_folder, step)
    config = _config(run_folder)
    words = [run_folder, out, *([] if step is None else [str(step)])]
    return run_torchrun("launch.export", words, config)


def main(arguments: Sequence[str]) -> None:
    """One rank."""
    run_folder, out, *step = arguments
    worker = start_worker(_config(run_folder), load=False)
    worker.load_checkpoint(str(_checkpoint(run_folder, int(step[0]) if step else None)))
    worker.export_hf(out)
    worker.close()


def _config(run_folder: str) -> Config:
    return load([Path(run_folder) / "config.yaml"])


def _checkpoint(run_folder: str, step: int | None) -> Path:
    folder = Path(run_folder) / "checkpoints"
    present = sorted(p.name for p in folder.glob("step-*"))
    path = latest_checkpoint(folder) if step is None else folder / f"step-{step:06d}"
    if path is None or not path.is_dir():
        raise ConfigError(
            f"{path or folder} is no checkpoint of {run_folder}; there are {', '.join(present) or 'none'}"
        )
    return path


if __name__ == "__main__":
    main(sys.argv[1:])
