"""Two pools: trainer ranks and engines on slots of their own (`launch.engine_slots`), and the weight sync between them.

Nobody waits for another's memory: both sides start at once and stay where they are; nothing sleeps, nothing is
off-loaded (`Config.as_placed`), so that the trainer may train while the engines generate. Weights go through shared
memory on one machine without GPUs, and else as messages.
A weight sync in which an engine dies is done again without it, where the run survives that (`rollout.replace`), and one brings
in what was started in the place of lost engines. Everything else is the hybrid engine's (colocated.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import Any

from mrl.launch.workers.actor_group import is_lost, raise_first, wait_for_ends
from mrl.launch.workers.colocated import Hybrid, stats
from mrl.launch.workers.rollout_actor import EngineRank
from mrl.resharding.transfer.session import Session

log = logging.getLogger(__name__)


class TwoPools(Hybrid):
    """The hybrid engine's protocol over two pools."""

    _bringing_in = False
    """True while a weight sync inside a wait for groups brings an engine in."""

    def _start_workers(self) -> list[EngineRank]:
        """Builds engines and trainer ranks at once."""
        deadline = self._config.launch.start_deadline_seconds
        with self._clock.phase("engines"):
            calls = {**self.rollout.start(), **self.train.start()}
            self.train.wait(calls, deadline_seconds=deadline)
            self.rollout.when_up = self._bring_in
            return self.rollout.engine_ranks()

    def sync(self, version: int) -> dict[str, float]:
        """Hybrid.sync, again without each engine that is lost in it; brings in those that are up. To the version that is served
        already it is with these alone."""
        if not self._config.rollout.replace:
            return super().sync(version)
        start, results = time.monotonic(), None
        joining: set[int] = set()
        proved, self._proved = self._proved, None
        uneven = False
        while results is None:
            if came := self.rollout.bring_in():
                self.train.redial(came)
            joining |= {rank // self._config.rollout.ranks for rank in came}
            uneven = uneven or bool(joining)
            engines = set(self.rollout.serving)
            if version == self.version:
                engines &= joining
            session = self._session(version, None if uneven else proved, uneven=uneven)
            results, uneven = self._exchanged(session, engines), True
        self.train.has_moved = False
        everyone = version != self.version
        self.version, self._proved = version, version if session.full and everyone else proved
        for engine in sorted(joining & set(self.rollout.serving)):
            log.warning("engine %d serves again, at version %d", engine, version)
        return {"sync/seconds": time.monotonic() - start, **stats(results)}

    def _exchanged(self, session: Session, engines: Collection[int]) -> list[Any] | None:
        """What the trainer ranks tell of a session that everyone committed; None where engines were lost in it."""
        sends, receives = self._calls(session, engines)
        results, errors = wait_for_ends(
            {**sends, **receives},
            deadline_seconds=2 * self._config.sync.deadline_seconds,
            clock=self._clock,
            give_up=self.rollout.give_up,
        )
        if not errors:
            return [results[name] for name in sends]
        lost = {name for name, error in errors.items() if is_lost(error)}
        self.rollout.give_up(receives.keys() & lost, "died")
        self._check_alive("leave")
        if sends.keys() & lost or set(engines) <= set(self.rollout.serving):
            raise_first(errors, [], {}, self._clock)
        return None

    def _bring_in(self) -> None:
        """Let engines serve that are up, if the trainer is free and still has the weights that are served."""
        if self._clock.current == "generate" and not self.train.has_moved and not self._bringing_in:
            self._bringing_in = True
            try:
                self.sync(self.version)
                self.rollout.resume()
            finally:
                self._bringing_in = False
