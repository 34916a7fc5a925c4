"""The folder whose weights adapters change, told from any other by the digest of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from mrl.config.sections.lora import LoraSection
from mrl.errors import CheckpointError
from mrl.training.checkpoint import folder as checkpoint_folder
from mrl.training.hf.folder import tensor_files


def file_digests(folder: str | Path, *, share: int = 0, shares: int = 1) -> dict[str, str]:
    """File name -> digest, of one of `shares` shares of the files that hold a folder's weights."""
    files = sorted(set(tensor_files(folder).values()))
    return {path.name: checkpoint_folder.digest(path) for path in files[share::shares]}


def digest_of(files: Mapping[str, str]) -> str:
    """One digest of all files' digests, in hex."""
    listed = " ".join(f"{name} {files[name]}" for name in sorted(files))
    return xxhash.xxh3_128(listed.encode()).hexdigest()


def about(lora: LoraSection, path: str, digest: str) -> dict[str, Any]:
    """What a checkpoint of adapters says of them in its manifest."""
    return lora.model_dump(mode="json") | {"base": path, "base_digest": digest}


def section_of(saved: Mapping[str, Any]) -> LoraSection:
    """The settings that about() told."""
    return LoraSection(**{name: saved[name] for name in LoraSection.model_fields})


def require_base(saved: Mapping[str, Any], source: Path) -> None:
    """CheckpointError unless the folder's weights are those that the adapters of about() were trained on."""
    if digest_of(file_digests(source)) != saved["base_digest"]:
        raise CheckpointError(
            f"the weights in {source} are not those that the adapters were trained on ({saved['base']}); point model.path "
            "at them"
        )
