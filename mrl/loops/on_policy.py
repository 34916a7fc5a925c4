"""The on-policy loop: the eight phases of a step in order, and nothing else.

| phase | consumes | produces | done by |
|---|---|---|---|
| generate, reward | prompts of the stream | scored groups | Collector (engines, reward pool) |
| filter | scored groups | groups to train on, surplus for the next step | GroupSupply |
| recompute | packed batch | reference log-probs, values; old log-probs and mismatch where they need a pass | trainer ranks |
| estimate | rewards, log-probs | advantages | algorithms, on the driver |
| update | minibatches | mismatch where there was no pass for it, new weights, metrics | trainer ranks |
| save | groups, state of version v + 1 | samples, checkpoint where one is due | Recorder, Checkpoints |
| sync | weights v + 1 | engines at version v + 1 | Hybrid |

The checkpoint comes before the weight sync because the trainer's memory belongs to the engines after it; with
loop.checkpoint.beside_training its state is copied there, written while the next step generates, and committed
after that. Validation and the row of metrics follow the step.

Every wait inside has a deadline and names its phase. NaN and infinity end the run before parameters change (nan_guard.py).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mrl.algorithms.controllers import AlgorithmState
from mrl.algorithms.recipe import shape_and_estimate
from mrl.config.root import Config
from mrl.loops import mismatch, nan_guard
from mrl.loops.checkpoints import Checkpoints, Saver
from mrl.loops.collect import Collector
from mrl.loops.group_supply import GroupSupply
from mrl.loops.recorder import Recorder
from mrl.loops.validate import validate
from mrl.samples import Group, Prompt, Role, TrainBatch
from mrl.training.batch import ages, minibatches, pack, policy_versions

METRIC_PREFIXES: dict[Role, str] = {"policy": "optim", "critic": "critic"}
"""The first word of the metrics of a role's optimizer steps."""


class Trainer(Saver, Protocol):
    """All trainer ranks as one object."""

    def forward(
        self, batch: TrainBatch, *, role: Role, temperature: float = 1.0, with_router_margins: bool = False
    ) -> dict[str, np.ndarray]: ...

    def update(
        self, batch: TrainBatch, denominators: Mapping[str, float], *, role: Role
    ) -> dict[str, float]: ...

    def accumulate(
        self, batch: TrainBatch, denominators: Mapping[str, float]
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]: ...

    def step(self) -> dict[str, float]: ...


class Engines(Protocol):
    """Trainer and engines on the same slots."""

    @property
    def train(self) -> Trainer: ...

    def sync(self, version: int) -> dict[str, float]: ...

    def rest(self) -> None: ...


