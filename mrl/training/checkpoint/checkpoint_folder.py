"""Which checkpoint folders are valid, by a manifest of sizes and digests, and which one to resume from.

What is inside the files is training_state.py's. A folder has its final name only when complete.
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
"""What the name of a checkpoint ends in that was refused, and whose step was saved again."""
EXTRA_FILE = "extra.msgpack"
"""The loop's state, and what else the saver gave (plain_values.py)."""
VERSION = 4
"""The manifest's. Others are refused."""
FILES_AT_ONCE = 8
log = logging.getLogger(__name__)


def name_of(step: int) -> str:
    """The name of a step's checkpoint, and of the folder exported from it."""
    return f"step-{step:06d}"


def step_of(folder: Path) -> int:
    """The step of a folder that name_of() named."""
    return int(folder.name.removeprefix("step-"))


def file_digest(path: Path, kind: Callable[[], Any] = xxhash.xxh3_128) -> str:
    """The digest of a file, in hex."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, kind).hexdigest()


def digests(
    folder: Path, names: Iterable[str], kind: Callable[[], Any] = xxhash.xxh3_128
) -> dict[str, list[Any]]:
    """The [bytes, digest] of files by name; FILES_AT_ONCE are read side by side."""
    names = list(names)
    with ThreadPoolExecutor(FILES_AT_ONCE) as threads:
        found = threads.map(lambda name: file_digest(folder / name, kind), names)
        return {name: [(folder / name).stat().st_size, each] for name, each in zip(names, found, strict=True)}


def file_names(folder: Path) -> list[str]:
    """All files below the folder but the manifest, sorted."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in files if path.name != MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest; DamagedCheckpoint when it is absent, unreadable or of another version."""
    path = folder / MANIFEST
    try:
        if path.exists() and not path.is_file():
            raise OSError("no plain file")
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: {error}; the checkpoint is not complete") from error
    version = manifest.get("version") if isinstance(manifest, dict) else None
    if version != VERSION:
        raise DamagedCheckpoint(f"{path}: version {str(version)[:80]!r}, this program reads {VERSION}")
    if not _is_manifest(manifest):
        raise DamagedCheckpoint(
            f"{path}: it does not list files with their sizes and digests; the file is damaged"
        )
    return manifest


def _is_manifest(tree: dict[str, Any]) -> bool:
    """Whether it has what readers take: files by name with [bytes, digest], and what the checkpoint is about."""
    files, about = tree.get("files"), tree.get("about")
    return (
        isinstance(about, dict)
        and isinstance(files, dict)
        and all(isinstance(each, list) and list(map(type, each)) == [int, str] for each in files.values())
    )


def verify_files(folder: Path, *, share: int = 0, shares: int = 1) -> dict[str, Any]:
    """Returns the manifest after holding files against it; DamagedCheckpoint names the first fault.

    Sizes and digests of one of `shares` shares of the files are compared, nearly equal in bytes, and by share 0 all names and sizes: as
    many processes verify the whole together, each byte once, and do not all ask a shared file system for every file.
    """
    manifest = verify_sizes(folder) if share == 0 else read_manifest(folder)
    for name in share_of(manifest, share, shares):
        size, known = manifest["files"][name]
        _require_size(folder / name, size)
        if file_digest(folder / name) != known:
            raise DamagedCheckpoint(
                f"{folder / name} does not have the digest that {MANIFEST} says; the file is damaged"
            )
    return manifest


def verify_sizes(folder: Path) -> dict[str, Any]:
    """Returns the manifest after holding names and sizes against it, without reading a file; DamagedCheckpoint names the first fault."""
    manifest = read_manifest(folder)
    for name, (size, _) in manifest["files"].items():
        _require_size(folder / name, size)
    if extra := sorted(set(file_names(folder)) - set(manifest["files"])):
        raise DamagedCheckpoint(f"{folder / extra[0]} is not listed in {MANIFEST}")
    return manifest


