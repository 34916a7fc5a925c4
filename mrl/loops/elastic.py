"""Elastic slots of a stream: while a step waits for its groups, engines may have the trainer's slots.

| | engines on the trainer's slots | requests |
|---|---|---|
| `look`, where the rule says that it pays | take the weights that are served, then serve too | what the others had not begun is shared out anew |
| `give_back`, once the groups are there | rest; the trainer comes back | what they had goes to the others, begun or not |

Both are inside phase generate, so that training, a cut, a weight sync and a validation see two pools and nothing else. The rule is
mrl/pool/waking.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mrl.config.root import Config
from mrl.loops.produce import Producer
from mrl.loops.schedule import ElasticEngines, Engines
from mrl.pool.waking import Waking

METRICS: tuple[str, ...] = (
    "stream/elastic_wakes",
    "stream/elastic_seconds",
    "stream/elastic_hand_over_seconds",
    "stream/elastic_moved",
)
"""Of one step."""


class ElasticSlots:
    """The trainer's slots, lent to engines and given back."""

    def __init__(self, config: Config, engines: Engines, producer: Producer) -> None:
        sleepers = len(config.sleepers)
        self._own, self._all = config.num_engines - sleepers, config.num_engines
        self._engines, self._producer = engines, producer
        self.rule = Waking(own=self._own, sleepers=sleepers, at_once=config.rollout.max_num_seqs)
        self._awake_since: float | None = None
        self._waking_seconds, self._woke = 0.0, False
        self._told = dict.fromkeys(METRICS, 0.0)

    def synced(self, seconds: float) -> None:
        """A weight sync took so long: waking and giving back are taken for two of them until they are measured."""
        if not self._woke:
            self.rule.hand_overs = 2 * seconds

    def work(self, works: bool) -> None:
        """The engines with slots of their own go on, or stop."""
        self.rule.work(time.monotonic(), self._own if works else 0)

    def look(self, before: Callable[[], None]) -> None:
        """Wakes where it pays; `before` that all engines are to have the newest weights."""
        if self._awake_since is not None or not self._producer.lacks_responses:
            return
        if self.rule.pays(time.monotonic(), self._producer.num_out):
            before()
            self._wake()

    def _wake(self) -> None:
        assert isinstance(self._engines, ElasticEngines), "only with elastic slots"
        start = time.monotonic()
        with self._engines.train.meanwhile(self._producer.pump):
            self._engines.wake()
        moved = self._producer.spread()
        self._awake_since = now = time.monotonic()
        self.rule.work(now, self._all)
        self._waking_seconds = now - start
        self._count("stream/elastic_wakes", 1.0)
        self._count("stream/elastic_moved", moved)

    def give_back(self) -> None:
        """The groups are there: the slots are the trainer's again. Nothing where they are."""
        start, since = time.monotonic(), self._awake_since
        self.rule.take(start)
        if since is None:
            return
        moved = self._producer.gather()
        self.rule.work(start, self._own)
        self._awake_since, self._woke = None, True
        with self._engines.train.meanwhile(self._producer.pump):
            self._engines.rest()
        seconds = self._waking_seconds + time.monotonic() - start
        self.rule.hand_overs = seconds
        self._count("stream/elastic_seconds", start - since)
        self._count("stream/elastic_hand_over_seconds", seconds)
        self._count("stream/elastic_moved", moved)

    def _count(self, name: str, value: float) -> None:
        self._told[name] += value

    def take_metrics(self) -> dict[str, float]:
        """Of the step."""
        told, self._told = self._told, dict.fromkeys(METRICS, 0.0)
        return told
