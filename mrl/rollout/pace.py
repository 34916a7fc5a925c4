"""How long an engine's steps take, by the sequences that they decode: sums that an engine tells with what a call brings.

A step that begins requests computes their prompts too, and is counted apart.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

PREFILL = (
    "rollout/prefill_steps",
    "rollout/prefill_decoded",
    "rollout/prefill_seconds",
    "rollout/prefill_tokens",
)
"""Of steps that begin requests: how many, tokens decoded, seconds, and tokens of what they begin."""

Sums = Mapping[str, float]


@functools.cache
def _of_size(most: int | str) -> tuple[str, ...]:
    """Of steps that begin none, with at most so many sequences, a power of two, and more than half: how many, tokens decoded (one
    of each sequence), seconds."""
    return (
        f"rollout/decode_steps/{most}",
        f"rollout/decode_tokens/{most}",
        f"rollout/decode_seconds/{most}",
    )


class Pace:
    """Of one engine process since it was last asked."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def count(self, *, sequences: int, begun_tokens: int, seconds: float) -> None:
        """A step of so many sequences, after which those that it began have so many tokens computed.

        >>> pace = Pace()
        >>> pace.count(sequences=5, begun_tokens=0, seconds=0.5)
        >>> pace.count(sequences=8, begun_tokens=0, seconds=0.5)
        >>> pace.take()
        {'rollout/decode_steps/8': 2, 'rollout/decode_tokens/8': 13, 'rollout/decode_seconds/8': 1.0}
        """
        if begun_tokens:
            self._add(PREFILL, (1, sequences, seconds, begun_tokens))
        elif sequences:
            self._add(_of_size(1 << (sequences - 1).bit_length()), (1, sequences, seconds))

    def _add(self, names: Iterable[str], values: Iterable[float]) -> None:
        for name, value in zip(names, values, strict=True):
            self._sums[name] = self._sums.get(name, 0) + value

    def take(self) -> dict[str, float]:
        """The sums so far, which begin anew."""
        sums, self._sums = self._sums, {}
        return sums


def add_up(parts: Iterable[Sums]) -> dict[str, float]:
    """Of several processes and calls."""
    sums: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def by_size(row: Sums) -> list[tuple[float, float, float]]:
    """(steps, tokens, seconds) of the steps of each size that begin none, from a row of metrics."""
    prefix = _of_size("")[0]
    sizes = [name.removeprefix(prefix) for name in row if name.startswith(prefix)]
    return [(row[steps], row[tokens], row[seconds]) for steps, tokens, seconds in map(_of_size, sizes)]
