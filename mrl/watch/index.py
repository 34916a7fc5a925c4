"""Where the samples of a file lie and what one asks of them, in 53 bytes a sample; their texts stay in the file."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

MOST = 1_000_000
"""Samples in the index; of more, the newest."""
NAMES = ("kind", "domain", "status", "verdict")
NUMBERS = ("step", "reward", "response_tokens")
OTHERS = "further ones"
_CODES = 1000
"""Names of one column that are told apart."""
_ENTRY = np.dtype(
    [("offset", np.int64), ("length", np.int32), ("prompt", np.uint64), ("made_again", np.bool_)]
    + [(name, np.int16) for name in NAMES]
    + [(name, np.float64) for name in NUMBERS]
)


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """What samples are asked for, beside their text."""

    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Column of NAMES -> its value."""
    ranges: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """Column of NUMBERS -> smallest and largest value; samples without one are outside."""


class SampleIndex:
    """Takes rows in the order of the file. A sample's number counts all that were added, from 0."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._entries = np.zeros(1024, _ENTRY)
        self._first, self._used = 0, 0
        self._codes: dict[str, dict[str, int]] = {name: {} for name in NAMES}
        self._last_step: dict[str, float] = {}
        self.made_again = 0
        """Samples whose place later ones took."""

    @property
    def end(self) -> int:
        """One past the last sample's number."""
        return self._first + self._used

    @property
    def left_out(self) -> int:
        """Samples that are no longer in the index, the oldest."""
        return self._first

    def add(self, offset: int, length: int, row: Mapping[str, Any]) -> None:
        """One row; a step of a kind that is behind the kind's last one was made again, and takes the place of all from there."""
        self._grow()
        entry = self._entries[self._used]
        entry["offset"], entry["length"], entry["prompt"] = offset, length, prompt_hash(row)
        entry["made_again"] = False
        for name in NAMES:
            entry[name] = self._code(name, str(row.get(name) or ""))
        for name in NUMBERS:
            value = row.get(name)
            entry[name] = value if isinstance(value, int | float) and not isinstance(value, bool) else np.nan
        self._used += 1
        self._replace(str(row.get("kind") or ""), entry)

    def values(self) -> dict[str, list[str]]:
        """The values that each column of NAMES has had."""
        return {name: sorted(value for value in codes if value) for name, codes in self._codes.items()}

    def find(self, query: Query, end: int) -> tuple[np.ndarray, np.ndarray]:
        """(numbers, steps) of the samples below number `end` that fit, the newest first; -1 where one has no step."""
        entries = self._entries[: max(0, min(self._used, end - self._first))]
        fits = ~entries["made_again"]
        for name, value in query.names.items():
            fits &= entries[name] == self._codes[name].get(value, -1)
        for name, (low, high) in query.ranges.items():
            fits &= (entries[name] >= low) & (entries[name] <= high)
        places = np.flatnonzero(fits)[::-1]
        return places + self._first, np.nan_to_num(entries["step"][places], nan=-1.0)

    def same_prompt(self, prompt: int, end: int) -> np.ndarray:
        """Numbers of the samples below `end` whose prompt has this hash, in the order of the file."""
        entries = self._entries[: max(0, min(self._used, end - self._first))]
        return np.flatnonzero((entries["prompt"] == prompt) & ~entries["made_again"]) + self._first

    def place(self, number: int) -> tuple[int, int] | None:
        """(offset, length) of a sample; None where the index has none of that number."""
        if not self._first <= number < self.end:
            return None
        entry = self._entries[number - self._first]
        return int(entry["offset"]), int(entry["length"])

    def _code(self, name: str, value: str) -> int:
        codes = self._codes[name]
        if value not in codes and len(codes) >= _CODES:
            value = OTHERS
        return codes.setdefault(value, len(codes))

    def _replace(self, kind: str, entry: Any) -> None:
        step, last = float(entry["step"]), self._last_step.get(kind, -np.inf)
        if step < last:
            before = self._entries[: self._used - 1]
            again = (before["kind"] == entry["kind"]) & (before["step"] >= step) & ~before["made_again"]
            before["made_again"] |= again
            self.made_again += int(again.sum())
        if step == step:
            self._last_step[kind] = step

    def _grow(self) -> None:
        if self._used < len(self._entries):
            return
        if self._used < self._most:
            larger = np.zeros(min(2 * self._used, self._most), _ENTRY)
            larger[: self._used] = self._entries
            self._entries = larger
            return
        dropped = self._most // 8
        self._entries[: self._used - dropped] = self._entries[dropped : self._used].copy()
        self._first, self._used = self._first + dropped, self._used - dropped


def prompt_hash(row: Mapping[str, Any]) -> int:
    """Equal for samples of equal prompts."""
    text = str(row.get("prompt", "")).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
