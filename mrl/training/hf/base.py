"""Identity of a run's starting model: digests of its weights and of config.json, wherever the folder is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from mrl.config.sections.lora import LoraSection
from mrl.config.sections.model import ModelSection
from mrl.config.sections.training import TrainingSection
from mrl.errors import CheckpointError
from mrl.models.families import family_of
from mrl.models.read_keys import computed_from
from mrl.training.checkpoint import checkpoint_folder
from mrl.training.hf.hf_folder import read_config, tensor_files


def file_digests(folder: str | Path, *, share: int = 0, shares: int = 1) -> dict[str, str]:
    """Return file name -> digest, for one of `shares` shares of a folder's weight files."""
    files = _weight_files(folder)[share::shares]
    with ThreadPoolExecutor(checkpoint_folder.FILES_AT_ONCE) as threads:
        return dict(
            zip((path.name for path in files), threads.map(checkpoint_folder.file_digest, files), strict=True)
        )


def _weight_files(folder: str | Path) -> list[Path]:
    return sorted(set(tensor_files(folder).values()))


def combined_digest(files: Mapping[str, str]) -> str:
    """Return one digest of all files' digests, in hex."""
    listed = " ".join(f"{name} {files[name]}" for name in sorted(files))
    return xxhash.xxh3_128(listed.encode()).hexdigest()


def run_identity(model: ModelSection, training: TrainingSection, digest: str) -> dict[str, Any]:
    """Return what a checkpoint records about its run, which a resumed run must match.

    `digest` is that of the weights in model.path (combined_digest), empty if they are not loaded. Path, file
    sizes and times need not match: if they do, digest_like() need not read the weights again.
    """
    hf = read_config(model.path)
    family = family_of(hf)
    computed = json.dumps(computed_from(family, hf), sort_keys=True, default=str)
    about: dict[str, Any] = {
        "model_type": family.model_type,
        "dtype": training.dtype,
        "layout": dataclasses.asdict(training.layout.sizes()),
    }
    if digest:
        config_digest = xxhash.xxh3_128(computed.encode()).hexdigest()
        about["model"] = {"digest": digest, "config_digest": config_digest, **_place(model.path)}
    if training.drafts == "trained":
        about["drafts"] = "trained"
    if training.lora is not None:
        about["lora"] = adapter_identity(training.lora, model.path, digest)
    return about


def digest_like(saved: Mapping[str, Any] | None, path: str) -> str:
    """Return the digest of the weights in `path`, read unless `saved` (run_identity's "model") has it."""
    if saved is not None and all(saved.get(name) == value for name, value in _place(path).items()):
        return str(saved["digest"])
    return combined_digest(file_digests(path))


def _place(path: str) -> dict[str, Any]:
    """Return the path of weights, with [bytes, nanoseconds of the last change] of each file."""
    stats = {file.name: file.stat() for file in _weight_files(path)}
    return {
        "path": str(Path(path).resolve()),
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
    }


def adapter_identity(lora: LoraSection, path: str, digest: str) -> dict[str, Any]:
    """Return what the manifest of an adapter checkpoint records about them."""
    return lora.model_dump(mode="json") | {"base": path, "base_digest": digest}


def lora_section(saved: Mapping[str, Any]) -> LoraSection:
    """Return the settings in the result of adapter_identity()."""
    return LoraSection(**{name: saved[name] for name in LoraSection.model_fields})


def require_base(saved: Mapping[str, Any], source: Path) -> None:
    """Raise CheckpointError unless the adapters of `saved` were trained on the folder's weights."""
    if combined_digest(file_digests(source)) != saved["base_digest"]:
        raise CheckpointError(
            f"the weights in {source} are not those that the adapters were trained on ({saved['base']}); "
            "set model.path to these"
        )
