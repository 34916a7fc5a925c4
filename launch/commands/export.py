"""`mrl export`: a run's checkpoint as a Hugging Face folder that transformers and vLLM load unedited. One process, no engine."""

from __future__ import annotations

import json
from pathlib import Path

from mrl.config.load import load
from mrl.config.root import Config
from mrl.errors import ConfigError
from mrl.observe import metrics_log
from mrl.observe.model_card import model_card
from mrl.training.checkpoint.folder import latest_checkpoint, name_of, read_manifest, step_of, verify
from mrl.training.checkpoint.reader import DistributedCheckpoint
from mrl.training.hf import export
from mrl.training.hf.folder import read_config


def export_run(
    run_folder: str, out: str | None, *, step: int | None = None, max_shard_bytes: int | None = None
) -> str:
    """Exports the newest valid checkpoint of a run, or that of one step, to the new folder `out`; returns what was written, as text.

    Without `out` nothing is written: the text says what would be, after the checkpoint was found to hold all of it.
    """
    config, checkpoint = load([Path(run_folder) / "config.yaml"]), find_checkpoint(run_folder, step)
    source, dtype = Path(config.model.path), str(read_manifest(checkpoint)["about"]["dtype"])
    size = max_shard_bytes or config.export.max_shard_bytes
    if out is None:
        hf_config = read_config(source)
        export.plan_copies(DistributedCheckpoint(checkpoint), hf_config)
        files = export.plan_files(hf_config, dtype=dtype, file_bytes=size)
    else:
        card = _card(Path(run_folder), config, step=step_of(checkpoint), dtype=dtype)
        files = export.export_checkpoint(
            checkpoint, Path(out), source=source, dtype=dtype, file_bytes=size, card=card
        )
    return (
        f"{checkpoint} -> {out or 'nothing, this is a dry run'}: {len(files.tensors):,} tensors, {files.num_parameters:,} parameters, "
        f"{files.num_bytes:,} bytes of {dtype} in {len(files.members)} file{'s' if len(files.members) > 1 else ''}"
    )


def _card(run_folder: Path, config: Config, *, step: int, dtype: str) -> str:
    """The model card, with the last validation up to `step`."""
    versions = run_folder / "versions.json"
    rows = metrics_log.read(run_folder / "metrics.jsonl")
    validated = [row for row in rows if "val/accuracy" in row and int(row["step"]) <= step]
    return model_card(
        config,
        step=step,
        dtype=dtype,
        versions=json.loads(versions.read_text()) if versions.is_file() else {},
        row=validated[-1] if validated else None,
    )


def find_checkpoint(run_folder: str, step: int | None) -> Path:
    """A valid checkpoint of a run: that of `step`, or the newest. ConfigError where there is none, CheckpointError where it is damaged."""
    folder = Path(run_folder) / "checkpoints"
    path = latest_checkpoint(folder) if step is None else folder / name_of(step)
    if path is None or not path.is_dir():
        present = sorted(p.name for p in folder.glob("step-*"))
        raise ConfigError(
            f"{path or folder} is no checkpoint of {run_folder}; there are {', '.join(present) or 'none'}"
        )
    if step is not None:
        verify(path)
    return path
