"""Endless order of training prompts: a pure function of (seed, epoch, row), independent of parallel layout.

Position k of the stream belongs to the source that is furthest below its share (largest remainder). So after
k prompts every source's count is within one of its share. Each source draws its rows epoch by epoch, in a
permutation drawn from (seed, source, epoch). Training prompts have index k >= 0; validation prompts have
negative indices, -1 for the first (see `validation_order`).
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from mrl.data.identity import prompt_id
from mrl.data.left_out import LeftOut
from mrl.errors import DataError
from mrl.samples import Prompt


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Rows that are drawn with one share of the stream."""

    name: str
    rows: Sequence[Prompt]
    share: float
    """Weight relative to the other sources' shares."""
    left_out: LeftOut = dataclasses.field(default_factory=LeftOut, compare=False)
    """The source's dropped rows, and why."""

    def with_rows(self, rows: Sequence[Prompt]) -> Source:
        """Return the source with fewer rows; a share equal to the number of rows follows it."""
        share = float(len(rows)) if self.share == len(self.rows) else self.share
        return dataclasses.replace(self, rows=rows, share=share)


class PromptStream:
    """Training prompts in order. `rows` is one source's prompts, or several sources."""

    def __init__(
        self,
        rows: Sequence[Prompt] | Sequence[Source],
        seed: int,
        *,
        shuffle: bool = True,
        vocabulary: str = "",
    ) -> None:
        first = rows[0] if rows else None
        self._sources: tuple[Source, ...] = (
            tuple(rows) if isinstance(first, Source) else (Source("train", rows, 1.0),)  # type: ignore[arg-type]
        )
        if empty := [source for source in self._sources if not source.rows]:
            counts = "; ".join(
                f"{rows.count} rows dropped by data.{rows.rule} (the first is {rows.examples[0]})"
                for source in empty
                for rows in source.left_out.rows()
            )
            names = ", ".join(source.name for source in empty)
            raise DataError(f"no training prompts remain in {names}: {counts or 'there are no rows'}")
        total = sum(Fraction(source.share) for source in self._sources)
        self._shares = [Fraction(source.share) / total for source in self._sources]
        self._seed = seed
        self._shuffle, self._vocabulary = shuffle, vocabulary
        self._position = 0
        self._choice = array("H")
        self._ordinal = array("L")
        self._drawn = [0] * len(self._sources)
        self._fingerprint = ""
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    @property
    def position(self) -> int:
        """Prompts taken so far, which is the index of the next one."""
        return self._position

    def take(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts."""
        prompts = [self.prompt_at(index) for index in range(self._position, self._position + count)]
        self._position += count
        return prompts

    def prompt_at(self, index: int) -> Prompt:
        """Return the prompt at a stream position, regardless of what was taken."""
        assert index >= 0, f"training prompts have indices >= 0, not {index}"
        self._extend(index)
        source_number, ordinal = self._choice[index], self._ordinal[index]
        source = self._sources[source_number]
        epoch, offset = divmod(ordinal, len(source.rows))
        row = self._order(source_number, epoch)[offset]
        return dataclasses.replace(source.rows[row], index=index)

    def epoch(self, index: int) -> float:
        """Return the epoch of its source at a stream position, as a fraction."""
        self._extend(index)
        return self._ordinal[index] / len(self._sources[self._choice[index]].rows)

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`: position, seed and a fingerprint of the rows."""
        return {"position": self._position, "seed": self._seed, "rows": self.fingerprint()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises DataError if its rows or seed differ."""
        self.require(state)
        self._position = int(state["position"])

    def require(self, state: Mapping[str, Any]) -> None:
        """Raise DataError if the rows or seed of `state` differ."""
        for name, current in {"seed": self._seed, "rows": self.fingerprint()}.items():
            if state.get(name) != current:
                raise DataError(
                    f"the saved data state has {name} = {state.get(name)!r}, but this run has {current!r}, "
                    "so the order cannot continue; resume with the same data, mix, tokenizer and seed"
                )

    def fingerprint(self) -> str:
        """Return a digest of the rows' content (identity.py), their order, the mix and the vocabulary."""
        if self._fingerprint:
            return self._fingerprint
        order = "shuffled" if self._shuffle else "in order"
        digest = hashlib.sha256(f"{order} {self._vocabulary}".encode())
        for source, share in zip(self._sources, self._shares, strict=True):
            digest.update(f"|{share}|{len(source.rows)}|".encode())
            for row in source.rows:
                digest.update(prompt_id(row).encode())
        self._fingerprint = digest.hexdigest()[:16]
        return self._fingerprint

    def _extend(self, index: int) -> None:
        """Choose the sources of all positions up to `index`."""
        while len(self._choice) <= index:
            done = len(self._choice) + 1
            behind = [share * done - drawn for share, drawn in zip(self._shares, self._drawn, strict=True)]
            chosen = behind.index(max(behind))
            self._choice.append(chosen)
            self._ordinal.append(self._drawn[chosen])
            self._drawn[chosen] += 1

    def _order(self, source_number: int, epoch: int) -> np.ndarray:
        key = (source_number, epoch)
        if key not in self._orders:
            num_rows = len(self._sources[source_number].rows)
            if len(self._orders) > 4 * len(self._sources):
                self._orders.clear()
            self._orders[key] = self._permutation(num_rows, key) if self._shuffle else np.arange(num_rows)
        return self._orders[key]

    def _permutation(self, num_rows: int, key: tuple[int, int]) -> np.ndarray:
        return np.random.Generator(np.random.PCG64([self._seed, *key])).permutation(num_rows)


def validation_order(sources: Sequence[Source], count: int) -> list[Prompt]:
    """Return the first `count` validation prompts, sources in turn; indices are -1, -2, ..."""
    chosen: list[Prompt] = []
    longest = max((len(source.rows) for source in sources), default=0)
    for offset in range(longest):
        for source in sources:
            if len(chosen) < count and offset < len(source.rows):
                chosen.append(dataclasses.replace(source.rows[offset], index=-1 - len(chosen)))
    return chosen
