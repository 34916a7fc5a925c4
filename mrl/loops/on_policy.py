"""The on-policy loop: the eight phases of a step in order, and nothing else.

| phase | consumes | produces | done by |
|---|---|---|---|
| generate, reward | prompts of the stream | scored groups | Collector (engines, reward pool) |
| filter | scored groups | groups to train on, surplus for the next step | GroupSupply |
| recompute | packed batch | reference log-probs, values; old log-probs and mismatch where they need a pass | trainer ranks |
| estimate | rewards, log-probs | advantages | algorithms, on the driver |
| update | minibatches | mismatch where there was no pass for it, new weights, metrics | trainer ranks |
| save | groups, state of version v + 1 | samples, checkpoint where one is due | Recorder, trainer ranks |
| sync | weights v + 1 | engines at version v + 1 | Hybrid |

The checkpoint comes before the weight sync because the trainer's memory belongs to the engines after it. Validation and the
row of metrics follow the step.

Every wait inside has a deadline and names its phase. NaN and infinity end the run before parameters change (finite.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mrl.algorithms.recipe import shape_and_estimate
from mrl.algorithms.state import State
from mrl.config.root import Config
from mrl.errors import RewardError
from mrl.loops import mismatch, nan_guard
from mrl.loops.batch import ages, minibatches, pack, policy_versions
from mrl.loops.collect import Collector
from mrl.loops.group_supply import GroupSupply
from mrl.loops.recorder import Recorder
from mrl.loops.validate import validate
from mrl.samples import Group, Prompt, TrainBatch

METRIC_PREFIXES = {"policy": "optim", "critic": "critic"}
"""The first word of the metrics of a role's optimizer steps."""


