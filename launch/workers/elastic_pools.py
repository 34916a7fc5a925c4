"""Two pools of which the trainer's slots are elastic (`stream.elastic_slots`): each has an engine too, which sleeps while the trainer
is there.

| | trainer | engines on slots of their own | engines on the trainer's slots |
|---|---|---|---|
| weight sync to v | on its slots | receive v | asleep, with weights of some version before |
| `wake` | sends v again, then all of it off-loaded | serve v | receive and prove v, serve it |
| `rest` | back | serve v | asleep |

One plan has both kinds of engines; a session names those that it is for. A session to sleepers is from any version, and always a
full one, because they were left out of those before. They serve between `wake` and `rest` alone, in which there is no weight sync
to the others, so that all that serve have one version.
"""

from __future__ import annotations

from typing import Any

from mrl.launch.workers.colocated import Hybrid
from mrl.launch.workers.rollout_actor import EngineRank
from mrl.launch.workers.two_pools import TwoPools
from mrl.resharding.transfer.session import Session


class ElasticPools(TwoPools):
    """Two pools, and engines that wake on the trainer's slots."""

    def _start_workers(self) -> list[EngineRank]:
        """Engines first, as on shared slots: those beside the trainer measure what their slots have."""
        return Hybrid._start_workers(self)

    def _deliver(self, session: Session) -> list[Any]:
        """To the engines on slots of their own; nobody leaves a slot."""
        return self._bring(session, range(self._config.sleepers.start))

    def wake(self) -> None:
        """The trainer leaves its slots to the engines there, with the weights that the others serve; it must have these."""
        session = self._session(self.version, None, uneven=True)
        self._hand_over(session, self._config.sleepers)