def _require_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise DamagedCheckpoint(f"{path} is missing, {MANIFEST} lists it")
    if (found := path.stat().st_size) != size:
        raise DamagedCheckpoint(f"{path} has {found} bytes, {MANIFEST} says {size}")


def share_of(manifest: dict[str, Any], share: int, shares: int) -> list[str]:
    """The names of one share of a checkpoint's files, dealt out from the largest to the smallest, there and back."""
    names = sorted(manifest["files"], key=lambda name: (-manifest["files"][name][0], name))
    return names[share :: 2 * shares] + names[2 * shares - 1 - share :: 2 * shares]


def candidates(folder: Path) -> list[Path]:
    """Committed checkpoints, newest (by name, numbers padded by the writer) first."""
    if not folder.is_dir():
        return []
    others = (PARTIAL, DAMAGED)
    return sorted((p for p in folder.iterdir() if p.is_dir() and not p.name.endswith(others)), reverse=True)


def set_aside_from(path: Path) -> None:
    """Gives the checkpoint of this step, and later ones, another name before the step is saved: the run resumed from one before,
    so that these were refused, and prune() must not take them for the newest."""
    for refused in candidates(path.parent):
        if refused.name >= path.name:
            aside = refused.with_name(refused.name + DAMAGED)
            shutil.rmtree(aside, ignore_errors=True)  # one of the same step that was damaged before
            refused.rename(aside)
            log.warning("%s was refused, and is now %s: its step is saved again", refused, aside.name)


def read_extra(folder: Path) -> dict[str, Any]:
    """What the saver gave beside the ranks' state. CheckpointError where it cannot be read. Runs no code of the file's."""
    path = folder / EXTRA_FILE
    try:
        extra = plain_values.loads(path.read_bytes())
        if not isinstance(extra, dict) or not isinstance(extra.get("user"), dict):
            raise ValueError("it does not have the loop's state")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error!r}): where another release of mrl saved it (versions.json of the run), go on with "
            "that one, or start a new run from the weights (mrl export, model.path)"
        ) from error
    return extra


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The newest valid checkpoint, verified by this process alone; None and errors as in take_latest()."""
    return take_latest(folder, verify_files)[0]


def take_latest[T](folder: str | Path, take: Callable[[Path], T]) -> tuple[Path | None, T | None]:
    """The newest valid checkpoint and what `take` made of it; (None, None) when there is none at all.

    `take` verifies, and raises DamagedCheckpoint where the folder is not valid: it is passed over with a
    warning that names file and reason, and the one before it is tried. When all are broken: CheckpointError,
    never a silent start from nothing.
    """
    faults: list[str] = []
    for path in candidates(Path(folder)):
        try:
            return path, take(path)
        except DamagedCheckpoint as error:
            faults.append(str(error))
            log.warning("checkpoint refused: %s", error)
    if faults:
        raise CheckpointError(f"no valid checkpoint in {folder}: " + "; ".join(faults))
    return None, None


def prune(folder: str | Path, *, keep: int, spare: Container[str] = ()) -> list[Path]:
    """Removes all but the newest `keep` checkpoints, every abandoned one, and damaged ones older than these; returns what was
    removed.

    Those named in `spare` stay too.
    """
    assert keep >= 1, f"keep = {keep}: at least one checkpoint is kept"
    folder = Path(folder)
    abandoned = (
        [p for p in folder.iterdir() if p.is_dir() and p.name.endswith(PARTIAL)] if folder.is_dir() else []
    )
    found = candidates(folder)
    oldest = found[:keep][-1].name if found else ""
    damaged = [path for path in folder.glob(f"*{DAMAGED}") if path.is_dir() and path.name < oldest]
    removed = [path for path in found[keep:] if path.name not in spare] + abandoned + damaged
    for path in removed:
        shutil.rmtree(path)
    return removed
