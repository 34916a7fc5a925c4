"""The on-policy schedule: the eight phases of a step in order, and nothing else.

| phase | consumes | produces | done by |
|---|---|---|---|
| generate, reward | prompts of the stream | scored groups | Collector (engines, reward pool) |
| filter | scored groups | groups to train on, surplus for the next step | GroupSupply |
| recompute, estimate, update | groups | weights v + 1, metrics | Learner (learn.py) |
| save | groups, state of version v + 1 | samples, checkpoint where one is due | Books, Checkpoints |
| sync | weights v + 1 | engines at version v + 1 | Hybrid |

The checkpoint comes before the weight sync because the trainer's memory belongs to the engines after it; with
loop.checkpoint.beside_training its state is copied there, written while the next step generates, and committed
after that. Validation and the row of metrics follow the step.

Every wait inside has a deadline and names its phase.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mrl.config.root import Config
from mrl.loops import nan_guard
from mrl.loops.books import Books, Throughput
from mrl.loops.checkpoints import Checkpoints
from mrl.loops.collect import Collector
from mrl.loops.group_supply import GroupSupply
from mrl.loops.learn import Learner, Step, Trainer
from mrl.loops.recorder import Recorder
from mrl.samples import Group, Prompt


class Engines(Protocol):
    """Trainer and engines on the same slots."""

    @property
    def train(self) -> Trainer: ...

    def sync(self, version: int) -> dict[str, float]: ...

    def rest(self) -> None: ...


class OnPolicyLoop:
    """Runs steps until the configured number, or until `should_stop` names a reason."""

    def __init__(
        self,
        config: Config,
        engines: Engines,
        collector: Collector,
        supply: GroupSupply,
        validation_prompts: Sequence[Prompt],
        recorder: Recorder,
        checkpoints: Checkpoints,
        *,
        should_stop: Callable[[], str | None] = lambda: None,
        throughput: Throughput = lambda lengths, metrics: {},
    ) -> None:
        self._config, self._engines = config, engines
        self._collector, self._supply, self._should_stop = collector, supply, should_stop
        self._learner = Learner(config, engines.train, recorder.clock)
        self._books = Books(
            config, engines.train, collector, validation_prompts, recorder, checkpoints, throughput=throughput
        )
        self._clock = recorder.clock
        self.on_batch: Callable[[Sequence[Group]], None] = lambda groups: None
        """Called with each step's groups; for measurements."""
        self.next_step = 1
        """Number of the next step; steps count from 1, step 0 is the starting point."""

    @property
    def version(self) -> int:
        """The policy's version: the number of steps that are done."""
        return self.next_step - 1

    def run(self) -> str:
        """All remaining steps after start(); returns why it ended ("done" or the reason to stop)."""
        return self._books.run(self, self._should_stop)

    def start(self) -> None:
        """The first weight sync."""
        self._engines.sync(self.version)

    def step(self) -> None:
        """The eight phases once. BadNumbers, with the samples written down, where a number is NaN or infinite."""
        step = self._books.begin(self.next_step, self.version)
        try:
            self._collect(step)
            self._books.commit_pending()
            self._learner.learn(step)
        except nan_guard.BadNumbers as error:
            self._books.bad_numbers(step, error)
            raise
        self.next_step += 1
        self._save(step)
        self._sync(step)
        self._books.close(step)

    def _collect(self, step: Step) -> None:
        """Phases generate, reward and filter: the step's groups, after which the engines rest."""
        supplied = self._supply.take(self._collector, version=step.version)
        self._engines.rest()
        step.groups, step.served_version = supplied.groups, supplied.served_version
        step.metrics |= supplied.metrics
        self.on_batch(step.groups)

    def _save(self, step: Step) -> None:
        """Samples, and a checkpoint where one is due: before the sync, because the trainer's memory is the engines' after it."""
        with self._clock.phase("save"):
            self._books.samples(step)
            if self._books.saves(step.number):
                self._save_checkpoint(step.metrics, goes_on=step.number < self._config.loop.steps)

    def _sync(self, step: Step) -> None:
        with self._clock.phase("sync"):
            step.metrics |= self._engines.sync(self.version)

    def stop(self) -> None:
        """Saves, because the run ends before its last step."""
        self._engines.rest()
        with self._clock.phase("save"):
            self._save_checkpoint({}, goes_on=False)

    def _save_checkpoint(self, row: Mapping[str, float], *, goes_on: bool) -> None:
        """`row`: the metrics of the step so far; its own row is written after the weight sync, which a death may prevent."""
        state = {
            "next_step": self.next_step,
            "supply": self._supply.state(),
            "algorithm": self._learner.state(),
            "row": dict(row),
        }
        self._books.save(self.version, state, goes_on=goes_on)

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from a checkpoint's state."""
        self.next_step = int(state["next_step"])
        self._supply.restore(state["supply"])
        self._learner.restore(state["algorithm"])
        self._books.restore_row(self.version, state.get("row", {}))
