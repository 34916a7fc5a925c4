"""Two resource pools: trainer ranks and engines on separate slots (`launch.engine_slots`), and their sync.

Both sides start at once and keep their memory: nothing sleeps or is offloaded (`Config.as_placed`), so the
trainer can train while engines generate. Weights go through shared memory on one machine without GPUs, else
as messages. If an engine dies in a sync and `rollout.max_replacements` allows it, the sync is repeated
without it; a sync brings in replacements. Everything else is as in the hybrid engine (colocated.py).
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
    """The hybrid engine's interface over two resource pools."""

    _bringing_in = False
    """True while a weight sync inside a wait for groups brings an engine in."""

    def _start_workers(self) -> list[EngineRank]:
        """Build engines and trainer ranks at once."""
        with self._clock.phase("engines"):
            self.train.wait_for_start({**self.rollout.start(), **self.train.start()})
            self.rollout.when_up = self._bring_in
            return self.rollout.engine_ranks()

    def sync(self, version: int) -> dict[str, float]:
        """Sync as Hybrid.sync, repeat without engines lost in it, and bring in engines that are up; only with
        these if `version` is served already."""
        if not self._config.rollout.max_replacements:
            return super().sync(version)
        start, results = time.monotonic(), None
        joining: set[int] = set()
        proved, self._proved = self._proved, None
        uneven = False
        while results is None:
            if addresses := self.rollout.bring_in():
                self.train.redial(addresses)
            joining |= {rank // self._config.rollout.ranks for rank in addresses}
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
        """Run a session; return the trainer ranks' statistics, or None if engines were lost in it."""
        sends, receives = self._calls(session, engines)
        results, errors = wait_for_ends(
            {**sends, **receives},
            deadline_seconds=2 * self._config.sync.deadline_seconds,
            clock=self._clock,
            give_up=self.rollout.drop,
        )
        if not errors:
            return [results[name] for name in sends]
        lost = {name for name, error in errors.items() if is_lost(error)}
        self.rollout.drop(receives.keys() & lost, "died")
        self._check_alive("leave")
        if sends.keys() & lost or set(engines) <= set(self.rollout.serving):
            raise_first(errors, [], {}, self._clock)
        return None

    def _bring_in(self) -> None:
        """Let new engines serve, if the trainer is idle and still has the served weights."""
        if self._clock.current == "generate" and not self.train.has_moved and not self._bringing_in:
            self._bringing_in = True
            try:
                self.sync(self.version)
                self.rollout.resume()
            finally:
                self._bringing_in = False
