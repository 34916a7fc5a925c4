"""`mrl export`: write a run's checkpoint as a Hugging Face folder for transformers and vLLM."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from mrl.config.load import load
from mrl.config.root import Config
from mrl.config.sections.export import MAX_SHARD_BYTES
from mrl.errors import ConfigError
from mrl.files import output_lock
from mrl.models.families import family_of
from mrl.observe import metrics_log
from mrl.observe.model_card import model_card
from mrl.training.checkpoint.checkpoint_folder import (
    latest_checkpoint,
    name_of,
    read_manifest,
    step_of,
    verify_files,
)
from mrl.training.checkpoint.reader import DistributedCheckpoint
from mrl.training.hf import export_folder, peft
from mrl.training.hf.adapted import AdaptedWeights
from mrl.training.hf.hf_folder import read_config


def export_run(
    run_folder: str,
    out: str | None,
    *,
    step: int | None = None,
    max_shard_bytes: int | None = None,
    adapter: bool = False,
) -> str:
    """Export the newest valid checkpoint of a run, or that of one step; return a text about the files.

    Args:
        out: New folder; None only checks that the checkpoint is complete, and writes nothing.
        adapter: Export only the adapters of training.lora, as a folder of the PEFT library.
    """
    with output_lock(Path(out), "--out") if out else contextlib.nullcontext():
        return _export_run(run_folder, out, step=step, max_shard_bytes=max_shard_bytes, adapter=adapter)


def _export_run(
    run_folder: str, out: str | None, *, step: int | None, max_shard_bytes: int | None, adapter: bool
) -> str:
    config, checkpoint = load([Path(run_folder) / "config.yaml"]), find_checkpoint(run_folder, step)
    about = read_manifest(checkpoint)["about"]
    source, dtype, lora = Path(config.model.path), str(about["dtype"]), about.get("lora")
    if adapter:
        return _export_adapter(checkpoint, out, source, dtype, lora)
    size = max_shard_bytes or MAX_SHARD_BYTES
    if out is None:
        hf_config = read_config(source)
        drafts = export_folder.weights_of(checkpoint, source, hf_config, lora).has_drafts
        files = export_folder.plan_files(
            source, hf_config, dtype=dtype, file_bytes=size, trained_drafts=drafts
        )
    else:
        card = _card(Path(run_folder), config, step=step_of(checkpoint), dtype=dtype)
        files = export_folder.export_checkpoint(
            checkpoint, Path(out), source=source, dtype=dtype, file_bytes=size, card=card, lora=lora
        )
    return (
        f"{checkpoint} -> {out or 'nothing, this is a dry run'}: {len(files.tensors):,} tensors, "
        f"{files.num_parameters:,} parameters, {files.num_bytes:,} bytes of {dtype} in "
        f"{len(files.members)} file{'s' if len(files.members) > 1 else ''}"
    )


def _export_adapter(
    checkpoint: Path, out: str | None, source: Path, dtype: str, lora: dict[str, Any] | None
) -> str:
    if lora is None:
        raise ConfigError(
            f"{checkpoint} contains all weights and no adapters (training.lora); export it without --adapter"
        )
    hf_config = read_config(source)
    weights = AdaptedWeights(DistributedCheckpoint(checkpoint), source, hf_config, lora)
    names = [tensor.name for tensor in family_of(hf_config).checkpoint_tensors(hf_config)]
    size = "nothing, this is a dry run"
    if out is not None:
        num_bytes = peft.export_adapter(weights, Path(out), base=str(source), dtype=dtype, tensors=names)
        size = f"{out}, {num_bytes:,} bytes of {dtype}"
    return f"{checkpoint} -> {size}: adapters of {len(weights.changed):,} tensors, rank {weights.lora.rank}"


def _card(run_folder: Path, config: Config, *, step: int, dtype: str) -> str:
    """Return the model card, with the last validation up to `step`."""
    versions = run_folder / "versions.json"
    rows = metrics_log.read(run_folder / "metrics.jsonl")
    validated = [row for row in rows if "val/reward" in row and int(row["step"]) <= step]
    return model_card(
        config,
        step=step,
        dtype=dtype,
        versions=json.loads(versions.read_text()) if versions.is_file() else {},
        row=validated[-1] if validated else None,
    )


def find_checkpoint(run_folder: str, step: int | None) -> Path:
    """Return the valid checkpoint of `step`, or the newest. ConfigError: none; CheckpointError: damaged."""
    folder = Path(run_folder) / "checkpoints"
    path = latest_checkpoint(folder) if step is None else folder / name_of(step)
    if path is None or not path.is_dir():
        present = sorted(p.name for p in folder.glob("step-*"))
        raise ConfigError(
            f"{path or folder} is not a checkpoint of {run_folder}, which has {', '.join(present) or 'none'}"
        )
    if step is not None:
        verify_files(path)
    return path
