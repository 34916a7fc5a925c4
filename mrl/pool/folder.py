"""The folder of a store: whose it is, whether it takes what is to be written, and what an earlier process left in it."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mrl.errors import PoolError

MARK = "run"
"""The file that names the run that the folder belongs to."""
PARTIAL_MARK = "run.partial"
FILES = "*.groups"


def fault(folder: Path, run: str, *, num_bytes: int) -> str:
    """Why a store of `run` cannot have files of `num_bytes` in the folder, which need not exist; empty where it can.
    Nothing is left behind."""
    try:
        place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not place.is_dir():
            return f"{place} is no folder"
        with tempfile.TemporaryFile(dir=place):
            pass
        return _stranger(folder, run) or _lack(place, num_bytes - _size(folder))
    except OSError as error:
        return f"it cannot be written to ({error.strerror or error})"


def _stranger(folder: Path, run: str) -> str:
    """What of another owner is in the folder."""
    owner = owner_of(folder)
    if owner is not None:
        return "" if owner == run else f"it belongs to the run {owner}, not to {run}"
    others = {path.name for path in folder.iterdir()} - {PARTIAL_MARK} if folder.exists() else set()
    return f"it holds what is no store's ({min(others)})" if others else ""


def _lack(place: Path, num_bytes: int) -> str:
    """`num_bytes` are those beyond what a store there has."""
    free = shutil.disk_usage(place).free
    if free >= num_bytes:
        return ""
    return f"its disk has {free / 2**30:.1f} GiB free, and groups may take {num_bytes / 2**30:.1f} GiB more"


def owner_of(folder: Path) -> str | None:
    """The run that the folder belongs to."""
    with contextlib.suppress(FileNotFoundError):
        return (folder / MARK).read_text(encoding="utf-8", errors="replace")
    return None


def claim(folder: Path, run: str) -> None:
    """PoolError where the folder is another run's, OSError where it cannot be written to."""
    partial = folder / PARTIAL_MARK
    partial.unlink(missing_ok=True)
    with partial.open("x", encoding="utf-8") as file:  # which follows no link
        file.write(run)
    if owner_of(folder) is None:
        partial.rename(folder / MARK)
    partial.unlink(missing_ok=True)
    if (owner := owner_of(folder)) != run:
        raise PoolError(
            f"the pool's folder {folder} belongs to the run {owner}, not to {run}; choose another or remove it"
        )


def clear(folder: Path, run: str) -> int:
    """Removes the groups that an earlier process of the run left; their bytes. Nothing where the folder is not the run's."""
    if owner_of(folder) != run:
        return 0
    num_bytes = _size(folder)
    for path in _files(folder):
        path.unlink()
    return num_bytes


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files(folder))


def _files(folder: Path) -> Iterator[Path]:
    return folder.glob(FILES)
