"""Which checkpoint folders are valid, by a manifest of sizes and digests, and which one to resume from.

What is inside the files is training_state.py's. A folder has its final name only when complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from mrl.errors import CheckpointError
from mrl.files import PARTIAL

MANIFEST = "manifest.json"
VERSION = 1
log = logging.getLogger(__name__)


def name_of(step: int) -> str:
    """The name of a step's checkpoint, and of the folder exported from it."""
    return f"step-{step:06d}"


def step_of(folder: Path) -> int:
    """The step of a folder that name_of() named."""
    return int(folder.name.removeprefix("step-"))


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digests(folder: Path, names: Iterable[str]) -> dict[str, list[Any]]:
    """The [bytes, SHA-256] of files by name."""
    return {name: [(folder / name).stat().st_size, digest(folder / name)] for name in names}


def file_names(folder: Path) -> list[str]:
    """All files below the folder but the manifest, sorted."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in files if path.name != MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest; CheckpointError when it is absent, unreadable or of another version."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: {error}; the checkpoint is not complete") from error
    if manifest.get("version") != VERSION:
        raise CheckpointError(f"{path}: version {manifest.get('version')!r}, this program reads {VERSION}")
    return manifest


def verify(folder: Path) -> dict[str, Any]:
    """Returns the manifest after holding every file against it; CheckpointError names the first fault."""
    manifest = read_manifest(folder)
    for name, (size, expected) in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, {MANIFEST} lists it")
        if path.stat().st_size != size:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, {MANIFEST} says {size}")
        if digest(path) != expected:
            raise CheckpointError(
                f"{path} does not have the SHA-256 that {MANIFEST} says; the file is damaged"
            )
    if extra := sorted(set(file_names(folder)) - set(manifest["files"])):
        raise CheckpointError(f"{folder / extra[0]} is not listed in {MANIFEST}")
    return manifest


def candidates(folder: Path) -> list[Path]:
    """Committed checkpoints, newest (by name, numbers padded by the writer) first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if p.is_dir() and not p.name.endswith(PARTIAL)), reverse=True)


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The newest valid checkpoint, None when there is none at all.

    A broken one is passed over with a warning that names file and reason, and the one before it is tried.
    When all are broken: CheckpointError, never a silent start from nothing.
    """
    faults: list[str] = []
    for path in candidates(Path(folder)):
        try:
            verify(path)
        except CheckpointError as error:
            faults.append(str(error))
            log.warning("checkpoint refused: %s", error)
            continue
        return path
    if faults:
        raise CheckpointError(f"no valid checkpoint in {folder}: " + "; ".join(faults))
    return None


def prune(folder: str | Path, *, keep: int, spare: Container[str] = ()) -> list[Path]:
    """Removes all but the newest `keep` checkpoints and every abandoned one; returns what was removed.

    Those named in `spare` stay too.
    """
    assert keep >= 1, f"keep = {keep}: at least one checkpoint is kept"
    folder = Path(folder)
    abandoned = (
        [p for p in folder.iterdir() if p.is_dir() and p.name.endswith(PARTIAL)] if folder.is_dir() else []
    )
    removed = [path for path in candidates(folder)[keep:] if path.name not in spare] + abandoned
    for path in removed:
        shutil.rmtree(path)
    return removed
