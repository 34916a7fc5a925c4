"""The processes that one engine is made of: one, or with `rollout.dp` one for each dp rank, which has requests, a scheduler and
a KV cache of its own. Pure.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One process of an engine, which has rollout.tp slots."""

    engine: int = 0
    dp_rank: int = 0
    dp: int = 1

    @classmethod
    def of(cls, number: int, *, dp: int) -> Part:
        """The process `number` of a run, in the order of their slots.

        >>> Part.of(5, dp=2).name
        'engine 2, dp rank 1'
        """
        engine, dp_rank = divmod(number, dp)
        return cls(engine, dp_rank, dp)

    @property
    def is_whole(self) -> bool:
        """Whether the engine has no other."""
        return self.dp == 1

    @property
    def name(self) -> str:
        return f"engine {self.engine}" + (f", dp rank {self.dp_rank}" if self.dp > 1 else "")
