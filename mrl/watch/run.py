"""One run folder as it grows: each reading takes what is new, and what stays in memory is bounded.

Files are opened anew for each reading, so that a shared file system shows what another machine has written; nothing is
locked or written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mrl.report.curves import Curves
from mrl.report.rows import Tail, parsed
from mrl.report.run import FACTS, curve_notes, inside, settings_of
from mrl.report.samples import SampleCounts
from mrl.watch.index import SampleIndex

SAMPLES_READ = 4 * 10**9
"""Bytes of samples.jsonl before its end, as it is first found, at which reading it begins."""


class LiveRun:
    """Not thread-safe: its owner asks one thing at a time."""

    def __init__(self, folder: Path, name: str, *, samples_read: int = SAMPLES_READ) -> None:
        self._folder, self._name, self._samples_read = folder, name, samples_read
        self.version = 0
        """Larger after each reading that found something."""
        self._settings: dict[str, Any] = {}
        self._settings_notes: list[str] = []
        self._settings_seen: list[tuple[float, int] | None] = []
        self._unreadable: dict[str, str] = {}
        self._drawn: tuple[int, dict[str, Any]] | None = None
        self._start_metrics()
        self._start_samples()

    def read(self, most: int) -> int:
        """Takes what is new, about `most` bytes of each file, and says how many bytes are left."""
        self._read_settings()
        if self._metrics.replaced():
            self._start_metrics()
        if self._samples.replaced():
            self._start_samples()
        for _, _, row in self._new_rows(self._metrics, most):
            self._curves.add(row)
        for offset, length, row in self._new_rows(self._samples, most):
            self.index.add(offset, length, row)
            self._counts.add(row)
        return sum(max(0, tail.behind - tail.unfinished) for tail in (self._metrics, self._samples))

    def tree(self) -> dict[str, Any]:
        """What the page shows of a run, its samples left to be asked for."""
        if self._drawn is None or self._drawn[0] != self._curves.rows:
            self._drawn = self._curves.rows, self._curves.tree()
        samples = {"rows": [], "seen": self.index.end, "counts": self._counts.tree()}
        return {
            "name": self._name,
            "folder": str(self._folder),
            "notes": [*self._settings_notes, *self._notes()],
            "curves": self._drawn[1],
            "samples": samples | {"values": self.index.values()},
            **self._settings,
        }

    @contextlib.contextmanager
    def reader(self) -> Iterator[Callable[[int], dict[str, Any] | None]]:
        """Number -> the whole row of a sample, from the file opened once; None where it is no longer there."""
        path = inside(self._folder, "samples.jsonl")
        if path is None or not path.is_file():
            yield lambda number: None
            return
        with path.open("rb") as file:

            def row(number: int) -> dict[str, Any] | None:
                place = self.index.place(number)
                if place is None:
                    return None
                file.seek(place[0])
                return parsed(file.read(place[1]))

            yield row

    def _start_metrics(self) -> None:
        self._metrics, self._curves = Tail(self._folder / "metrics.jsonl"), Curves()
        self.version += 1
        self._drawn = None

    def _start_samples(self) -> None:
        self._samples = Tail(self._folder / "samples.jsonl", most=self._samples_read)
        self.index, self._counts = SampleIndex(), SampleCounts()
        self.version += 1

    def _new_rows(self, tail: Tail, most: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Those of a file that lies in the folder; where it cannot be read, for now or at all, there are none, and a note says so."""
        name, before = tail.path.name, self._state(tail)
        self._unreadable.pop(name, None)
        try:
            if inside(self._folder, name) is None:
                tail.reading.is_there = False
            else:
                yield from tail.rows(most)
        except OSError as error:
            self._unreadable[name] = f"{name} cannot be read: {error.strerror}."
        self.version += before != self._state(tail)

    def _state(self, tail: Tail) -> tuple[object, ...]:
        reading = tail.reading
        return reading.lines, reading.is_there, tail.unfinished, self._unreadable.get(tail.path.name)

    def _read_settings(self) -> None:
        names = ("config.yaml", *(f"{name}.json" for name in FACTS))
        found = [_stamp(inside(self._folder, name)) for name in names]
        if found == self._settings_seen:
            return
        self._settings_seen, self._settings_notes = found, []
        self._settings = settings_of(self._folder, self._settings_notes)
        self.version += 1

    def _notes(self) -> Iterator[str]:
        yield from self._unreadable.values()
        for tail in (self._metrics, self._samples):
            yield from tail.reading.notes()
            if tail.unfinished:
                yield f"{tail.path.name}: its last row is not whole: it is being written, or was cut."
            if tail.skipped:
                yield f"{tail.path.name}: the first {tail.skipped / 1e9:.3g} GB are older than what is read here."
        yield from curve_notes(self._curves)
        if self.index.made_again:
            again = self.index.made_again
            yield f"{again} samples of steps that a resumed run made again are left out."
        if self.index.left_out:
            yield f"The oldest {self.index.left_out} samples are left out of lists and searches."


def _stamp(path: Path | None) -> tuple[float, int] | None:
    try:
        found = path.stat() if path is not None else None
    except OSError:
        return None
    return None if found is None else (found.st_mtime, found.st_size)
