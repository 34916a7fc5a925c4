"""Valid checkpoint folders, by a manifest of sizes and digests, and the one to resume from.

training_state.py defines the contents. A folder has its final name only when complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from mrl.errors import CheckpointError, DamagedCheckpoint
from mrl.files import PARTIAL
from mrl.training.checkpoint import plain_values

MANIFEST = "manifest.json"
DAMAGED = ".damaged"
"""Suffix of a rejected checkpoint whose step was saved again."""
EXTRA_FILE = "extra.msgpack"
"""The loop's state, and the saver's other values (plain_values.py)."""
VERSION = 4
"""Version of the manifest; others are rejected."""
FILES_AT_ONCE = 8
log = logging.getLogger(__name__)


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint, and of the folder exported from it."""
    return f"step-{step:06d}"


def step_of(folder: Path) -> int:
    """Return the step of a folder named by name_of()."""
    return int(folder.name.removeprefix("step-"))


def file_digest(path: Path, kind: Callable[[], Any] = xxhash.xxh3_128) -> str:
    """Return a file's digest, in hex."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, kind).hexdigest()


def digests(
    folder: Path, names: Iterable[str], kind: Callable[[], Any] = xxhash.xxh3_128
) -> dict[str, list[Any]]:
    """Return [bytes, digest] of files by name; FILES_AT_ONCE are read in parallel."""
    names = list(names)
    with ThreadPoolExecutor(FILES_AT_ONCE) as threads:
        hashes = threads.map(lambda name: file_digest(folder / name, kind), names)
        return {
            name: [(folder / name).stat().st_size, digest] for name, digest in zip(names, hashes, strict=True)
        }


def file_names(folder: Path) -> list[str]:
    """Return all files below the folder except the manifest, sorted."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in files if path.name != MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest; raise DamagedCheckpoint if it is absent, unreadable or of another version."""
    path = folder / MANIFEST
    try:
        if path.exists() and not path.is_file():
            raise OSError("not a regular file")
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: {error}; the checkpoint is not complete") from error
    version = manifest.get("version") if isinstance(manifest, dict) else None
    if version != VERSION:
        raise DamagedCheckpoint(f"{path}: version {str(version)[:80]!r}, but this program reads {VERSION}")
    if not _is_manifest(manifest):
        raise DamagedCheckpoint(
            f"{path}: it does not list files with their sizes and digests; the file is damaged"
        )
    return manifest


def _is_manifest(tree: dict[str, Any]) -> bool:
    """Return True if it has files by name with [bytes, digest], and what the checkpoint is about."""
    files, about = tree.get("files"), tree.get("about")
    return (
        isinstance(about, dict)
        and isinstance(files, dict)
        and all(isinstance(entry, list) and list(map(type, entry)) == [int, str] for entry in files.values())
    )


def verify_files(folder: Path, *, share: int = 0, shares: int = 1) -> dict[str, Any]:
    """Return the manifest after checking files against it; DamagedCheckpoint names the first fault.

    Checks sizes and digests of one of `shares` shares of the files, nearly equal in bytes; share 0 also
    checks all names and sizes. So processes verify the whole together, each byte once, and do not all query a
    shared file system for every file.
    """
    manifest = verify_sizes(folder) if share == 0 else read_manifest(folder)
    for name in share_of(manifest, share, shares):
        size, known = manifest["files"][name]
        _require_size(folder / name, size)
        if file_digest(folder / name) != known:
            raise DamagedCheckpoint(
                f"{folder / name} does not have the digest in {MANIFEST}; the file is damaged"
            )
    return manifest


def verify_sizes(folder: Path) -> dict[str, Any]:
    """Return the manifest after checking only names and sizes; DamagedCheckpoint names the first fault."""
    manifest = read_manifest(folder)
    for name, (size, _) in manifest["files"].items():
        _require_size(folder / name, size)
    if extra := sorted(set(file_names(folder)) - set(manifest["files"])):
        raise DamagedCheckpoint(f"{folder / extra[0]} is not listed in {MANIFEST}")
    return manifest


