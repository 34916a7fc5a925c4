"""Two resource pools: trainer ranks and engines on separate slots (`launch.engine_slots`), and their sync.

Both sides start at once and keep their memory: nothing sleeps or is offloaded (`Config.as_placed`), so the
trainer can train while engines generate. Weights go through shared memory on one machine without GPUs, else
as messages, with sync.overlap while the engines generate. If an engine dies in a sync and
`rollout.max_replacements` allows it, the sync is repeated without it; a sync brings in replacements.
Everything else is as in the hybrid engine (colocated.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

from mrl.launch.workers.actor_group import is_lost, raise_first, wait_for_ends
from mrl.launch.workers.colocated import Hybrid, stats
from mrl.launch.workers.rollout_actor import EngineRank, RolloutActor
from mrl.resharding.transfer.session import Session

log = logging.getLogger(__name__)


class TwoPools(Hybrid):
    """The hybrid engine's interface over two resource pools."""

    _transferred: tuple[Session, set[int]] | None = None
    """Session that these engines have taken, but not loaded."""
    _bringing_in = False
    """True while a weight sync inside a wait for groups brings an engine in."""

    def _start_workers(self) -> list[EngineRank]:
        """Build engines and trainer ranks at once."""
        with self._clock.phase("engines"):
            self.train.wait_for_start({**self.rollout.start(), **self.train.start()})
            self.rollout.when_up = self._bring_in
            return self.rollout.engine_ranks()

    def transfer(self, version: int) -> dict[str, float]:
        """With sync.overlap, let the engines take new weights while they generate; return metrics.

        The next `sync` loads them. If an engine is lost meanwhile, that `sync` sends them anew."""
        self._transferred, engines = None, set(self.rollout.serving)
        if self._config.sync.overlap != "on" or not engines:
            return {}
        start, session = time.monotonic(), self._session(version, self._proved)
        sends = self.train.send_ahead(session, self.rollout.without(engines))
        stages = self.rollout.receive(session, engines, RolloutActor.stage)
        if self._results({**sends, **stages}, engines) is None:
            return {}
        self._transferred = session, engines
        return {"sync/transfer_seconds": time.monotonic() - start}

    def sync(self, version: int) -> dict[str, float]:
        """Load what `transfer` sent, or sync as Hybrid.sync; repeat without engines lost in it, and bring in
        engines that are up; only with these if `version` is served already."""
        transferred, self._transferred = self._transferred, None
        if transferred is None and not self._config.rollout.max_replacements:
            return super().sync(version)
        start, metrics = time.monotonic(), None
        joining: set[int] = set()
        proved, self._proved = self._proved, None
        session, engines = transferred or (self._session(version, proved), set(self.rollout.serving))
        uneven = False
        if transferred is not None and engines <= set(self.rollout.serving):
            metrics, uneven = self._switched(session, engines), True
        while metrics is None:
            if addresses := self.rollout.bring_in():
                self.train.redial(addresses)
            joining |= {rank // self._config.rollout.ranks for rank in addresses}
            uneven = uneven or bool(joining)
            engines = set(self.rollout.serving)
            if version == self.version:
                engines &= joining
            session = self._session(version, None if uneven else proved, uneven=uneven)
            metrics, uneven = self._exchanged(session, engines), True
        self.train.has_moved = False
        everyone = version != self.version
        self.version, self._proved = version, version if session.full and everyone else proved
        for engine in sorted(joining & set(self.rollout.serving)):
            log.warning("engine %d serves again, at version %d", engine, version)
        return {"sync/seconds": time.monotonic() - start, **metrics}

    def _switched(self, session: Session, engines: Collection[int]) -> dict[str, float] | None:
        """Let engines load what they took; return metrics, or None if engines were lost in it."""
        commits = self.train.commit_sync()
        switches = self.rollout.receive(session, engines, RolloutActor.switch)
        results = self._results({**commits, **switches}, engines)
        if results is None:
            return None
        steps = float(sum(results[name] for name in switches))
        return stats([results[name] for name in commits]) | {"sync/steps_meanwhile": steps}

    def _exchanged(self, session: Session, engines: Collection[int]) -> dict[str, float] | None:
        """Run a session; return metrics, or None if engines were lost in it."""
        sends, receives = self._calls(session, engines)
        results = self._results({**sends, **receives}, engines)
        return None if results is None else stats([results[name] for name in sends])

    def _results(self, calls: Mapping[str, Any], engines: Collection[int]) -> dict[str, Any] | None:
        """Return the results of calls by name once all have ended; None if one of the engines was lost."""
        deadline = 2 * self._config.sync.deadline_seconds
        if not self._config.rollout.max_replacements:
            return self.train.wait(calls, deadline_seconds=deadline)
        results, errors = wait_for_ends(
            calls, deadline_seconds=deadline, clock=self._clock, give_up=self.rollout.drop
        )
        if not errors:
            return results
        lost = {name for name, error in errors.items() if is_lost(error)}
        self.rollout.drop(lost, "died")  # which ignores the names of trainer ranks
        self._check_alive("leave")
        trainers = {self.train.name(number) for number in self.train.numbers()}
        if lost & trainers or set(engines) <= set(self.rollout.serving):
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