class Engines(Protocol):
    """Trainer and engines together."""

    train: Any

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
        *,
        should_stop: Callable[[], str | None] = lambda: None,
        throughput: Callable[
            [np.ndarray, Mapping[str, float]], dict[str, float]
        ] = lambda lengths, metrics: {},
    ) -> None:
        self._config, self._engines, self._train = config, engines, engines.train
        self._collector, self._supply, self._validation_prompts = collector, supply, validation_prompts
        self._recorder, self._clock, self._should_stop = recorder, recorder.clock, should_stop
        self._throughput = throughput
        self._algorithm = State.of(config.algorithm)
        self._groups: Sequence[Group] = ()
        self.on_batch: Callable[[list[Group]], None] = lambda groups: None
        """Called with each step's groups; for measurements."""
        self._row_seconds = 0.0
        self.next_step = 1
        """Number of the next step; steps count from 1, step 0 is the starting point."""

    @property
    def version(self) -> int:
        """The policy's version: optimizer rounds done."""
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
                    self._save({})
                return reason
        return "done"

    def start(self) -> None:
        """The first weight sync."""
        self._engines.sync(self.version)

    def step(self) -> None:
        """The eight phases once. BadNumbers, with the samples written down, where a number is NaN or infinite."""
        try:
            self._step()
        except nan_guard.BadNumbers as error:
            self._recorder.bad_samples(self.next_step, error.groups or self._groups, error)
            raise

    def _step(self) -> None:
        step, start, worked = self.next_step, time.monotonic(), time.thread_time()
        self._clock.take_waited()
        groups, metrics = self._supply.groups(self._collector, version=self.version)
        self._engines.rest()
        metrics |= self._check_rewards(groups)
        self._groups = groups
        self.on_batch(groups)
        lengths = np.zeros(0, np.int64)
        if groups:
            batch, measured = self._recompute(groups)
            batch, shaped = self._estimate(batch, groups)
            metrics |= measured | shaped | self._update(batch)
            lengths = batch.lengths()
        self.next_step = step + 1
        with self._clock.phase("save"):
            self._recorder.samples(step, groups)
            if self._checkpoint_due(step):
                self._save(metrics)
        with self._clock.phase("sync"):
            metrics |= self._engines.sync(self.version)
        metrics |= self._clock.take()
        seconds = time.monotonic() - start
        metrics["time/step_seconds"] = seconds - metrics["time/save_seconds"]
        metrics |= self._throughput(lengths, metrics)
        metrics |= self._own_share(seconds) | {"perf/driver_cpu_seconds": time.thread_time() - worked}
        metrics |= self._validate(step) if self._validation_due(step) else {}
        self._write_row(step, metrics)

    def _own_share(self, seconds: float) -> dict[str, float]:
        """What the driver's thread did itself: a step, saving and the row before it included, less the waits for others."""
        own = seconds + self._row_seconds - self._clock.take_waited()
        return {"perf/driver_seconds": own, "perf/driver_frac": own / (seconds + self._row_seconds)}

    def _write_row(self, step: int, metrics: dict[str, float]) -> None:
        start = time.monotonic()
        self._recorder.row(step, metrics)
        self._row_seconds = time.monotonic() - start

    def _recompute(self, groups: Sequence[Group]) -> tuple[TrainBatch, dict[str, float]]:
        """The packed batch with reference log-probs and values by the trainer; where they need a pass of their own, also
        with old log-probs, and the engine's distance from those."""
        batch, temperature, measured = pack(groups), self._config.rollout.temperature, {}
        arrays = {"age": ages(batch, policy_versions(groups), version=self.version)}
        with self._clock.phase("recompute"):
            if self._recomputes_policy:
                policy = self._train.forward(
                    batch, role="policy", temperature=temperature, with_router_margins=True
                )
                arrays["old_logprobs"] = policy["logprobs"]
                measured = self._measured(batch, policy)
            if self._config.algorithm.needs_reference:
                arrays["ref_logprobs"] = self._train.forward(
                    batch, role="reference", temperature=temperature
                )["logprobs"]
            if self._config.algorithm.needs_values:
                arrays["values"] = self._train.forward(batch, role="critic")["values"]
            batch = batch.with_arrays(**arrays)
            nan_guard.check_batch(batch)
        return batch, measured

    @property
    def _recomputes_policy(self) -> bool:
        """Whether this step makes a pass for the policy's log-probs; while only the critic learns, no update measures the engine."""
        return self._config.algorithm.recomputes_policy or "policy" not in self._updated_roles()

    def _measured(self, batch: TrainBatch, policy: Mapping[str, np.ndarray]) -> dict[str, float]:
        """The engine's distance from the policy's log-probs [N] of the batch of this step; an error where it is too far."""
        loop = self._config.loop
        nan_guard.check_batch(batch.with_arrays(logprobs=policy["logprobs"]))
        measured = mismatch.measure(
            batch,
            policy["logprobs"],
            policy.get("router_margin"),
            served=policy_versions(self._groups) == self._supply.served_version,
            margin=loop.router_margin,
        )
        mismatch.check(measured, loop.max_rollout_mismatch, version=self.version)
        return measured

    def _estimate(self, batch: TrainBatch, groups: Sequence[Group]) -> tuple[TrainBatch, dict[str, float]]:
        with self._clock.phase("estimate"):
            batch, metrics = shape_and_estimate(self._config.algorithm, batch, groups, state=self._algorithm)
            nan_guard.check_batch(batch)
            if self._config.algorithm.needs_values:
                metrics["critic/explained_variance"] = explained_variance(batch)
        return batch, metrics

    def _update(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step of each role per minibatch and epoch; metrics are means over them."""
        rows = []
        with self._clock.phase("update"):
            for _ in range(self._config.algorithm.epochs):
                for positions in minibatches(batch, self._config.algorithm.minibatches):
                    rows.append(self._update_part(batch.select(positions)))
        names = dict.fromkeys(name for row in rows for name in row)
        metrics = {name: _over_updates(name, [row[name] for row in rows if name in row]) for name in names}
        self._algorithm.after_update(metrics, num_samples=batch.num_samples)
        return metrics

    def _update_part(self, part: TrainBatch) -> dict[str, float]:
        """The optimizer steps of one minibatch; none, and that counted, where it has nothing to train on."""
        if not part.loss_mask.any():
            return {"optim/skipped": 1.0}
        metrics: dict[str, float] = {}
        divisors = denominators(part) | self._algorithm.coefficients()
        for role in self._updated_roles():
            if role == "policy" and not self._recomputes_policy:
                figures = self._measured_update(part, divisors)
            else:
                figures = self._train.update(part, divisors, role=role)
            nan_guard.check_update(part, figures, role)
            prefix = METRIC_PREFIXES[role]
            metrics |= {n if "/" in n else f"{prefix}/{n}": value for n, value in figures.items()}
        return metrics

    def _measured_update(self, batch: TrainBatch, divisors: dict[str, float]) -> dict[str, float]:
        """The step's only update of the policy: its own log-probs measure the engine before any parameter changes."""
        policy, metrics = self._train.accumulate(batch, divisors)
        return metrics | self._measured(batch, policy) | self._train.step()

    def _updated_roles(self) -> list[str]:
        """The policy after the critic's warm-up, and the critic where there is one.

        The policy first: an update of it that is refused leaves both as they were.
        """
        critic = self._config.critic
        if critic is None:
            return ["policy"]
        return ["policy", "critic"] if self.next_step > critic.warmup_steps else ["critic"]

    def _check_rewards(self, groups: Sequence[Group]) -> dict[str, float]:
        fraction = self._supply.no_reward_fraction
        if fraction > self._config.loop.max_no_reward_fraction:
            raise RewardError(
                f"{fraction:.1%} of this step's samples have no reward, more than loop.max_no_reward_fraction = "
                f"{self._config.loop.max_no_reward_fraction:.1%}; see the verifier's reasons in samples.jsonl and the log"
            )
        return {"reward/no_reward_frac": fraction, "rollout/groups": float(len(groups))}

    def _checkpoint_due(self, step: int) -> bool:
        section = self._config.loop.checkpoint
        return _due(step, section.every_steps, last=self._config.loop.steps, at_end=section.at_end)

    def _validation_due(self, step: int) -> bool:
        section = self._config.loop.validation
        return _due(step, section.every_steps, last=self._config.loop.steps, at_end=section.after_training)

    def _validate(self, step: int) -> dict[str, float]:
        if not self._validation_prompts:
            return {}
        start = time.monotonic()
        metrics, groups = validate(self._collector, self._validation_prompts, self._config)
        self._recorder.samples(step, groups, kind="validation")
        self._clock.take()
        return metrics | {"time/validate_seconds": time.monotonic() - start}

    def _save(self, row: Mapping[str, float]) -> None:
        """`row`: the metrics of the step so far; its own row is written after the weight sync, which a death may prevent."""
        state = {
            "next_step": self.next_step,
            "supply": self._supply.state(),
            "algorithm": self._algorithm.state(),
            "row": dict(row),
        }
        self._recorder.checkpoint(self._train, step=self.version, state=state)

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


def _due(step: int, every: int, *, last: int, at_end: bool) -> bool:
    return (every > 0 and step % every == 0) or (at_end and step == last)