@dataclasses.dataclass
class Step:
    """What one step has made so far; its phases read it and add to it."""

    number: int
    """From 1."""
    version: int
    """Of the weights that the step trains."""
    started: float = dataclasses.field(default_factory=time.monotonic)
    worked: float = dataclasses.field(default_factory=time.thread_time)
    """Seconds that the driver's thread had computed when the step began."""
    groups: Sequence[Group] = ()
    served_version: int = -1
    """Of the weights that the engines say they made the step's new samples with."""
    batch: TrainBatch | None = None
    """The groups packed; None before, and where there are none."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)


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
        throughput: Callable[
            [np.ndarray, Mapping[str, float]], dict[str, float]
        ] = lambda lengths, metrics: {},
    ) -> None:
        self._config, self._engines, self._train = config, engines, engines.train
        self._collector, self._supply, self._validation_prompts = collector, supply, validation_prompts
        self._recorder, self._clock, self._should_stop = recorder, recorder.clock, should_stop
        self._checkpoints, self._throughput = checkpoints, throughput
        self._algorithm = AlgorithmState.of(config.algorithm)
        self.on_batch: Callable[[Sequence[Group]], None] = lambda groups: None
        """Called with each step's groups; for measurements."""
        self._row_seconds = 0.0
        self.next_step = 1
        """Number of the next step; steps count from 1, step 0 is the starting point."""

    @property
    def version(self) -> int:
        """The policy's version: the number of steps that are done."""
        return self.next_step - 1

    def run(self) -> str:
        """All remaining steps after start(), the starting point's validation before the first; returns why it ended ("done" or
        the reason to stop)."""
        if self.version == 0 and self._config.loop.validation.before_training:
            self._write_row(0, self._validate(0))
        while self.next_step <= self._config.loop.steps:
            self.step()
            if reason := self._should_stop():
                self._engines.rest()
                with self._clock.phase("save"):
                    self._save_checkpoint({}, goes_on=False)
                return reason
        self._checkpoints.finish(self._train)
        return "done"

    def start(self) -> None:
        """The first weight sync."""
        self._engines.sync(self.version)

    def step(self) -> None:
        """The eight phases once. BadNumbers, with the samples written down, where a number is NaN or infinite."""
        step = Step(self.next_step, self.version)
        self._clock.step = step.number
        self._clock.take_waited()
        try:
            self._collect(step)
            self._commit_pending()
            if step.groups:
                self._recompute(step)
                self._estimate(step)
                self._update(step)
        except nan_guard.BadNumbers as error:
            self._recorder.bad_samples(step.number, error.groups or step.groups, error)
            raise
        self.next_step += 1
        self._save(step)
        self._sync(step)
        self._measure_time(step)
        if self._validation_due(step.number):
            step.metrics |= self._validate(step.number)
        self._write_row(step.number, step.metrics)

    # -- phases --------------------------------------------------------------------------------------------------

    def _collect(self, step: Step) -> None:
        """Phases generate, reward and filter: the step's groups, after which the engines rest."""
        supplied = self._supply.take(self._collector, version=step.version)
        self._engines.rest()
        step.groups, step.served_version = supplied.groups, supplied.served_version
        step.metrics |= supplied.metrics
        self.on_batch(step.groups)

    def _recompute(self, step: Step) -> None:
        """The packed batch with reference log-probs and values by the trainer; where they need a pass of their own, also
        with old log-probs, and the engine's distance from those."""
        batch, temperature = pack(step.groups), self._config.rollout.temperature
        arrays = {"age": ages(batch, policy_versions(step.groups), version=step.version)}
        with self._clock.phase("recompute"):
            if self._recomputes_policy:
                policy = self._train.forward(
                    batch, role="policy", temperature=temperature, with_router_margins=True
                )
                arrays["old_logprobs"] = policy["logprobs"]
                step.metrics |= self._mismatch(step, batch, policy)
            if self._config.algorithm.needs_reference:
                arrays["ref_logprobs"] = self._train.forward(
                    batch, role="reference", temperature=temperature
                )["logprobs"]
            if self._config.algorithm.needs_values:
                arrays["values"] = self._train.forward(batch, role="critic")["values"]
            step.batch = batch.with_arrays(**arrays)
            nan_guard.check_batch(step.batch)

    def _estimate(self, step: Step) -> None:
        """Rewards become advantages of the batch's tokens."""
        assert step.batch is not None
        with self._clock.phase("estimate"):
            step.batch, metrics = shape_and_estimate(
                self._config.algorithm, step.batch, step.groups, state=self._algorithm
            )
            nan_guard.check_batch(step.batch)
            step.metrics |= metrics
            if self._config.algorithm.needs_values:
                step.metrics["critic/explained_variance"] = explained_variance(step.batch)

    def _update(self, step: Step) -> None:
        """One optimizer step of each role per minibatch and epoch; metrics are means over them."""
        batch, rows = step.batch, []
        assert batch is not None
        with self._clock.phase("update"):
            for _ in range(self._config.algorithm.epochs):
                for positions in minibatches(batch, self._config.algorithm.minibatches):
                    rows.append(self._update_part(step, batch.select(positions)))
        names = dict.fromkeys(name for row in rows for name in row)
        metrics = {name: _over_updates(name, [row[name] for row in rows if name in row]) for name in names}
        self._algorithm.after_update(metrics, num_samples=batch.num_samples)
        step.metrics |= metrics

    def _save(self, step: Step) -> None:
        """Samples, and a checkpoint where one is due: before the sync, because the trainer's memory is the engines' after it."""
        with self._clock.phase("save"):
            self._recorder.samples(step.number, step.groups)
            section = self._config.loop.checkpoint
            if self._due(step.number, section.every_steps, at_end=section.at_end):
                self._save_checkpoint(step.metrics, goes_on=step.number < self._config.loop.steps)

    def _sync(self, step: Step) -> None:
        with self._clock.phase("sync"):
            step.metrics |= self._engines.sync(self.version)

    # -- parts of phases -----------------------------------------------------------------------------------------

    def _update_part(self, step: Step, part: TrainBatch) -> dict[str, float]:
        """The optimizer steps of one minibatch; none, and that counted, where it has nothing to train on."""
        if not part.loss_mask.any():
            return {"optim/skipped": 1.0}
        metrics: dict[str, float] = {}
        divisors = denominators(part) | self._algorithm.coefficients()
        for role in self._updated_roles():
            if role == "policy" and not self._recomputes_policy:
                figures = self._measured_update(step, part, divisors)
            else:
                figures = self._train.update(part, divisors, role=role)
            nan_guard.check_update(part, figures, role)
            prefix = METRIC_PREFIXES[role]
            metrics |= {n if "/" in n else f"{prefix}/{n}": value for n, value in figures.items()}
        return metrics

    def _measured_update(
        self, step: Step, batch: TrainBatch, divisors: Mapping[str, float]
    ) -> dict[str, float]:
        """The step's only update of the policy: its own log-probs measure the engine before any parameter changes."""
        policy, metrics = self._train.accumulate(batch, divisors)
        return metrics | self._mismatch(step, batch, policy) | self._train.step()

    def _mismatch(self, step: Step, batch: TrainBatch, policy: Mapping[str, np.ndarray]) -> dict[str, float]:
        """The engine's distance from the policy's log-probs [N] of the step's batch; an error where it is too far."""
        loop = self._config.loop
        nan_guard.check_batch(batch.with_arrays(logprobs=policy["logprobs"]))
        measured = mismatch.measure(
            batch,
            policy["logprobs"],
            policy.get("router_margin"),
            served=policy_versions(step.groups) == step.served_version,
            margin=loop.router_margin,
        )
        mismatch.check(measured, loop.max_rollout_mismatch, version=step.version)
        return measured

    @property
    def _recomputes_policy(self) -> bool:
        """Whether this step makes a pass for the policy's log-probs; while only the critic learns, no update measures the engine."""
        return self._config.algorithm.recomputes_policy or "policy" not in self._updated_roles()

    def _updated_roles(self) -> list[Role]:
        """The policy after the critic's warm-up, and the critic where there is one.

        The policy first: an update of it that is refused leaves both as they were.
        """
        critic = self._config.critic
        if critic is None:
            return ["policy"]
        return ["policy", "critic"] if self.next_step > critic.warmup_steps else ["critic"]

    # -- beside the phases ---------------------------------------------------------------------------------------

    def _measure_time(self, step: Step) -> None:
        """Seconds of the phases and of the step, without saving; rates; and what the driver's thread did itself: a step,
        saving and the row before it included, less the waits for others."""
        metrics, seconds = step.metrics, time.monotonic() - step.started
        metrics |= self._clock.take()
        metrics["time/step_seconds"] = seconds - metrics["time/save_seconds"]
        lengths = step.batch.lengths() if step.batch is not None else np.zeros(0, np.int64)
        metrics |= self._throughput(lengths, metrics)
        own = seconds + self._row_seconds - self._clock.take_waited()
        metrics["perf/driver_seconds"] = own
        metrics["perf/driver_frac"] = own / (seconds + self._row_seconds)
        metrics["perf/driver_cpu_seconds"] = time.thread_time() - step.worked

    def _write_row(self, number: int, metrics: dict[str, float]) -> None:
        start = time.monotonic()
        self._recorder.row(number, metrics)
        self._checkpoints.export_due()
        self._row_seconds = time.monotonic() - start

    def _due(self, number: int, every: int, *, at_end: bool) -> bool:
        return (every > 0 and number % every == 0) or (at_end and number == self._config.loop.steps)

    def _validation_due(self, number: int) -> bool:
        section = self._config.loop.validation
        return self._due(number, section.every_steps, at_end=section.after_training)

    def _validate(self, number: int) -> dict[str, float]:
        if not self._validation_prompts:
            return {}
        start = time.monotonic()
        metrics, groups = validate(self._collector, self._validation_prompts, self._config)
        self._recorder.samples(number, groups, kind="validation")
        self._clock.take()
        return metrics | {"time/validate_seconds": time.monotonic() - start}

    def _save_checkpoint(self, row: Mapping[str, float], *, goes_on: bool) -> None:
        """`row`: the metrics of the step so far; its own row is written after the weight sync, which a death may prevent."""
        state = {
            "next_step": self.next_step,
            "supply": self._supply.state(),
            "algorithm": self._algorithm.state(),
            "row": dict(row),
        }
        self._checkpoints.save(self._train, step=self.version, state=state, goes_on=goes_on)

    def _commit_pending(self) -> None:
        """The checkpoint of the step before, if it is written beside this one; generating left time for its files."""
        if self._checkpoints.pending:
            with self._clock.phase("save"):
                self._checkpoints.poll(self._train)

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from a checkpoint's state."""
        self.next_step = int(state["next_step"])
        self._supply.restore(state["supply"])
        self._algorithm.restore(state["algorithm"])
        self._recorder.restore_row(self.version, state.get("row", {}))


def denominators(batch: TrainBatch) -> dict[str, float]:
    """What sums over a whole optimizer step are divided by, whatever its microbatches and ranks."""
    trained = np.add.reduceat(batch.loss_mask, batch.cu_seqlens[:-1]) if batch.num_samples else np.zeros(0)
    fresh = batch.loss_mask & (batch.arrays.get("age", 0) == 0)
    return {
        "num_tokens": float(batch.loss_mask.sum()),
        "num_fresh_tokens": float(fresh.sum()),
        "num_sequences": float((trained > 0).sum()),
    }


def explained_variance(batch: TrainBatch) -> float:
    """Share of the returns' variance that the values before the update explain; 0 where returns do not vary."""
    returns, values = (batch.arrays[n][batch.loss_mask].astype(np.float64) for n in ("returns", "values"))
    spread = float(returns.var()) if len(returns) else 0.0
    return 1.0 - float((returns - values).var()) / spread if spread > 0 else 0.0


def _over_updates(name: str, values: Sequence[float]) -> float:
    """A step's figure from its optimizer steps: largest, smallest or mean by the name's ending."""
    if name.endswith("_max"):
        return float(np.max(values))
    return float(np.min(values) if name.endswith("_min") else np.mean(values))
