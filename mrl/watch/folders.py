"""Which run folders there are to look at."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from mrl.errors import DataError
from mrl.report.run import inside

MARKS = ("metrics.jsonl", "samples.jsonl", "config.yaml")
"""A folder that has one of these is a run's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """One run folder."""

    path: Path
    named: bool
    """Whether it was asked for by its own name, not by that of the folder around it."""


def runs_of(folders: Sequence[Path]) -> dict[str, Found]:
    """Run folders by their names, which differ; folders of runs stand for the runs in them. DataError where there are none."""
    found: dict[str, Found] = {}
    for folder in folders:
        inner = [Found(folder, True)] if is_run(folder) else [Found(each, False) for each in _runs_in(folder)]
        if not inner:
            raise DataError(f"{folder} is no run folder and has none in it ({', '.join(MARKS)})")
        known = {each.path.resolve() for each in found.values()}
        for each in inner:
            if (path := each.path.resolve()) not in known:
                found[_free_name(path, found)] = each
    return found


def last_written(folder: Path) -> float:
    """Seconds since 1970 when metrics or samples were last written; 0 where there are none."""
    return max((path.stat().st_mtime for path in _files(folder)), default=0.0)


def is_run(folder: Path) -> bool:
    """Whether a run has begun to write there."""
    return any(_files(folder))


def _files(folder: Path) -> list[Path]:
    paths = [inside(folder, name) for name in MARKS]
    return [path for path in paths if path is not None and path.is_file()]


def _runs_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    inner = (each for each in folder.iterdir() if each.is_dir())
    nested = (path for each in inner for path in (each, each / "tune"))
    return sorted(p for p in nested if is_run(p) and p.resolve().is_relative_to(folder.resolve()))


def _free_name(folder: Path, taken: dict[str, Found]) -> str:
    """The folder's name, with those of folders around it where another one has it."""
    parts = folder.parts[::-1]
    fewest = 2 if folder.name == "tune" else 1
    names = ("/".join(parts[:count][::-1]) for count in range(fewest, len(parts) + 1))
    return next((name for name in names if name not in taken), str(folder))
