"""On-policy schedule: the eight phases of a step, in order.

| phase | consumes | produces | done by |
|---|---|---|---|
| generate, reward | prompts of the stream | scored groups | RolloutThread (engines, reward workers) |
| filter | scored groups | groups to train on, surplus for the next step | GroupSupply |
| recompute, estimate, update | groups | weights v + 1, metrics | Learner (learn.py) |
| save | groups, state of version v + 1 | samples, checkpoint if one is due | Recorder, Checkpoints |
| sync | weights v + 1 | engines at version v + 1 | Hybrid |

The checkpoint comes before the weight sync, which gives the trainer's memory to the engines. With
loop.checkpoint.async_save its state is copied there, written while the next step generates, and
committed after that. Validation and the row of metrics follow the step.

Every wait has a deadline and names its phase.
"""

from __future__ import annotations

from typing import Any

from mrl.config.root import Config
from mrl.loops.group_supply import GroupSupply
from mrl.loops.learn import TrainingStep
from mrl.loops.rollout_thread import RolloutThread
from mrl.loops.schedule import Schedule, TrainerAndEngines


class OnPolicyLoop(Schedule):
    """On-policy loop: engines generate a step's groups, then pause while the trainer learns from them."""

    def __init__(
        self,
        config: Config,
        engines: TrainerAndEngines,
        rollouts: RolloutThread,
        supply: GroupSupply,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """The remaining arguments are those of Schedule."""
        super().__init__(config, engines, rollouts, supply, *args, **kwargs)
        self._supply = supply

    def step(self) -> None:
        step = self._begin()
        with self._bad_samples_named(step):
            self._collect(step)
            self._commit_pending()
            self._learner.learn(step)
        self.next_step += 1
        self._save(step, saves=self._save_due(step.number))
        self._sync(step)
        self._measure(step)
        self._write_row(step.number, step.metrics)

    def _collect(self, step: TrainingStep) -> None:
        """Run phases generate, reward and filter for the step's groups, then pause the engines."""
        self._rollouts.resume()
        supplied = self._supply.take(self._rollouts, version=step.version)
        self._rollouts.pause()
        self._engines.end_generation()
        step.groups, step.served_version = supplied.groups, supplied.served_version
        step.metrics |= supplied.metrics
        self.on_batch(step.groups)

    def _sync(self, step: TrainingStep) -> None:
        with self._clock.phase("sync"):
            step.metrics |= self._engines.sync(self.version)

    def _leave_engines(self) -> None:
        self._engines.end_generation()
