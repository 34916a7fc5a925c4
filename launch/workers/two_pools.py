"""Two pools: trainer ranks and engines on slots of their own (`launch.engine_slots`), and the weight sync between them.

Nobody waits for another's memory: both sides start at once and stay where they are; nothing sleeps, nothing is
off-loaded (`Config.as_placed`), so that the trainer may train while the engines generate. Weights go through shared
memory on one machine without GPUs, and else as messages.
Everything else is the hybrid engine's (colocated.py).
"""

from __future__ import annotations

from mrl.launch.workers.colocated import Hybrid
from mrl.launch.workers.rollout_actor import EngineRank


class TwoPools(Hybrid):
    """The hybrid engine's protocol over two pools."""

    def _start_workers(self) -> list[EngineRank]:
        """Builds engines and trainer ranks at once."""
        deadline = self._config.launch.start_deadline_seconds
        with self._clock.phase("engines"):
            calls = {**self.rollout.start(), **self.train.start()}
            self.train.wait(calls, deadline_seconds=deadline)
            return self.rollout.engine_ranks()
