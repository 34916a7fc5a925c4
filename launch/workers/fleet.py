"""Track which engines of a run serve, and replace lost ones (`rollout.max_replacements`).

| engine | its requests | weight syncs |
|---|---|---|
| serving | run on it | include it |
| lost: a replacement is starting | are retried elsewhere | exclude it |
| replacement is up | none yet | the next one brings it in |
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mrl.errors import WorkerLost
from mrl.launch.workers.actor_group import first_line
from mrl.observe.phases import PhaseClock
from mrl.rollout.engine_client import Address

if TYPE_CHECKING:
    from ray import ObjectRef

RankFacts = tuple[str, str, str]
"""Address, device and manifest digest of an engine rank."""
ReplacementFacts = tuple[list[RankFacts], Address]
"""Ranks of a replacement, and the address for the driver."""
Start = tuple["ObjectRef[None]", "ObjectRef[ReplacementFacts]"]
"""Calls of a replacement: its start, and its facts after it."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Starting:
    calls: Start
    since: float


class Fleet:
    """State of a run's engines, by number."""

    def __init__(
        self,
        num_engines: int,
        clock: PhaseClock,
        *,
        most: int,
        deadline_seconds: float,
        start: Callable[[int], Start],
    ) -> None:
        """`most`: losses that the run survives; `start`: starts a replacement, up within the deadline."""
        self._num_engines, self._clock, self._most = num_engines, clock, most
        self._deadline_seconds, self._start = deadline_seconds, start
        self._causes: dict[int, str] = {}
        """Why each engine that does not serve was lost."""
        self._starting: dict[int, _Starting] = {}
        self._up: dict[int, ReplacementFacts] = {}
        self.num_lost = 0

    @property
    def replaces(self) -> bool:
        """True if the run survives a loss."""
        return self._most > 0

    @property
    def serving(self) -> list[int]:
        return [engine for engine in range(self._num_engines) if engine not in self._causes]

    @property
    def is_up(self) -> bool:
        """True if a replacement waits to be brought in."""
        return bool(self._up)

    def replace(self, engine: int, cause: str) -> str:
        """Start a replacement of an engine, or of its failed replacement; return a message. Raises
        WorkerLost, with the first cause, if the run survives no more losses."""
        first = self._causes.setdefault(engine, cause)
        self._starting.pop(engine, None)
        self._up.pop(engine, None)
        self.num_lost += 1
        if self.num_lost > self._most:
            raise WorkerLost("; ".join(dict.fromkeys((first, cause))) + self._spent())
        self._starting[engine] = _Starting(self._start(engine), time.monotonic())
        return f"{cause}; starting a replacement ({self.num_lost} of rollout.max_replacements = {self._most})"

    def _spent(self) -> str:
        return f"; rollout.max_replacements = {self._most} engines were replaced before" if self._most else ""

    def look(self, timeout_seconds: float = 0.0) -> dict[int, str]:
        """Check the replacements, waiting up to the timeout for one; return why others failed, by engine."""
        import ray

        calls = {starting.calls[1]: engine for engine, starting in self._starting.items()}
        if calls and timeout_seconds:
            with self._clock.waiting():
                ray.wait(list(calls), num_returns=1, timeout=timeout_seconds)
        failed = {}
        for call in ray.wait(list(calls), num_returns=len(calls), timeout=0)[0] if calls else ():
            if (engine := calls[call]) in self._starting:
                try:
                    ray.get(self._starting[engine].calls[0], timeout=0)
                    self._up[engine] = ray.get(call, timeout=0)
                    del self._starting[engine]
                except Exception as error:  # any error means that it did not start
                    failed[engine] = f"failed: {first_line(getattr(error, 'cause', None) or error)}"
        late = time.monotonic() - self._deadline_seconds
        for engine in [
            e for e, starting in self._starting.items() if starting.since < late and e not in failed
        ]:
            failed[engine] = f"was not up within launch.start_deadline_seconds = {self._deadline_seconds:g} s"
        return failed

    def bring_in(self) -> dict[int, ReplacementFacts]:
        """Mark the replacements that are up as serving, for the next weight sync; return their facts."""
        arrivals, self._up = self._up, {}
        for engine in arrivals:
            del self._causes[engine]
        return arrivals

    def metrics(self) -> dict[str, float]:
        """Return the metrics; empty until an engine is lost."""
        if not self.num_lost:
            return {}
        return {"rollout/engines_lost": float(self.num_lost), "rollout/engines": float(len(self.serving))}