def _require_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise DamagedCheckpoint(f"{path} is missing, but {MANIFEST} lists it")
    if (actual := path.stat().st_size) != size:
        raise DamagedCheckpoint(f"{path} has {actual} bytes, but {MANIFEST} lists {size}")


def share_of(manifest: dict[str, Any], share: int, shares: int) -> list[str]:
    """Return the names of a share of a checkpoint's files, dealt from largest to smallest and back."""
    names = sorted(manifest["files"], key=lambda name: (-manifest["files"][name][0], name))
    return names[share :: 2 * shares] + names[2 * shares - 1 - share :: 2 * shares]


def candidates(folder: Path) -> list[Path]:
    """Return committed checkpoints, newest first (by name; the writer pads numbers)."""
    if not folder.is_dir():
        return []
    others = (PARTIAL, DAMAGED)
    return sorted((p for p in folder.iterdir() if p.is_dir() and not p.name.endswith(others)), reverse=True)


def rename_rejected_from(path: Path) -> None:
    """Rename this step's checkpoint and later ones before the step is saved. The run resumed from an earlier
    one, so these were rejected, and prune() must not take them for the newest."""
    for refused in candidates(path.parent):
        if refused.name >= path.name:
            aside = refused.with_name(refused.name + DAMAGED)
            shutil.rmtree(aside, ignore_errors=True)  # an earlier damaged one of this step
            refused.rename(aside)
            log.warning("%s was rejected and renamed to %s: its step is saved again", refused, aside.name)


def read_extra(folder: Path) -> dict[str, Any]:
    """Return the saver's values besides the ranks' state; CheckpointError if unreadable. Runs no code."""
    path = folder / EXTRA_FILE
    try:
        extra = plain_values.loads(path.read_bytes())
        if not isinstance(extra, dict) or not isinstance(extra.get("user"), dict):
            raise ValueError("it lacks the loop's state")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error!r}): if another release of mrl saved it (versions.json of the "
            "run), resume with that release, or start a new run from the weights (mrl export, model.path)"
        ) from error
    return extra


def latest_checkpoint(folder: str | Path) -> Path | None:
    """Return the newest valid checkpoint, verified by this process; None and errors as in take_latest()."""
    return take_latest(folder, verify_files)[0]


def take_latest[T](folder: str | Path, take: Callable[[Path], T]) -> tuple[Path | None, T | None]:
    """Return the newest valid checkpoint and the result of `take`; (None, None) if there is none at all.

    `take` verifies, and raises DamagedCheckpoint for an invalid folder. That one is skipped with a warning
    that names file and reason, and the previous one is tried. If all are damaged, raise CheckpointError:
    never silently start from scratch.
    """
    faults: list[str] = []
    for path in candidates(Path(folder)):
        try:
            return path, take(path)
        except DamagedCheckpoint as error:
            faults.append(str(error))
            log.warning("checkpoint rejected: %s", error)
    if faults:
        raise CheckpointError(f"no valid checkpoint in {folder}: " + "; ".join(faults))
    return None, None


def prune(folder: str | Path, *, keep: int, spare: Container[str] = ()) -> list[Path]:
    """Remove all but the newest `keep` checkpoints and those in `spare`, every abandoned one, and damaged
    ones older than these; return the removed."""
    assert keep >= 1, f"keep = {keep}: at least one checkpoint is kept"
    folder = Path(folder)
    abandoned = (
        [p for p in folder.iterdir() if p.is_dir() and p.name.endswith(PARTIAL)] if folder.is_dir() else []
    )
    committed = candidates(folder)
    oldest = committed[:keep][-1].name if committed else ""
    damaged = [path for path in folder.glob(f"*{DAMAGED}") if path.is_dir() and path.name < oldest]
    removed = [path for path in committed[keep:] if path.name not in spare] + abandoned + damaged
    for path in removed:
        shutil.rmtree(path)
    return removed
