"""Which engines of a run serve, and what is started in the place of those that were lost (`rollout.replace`).

| an engine | its requests | weight syncs |
|---|---|---|
| serves | are its own | it takes part |
| was lost: another process is started in its place | are started over elsewhere | go on without it |
| is up | none yet | the next one brings it in |
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
"""Address, device and manifest's digest of an engine rank."""
Arrival = tuple[list[RankFacts], Address]
"""What is known of an engine that comes later: its ranks, and where the driver connects."""
Start = tuple["ObjectRef[None]", "ObjectRef[Arrival]"]
"""The calls of a new process: its start, and what it tells after it."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Starting:
    calls: Start
    since: float


class Fleet:
    """The engines by number."""

    def __init__(
        self,
        num_engines: int,
        clock: PhaseClock,
        *,
        most: int,
        deadline_seconds: float,
        start: Callable[[int], Start],
    ) -> None:
        """`most`: losses that the run survives; `start` begins another process in an engine's place, which is to be up
        within the deadline."""
        self._num_engines, self._clock, self._most = num_engines, clock, most
        self._deadline_seconds, self._start = deadline_seconds, start
        self._causes: dict[int, str] = {}
        """Of the engines that do not serve: why the one that did was lost."""
        self._starting: dict[int, _Starting] = {}
        self._up: dict[int, Arrival] = {}
        self.num_lost = 0

    @property
    def replaces(self) -> bool:
        """Whether the run survives any loss."""
        return self._most > 0

    @property
    def serving(self) -> list[int]:
        return [engine for engine in range(self._num_engines) if engine not in self._causes]

    @property
    def is_up(self) -> bool:
        """Whether an engine waits to be brought in."""
        return bool(self._up)

    def lose(self, engine: int, cause: str) -> str:
        """Starts another process in the place of an engine, or of one that was started there; what is to be said.
        WorkerLost, with the first cause, where the run survives no more losses."""
        first = self._causes.setdefault(engine, cause)
        self._starting.pop(engine, None)
        self._up.pop(engine, None)
        self.num_lost += 1
        if self.num_lost > self._most:
            raise WorkerLost("; ".join(dict.fromkeys((first, cause))) + self._spent())
        self._starting[engine] = _Starting(self._start(engine), time.monotonic())
        return f"{cause}; another one is started in its place ({self.num_lost} of rollout.replace = {self._most})"

    def _spent(self) -> str:
        return f"; rollout.replace = {self._most} engines were replaced before" if self._most else ""

    def look(self, timeout_seconds: float = 0.0) -> dict[int, str]:
        """Notes which of the started engines are up, waiting for the first at most so long; why others failed, by engine."""
        import ray

        told = {each.calls[1]: engine for engine, each in self._starting.items()}
        if told and timeout_seconds:
            with self._clock.waiting():
                ray.wait(list(told), num_returns=1, timeout=timeout_seconds)
        failed = {}
        for call in ray.wait(list(told), num_returns=len(told), timeout=0)[0] if told else ():
            if (engine := told[call]) in self._starting:
                try:
                    ray.get(self._starting[engine].calls[0], timeout=0)
                    self._up[engine] = ray.get(call, timeout=0)
                    del self._starting[engine]
                except Exception as error:  # of any kind: it did not start
                    failed[engine] = f"failed: {first_line(getattr(error, 'cause', None) or error)}"
        late = time.monotonic() - self._deadline_seconds
        for engine in [e for e, each in self._starting.items() if each.since < late and e not in failed]:
            failed[engine] = f"was not up within launch.start_deadline_seconds = {self._deadline_seconds:g} s"
        return failed

    def bring_in(self) -> dict[int, Arrival]:
        """The engines that are up, which serve from here on as far as weight syncs bring them in; what they tell."""
        came, self._up = self._up, {}
        for engine in came:
            del self._causes[engine]
        return came

    def metrics(self) -> dict[str, float]:
        """What is told once any engine was lost."""
        if not self.num_lost:
            return {}
        return {"rollout/engines_lost": float(self.num_lost), "rollout/engines": float(len(self.serving))}
