"""Select as many samples of samples.jsonl as fit: whole prompts, chosen evenly over the run by a hash, with
counts of all.

The file is read once, and only what is shown stays in memory. A prompt's samples stay together, a validation
prompt's over all steps, so that they can be compared. The same file gives the same choice.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import re
from collections import Counter
from typing import Any

KINDS_OF_REASON = 1000
"""Most reasons counted separately; all further ones share a line."""


class SamplesShown:
    """Selection from one run's rows, added in order."""

    def __init__(self, max_bytes: int, steps: tuple[int, int] | None = None) -> None:
        """Keep at most `max_bytes` of JSON, but at least one prompt; `steps`: first and last step to keep."""
        self._max_bytes, self._steps = max_bytes, steps
        self._prompts: dict[tuple[str, str], dict[tuple[int, str], dict[str, Any]]] = {}
        self._sizes: Counter[tuple[str, str]] = Counter()
        self._by_hash: list[tuple[int, tuple[str, str]]] = []
        self._bytes, self._bound = 0, 2**64
        self.seen, self.outside, self.made_again = 0, 0, 0
        """Rows; of these, those outside `steps`, and those replaced by a later row."""
        self._counts = {name: Counter[str]() for name in ("kind", "domain", "status", "verdict", "reason")}

    def add(self, row: dict[str, Any]) -> None:
        """Add one row; a row that a resumed run repeated replaces the earlier one."""
        self.seen += 1
        for name, counter in self._counts.items():
            _count(counter, name, row.get(name))
        named = row.get("step")
        step = named if isinstance(named, int) else 0
        if self._steps and not self._steps[0] <= step <= self._steps[1]:
            self.outside += 1
            return
        sample_id = str(row.get("sample_id", self.seen))
        key = (str(row.get("kind", "")), sample_id.rpartition(".")[0] or sample_id)
        if key not in self._prompts and not self._admit(key):
            return
        samples = self._prompts[key]
        if old := samples.pop((step, sample_id), None):
            self._grow(key, -_size(old))
            self.made_again += 1
        samples[step, sample_id] = row
        self._grow(key, _size(row))
        self._shrink()

    def tree(self) -> dict[str, Any]:
        """Return JSON values: the rows shown in step order, the number of rows, and counts over all rows."""
        placed = [
            (step, kind, row)
            for (kind, _), samples in self._prompts.items()
            for (step, _), row in samples.items()
        ]
        rows = [row for _, _, row in sorted(placed, key=lambda place: place[:2])]
        counts = {name: counter.most_common(30) for name, counter in self._counts.items() if counter}
        return {"rows": rows, "seen": self.seen, "outside": self.outside, "counts": counts}

    def _admit(self, key: tuple[str, str]) -> bool:
        number = int.from_bytes(hashlib.blake2b("\0".join(key).encode(), digest_size=8).digest())
        if number >= self._bound:
            return False
        heapq.heappush(self._by_hash, (-number, key))
        self._prompts[key] = {}
        return True

    def _grow(self, key: tuple[str, str], size: int) -> None:
        self._sizes[key] += size
        self._bytes += size

    def _shrink(self) -> None:
        """Drop the prompts with the largest hashes; larger ones are no longer admitted."""
        while self._bytes > self._max_bytes and len(self._prompts) > 1:
            number, key = heapq.heappop(self._by_hash)
            self._bound = -number
            self._bytes -= self._sizes.pop(key)
            del self._prompts[key]


def _count(counter: Counter[str], name: str, value: object) -> None:
    if value is None or value == "":
        return
    text = re.sub(r"'[^']*'|\"[^\"]*\"|-?\d+(\.\d+)?", "…", str(value)) if name == "reason" else str(value)
    is_counted = text in counter or len(counter) < KINDS_OF_REASON
    counter[text[:200] if is_counted else "further ones"] += 1


def _size(row: dict[str, Any]) -> int:
    return len(json.dumps(row))
