"""Learning from a step's groups: phases recompute, estimate and update, the same under every schedule.

| phase | consumes | produces | done by |
|---|---|---|---|
| recompute | packed batch | values; old log-probs, mismatch and log-probs of the reference where they need a pass | trainer ranks |
| estimate | rewards, log-probs | advantages | algorithms, on the driver |
| update | minibatches | mismatch and log-probs of the reference where there was no pass for them, new weights, metrics | trainer ranks |

NaN and infinity end the run before parameters change (nan_guard.py).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mrl.algorithms.entropy_coefficient import EntropyCoefficient
from mrl.algorithms.outcomes import policy_lengths
from mrl.algorithms.recipe import shape_and_estimate
from mrl.config.root import Config
from mrl.config.sections.distillation import TEACHER, DistillationSection
from mrl.loops import mismatch, nan_guard, staleness
from mrl.observe.phases import PhaseClock
from mrl.samples import Group, Role, TrainBatch
from mrl.training.batch import ages, first_versions, minibatches, pack
from mrl.training.pass_options import PassOptions

METRIC_PREFIXES: dict[Role, str] = {"policy": "optim", "critic": "critic"}
"""The first word of the metrics of a role's optimizer steps."""


class TrainerRanks(Protocol):
    """All trainer ranks as one object."""

    def forward(self, batch: TrainBatch, options: PassOptions) -> dict[str, np.ndarray]: ...

    def forward_recording(
        self, batch: TrainBatch, options: PassOptions
    ) -> tuple[dict[str, np.ndarray], TrainBatch]:
        """The policy's forward(), and the batch with the routes it took."""
        ...

    def update(
        self, batch: TrainBatch, denominators: Mapping[str, float], options: PassOptions
    ) -> dict[str, float]: ...

    def accumulate(
        self, batch: TrainBatch, denominators: Mapping[str, float], options: PassOptions
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]: ...

    def step(self) -> dict[str, float]: ...

    def save_checkpoint(self, path: Path, state: Mapping[str, Any], *, beside: bool) -> None: ...

    def checkpoint_is_written(self) -> bool: ...

    def commit_checkpoint(self) -> None: ...


@dataclasses.dataclass
class TrainingStep:
    """What one step has made so far; its phases read it and add to it."""

    number: int
    """From 1."""
    version: int
    """Of the weights that the step trains."""
    started: float = dataclasses.field(default_factory=time.monotonic)
    groups: Sequence[Group] = ()
    served_version: int = -1
    """Of the weights that the engines say they made the step's new samples with."""
    batch: TrainBatch | None = None
    """The groups packed; None before, and where there are none."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)


class Learner:
    """The three phases over the trainer, and the entropy bonus's weight, which moves with them."""

    def __init__(self, config: Config, train: TrainerRanks, clock: PhaseClock) -> None:
        self._config, self._train, self._clock = config, train, clock
        self._entropy = EntropyCoefficient.of(config.algorithm.entropy)
        self._plain = PassOptions(temperature=config.rollout.temperature)
        self._measuring = dataclasses.replace(
            self._plain,
            # Routes of the engine leave routers no choice, so no near-tie of theirs explains a difference.
            with_router_margins=not self._takes_routes_of_engine,
            with_reference=config.algorithm.needs_reference,
        )
        """The pass that measures the engine; it brings the reference's log-probs if the algorithm needs them."""

    def learn(self, step: TrainingStep) -> None:
        """The three phases once; nothing where the step has no groups. BadNumbers where a number is NaN or infinite."""
        if step.groups:
            self._recompute(step)
            self._estimate(step)
            self._update(step)

    def state(self) -> dict[str, Any]:
        """JSON values that `restore` takes."""
        return {"entropy": self._entropy.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self._entropy.restore(state["entropy"])

    # -- phases --------------------------------------------------------------------------------------------------

    def _recompute(self, step: TrainingStep) -> None:
        """The packed batch with values by the trainer; where the policy needs a pass, also with old
        log-probs, the engine's distance from those, and log-probs of the reference."""
        batch = pack(step.groups, with_routes=self._takes_routes_of_engine)
        batch = batch.with_arrays(age=ages(step.groups, version=step.version))
        arrays: dict[str, np.ndarray] = {}
        with self._clock.phase("recompute"):
            if self._recomputes_policy(step):
                batch, policy = self._pass(batch)
                arrays |= _kept(policy)
                step.metrics |= self._mismatch(step, batch, policy)
            if (distillation := self._config.algorithm.distillation) is not None:
                batch = _with_teachers(batch, step.groups, distillation)
            if self._config.algorithm.needs_values:
                arrays["values"] = self._forward(batch, role="critic")["values"]
            step.batch = batch.with_arrays(**arrays)
            nan_guard.check_batch(step.batch, step.batch.arrays)

    def _estimate(self, step: TrainingStep) -> None:
        """Rewards become advantages of the batch's tokens."""
        assert step.batch is not None
        given = step.batch.arrays
        with self._clock.phase("estimate"):
            step.batch, metrics = shape_and_estimate(self._config.algorithm, step.batch, step.groups)
            nan_guard.check_batch(step.batch, [name for name in step.batch.arrays if name not in given])
            step.metrics |= metrics
            if self._config.algorithm.needs_values:
                step.metrics["critic/explained_variance"] = explained_variance(step.batch)

    def _update(self, step: TrainingStep) -> None:
        """One optimizer step of each role per minibatch and epoch; metrics are means over them."""
        batch, rows = step.batch, []
        assert batch is not None
        with self._clock.phase("update"):
            for _ in range(self._config.algorithm.epochs):
                for positions in minibatches(batch, self._config.algorithm.minibatches):
                    rows.append(self._update_part(step, batch.select(positions)))
        names = dict.fromkeys(name for row in rows for name in row)
        metrics = {name: _over_updates(name, [row[name] for row in rows if name in row]) for name in names}
        if "policy/entropy" in metrics:
            self._entropy.update(metrics["policy/entropy"])
        step.metrics |= metrics

    def _pass(self, batch: TrainBatch) -> tuple[TrainBatch, dict[str, np.ndarray]]:
        """The arrays of policy and reference; and the batch, with the routes that were taken where later passes are to take
        them too: the reference's, then, is such a pass."""
        if self._config.routing.replay != "trainer":
            return batch, self._train.forward(batch, self._measuring)
        recording = dataclasses.replace(self._measuring, with_reference=False)
        policy, batch = self._train.forward_recording(batch, recording)
        if self._measuring.with_reference:
            policy["ref_logprobs"] = self._forward(batch, role="reference")["logprobs"]
        return batch, policy

    def _forward(self, batch: TrainBatch, *, role: Role) -> dict[str, np.ndarray]:
        """Return what another model than the policy computes for the batch."""
        return self._train.forward(batch, dataclasses.replace(self._plain, role=role))

    # -- parts of phases -----------------------------------------------------------------------------------------

    def _update_part(self, step: TrainingStep, part: TrainBatch) -> dict[str, float]:
        """The optimizer steps of one minibatch; none, and that counted, where it has nothing to train on."""
        if not part.loss_mask.any():
            return {"optim/skipped": 1.0}
        metrics: dict[str, float] = {}
        divisors = denominators(part) | {"entropy_coefficient": self._entropy.value}
        for role in self._updated_roles(step):
            if role == "policy" and not self._recomputes_policy(step):
                figures = self._measured_update(step, part, divisors)
            else:
                figures = self._train.update(part, divisors, dataclasses.replace(self._plain, role=role))
            nan_guard.check_update(part, figures, role)
            prefix = METRIC_PREFIXES[role]
            metrics |= {n if "/" in n else f"{prefix}/{n}": value for n, value in figures.items()}
        return metrics

    def _measured_update(
        self, step: TrainingStep, batch: TrainBatch, divisors: Mapping[str, float]
    ) -> dict[str, float]:
        """The step's only update of the policy: its own log-probs measure the engine before any parameter changes."""
        policy, metrics = self._train.accumulate(batch, divisors, self._measuring)
        metrics |= self._mismatch(step, batch, policy)
        step.batch = batch.with_arrays(**(kept := _kept(policy)))
        nan_guard.check_batch(step.batch, kept)
        return metrics | self._train.step()

    def _mismatch(
        self, step: TrainingStep, batch: TrainBatch, policy: Mapping[str, np.ndarray]
    ) -> dict[str, float]:
        """The engine's distance from the policy's log-probs [N] of the step's batch; an error where it is too far."""
        loop, served = self._config.loop, batch.arrays["age"] == step.version - step.served_version
        if self._takes_routes_of_engine:
            # What comes before a token has the routes of the version that sampled it, not of a later one.
            served &= first_versions(step.groups) == step.served_version
        nan_guard.check_batch(batch.with_arrays(logprobs=policy["logprobs"]), ["logprobs"])
        measured = mismatch.measure_mismatch(
            batch,
            policy["logprobs"],
            policy.get("router_margin"),
            served=served,
            margin=mismatch.ROUTER_MARGIN,
        )
        mismatch.check_mismatch(measured, loop.max_rollout_mismatch, version=step.version)
        return measured | staleness.by_age(batch, policy["logprobs"])

    @property
    def _takes_routes_of_engine(self) -> bool:
        """Whether passes choose the engine's experts."""
        return self._config.routing.replay == "engine"

    def _recomputes_policy(self, step: TrainingStep) -> bool:
        """Whether the step makes a pass for the policy's log-probs; while only the critic learns, no update measures the engine."""
        return self._config.algorithm.recomputes_policy or "policy" not in self._updated_roles(step)

    def _updated_roles(self, step: TrainingStep) -> list[Role]:
        """The policy after the critic's warm-up, and the critic where there is one.

        The policy first: an update of it that is refused leaves both as they were.
        """
        critic = self._config.critic
        if critic is None:
            return ["policy"]
        return ["policy", "critic"] if step.number > critic.warmup_steps else ["critic"]


def denominators(batch: TrainBatch) -> dict[str, float]:
    """What sums over a whole optimizer step are divided by, whatever its microbatches and ranks."""
    trained = policy_lengths(batch)
    fresh = batch.loss_mask & (batch.arrays.get("age", 0) == 0)
    counts = {
        "num_tokens": float(trained.sum()),
        "num_fresh_tokens": float(np.count_nonzero(fresh)),
        "num_sequences": float(np.count_nonzero(trained)),
    }
    if TEACHER in batch.samples:
        counts["num_taught_tokens"] = float(trained[batch.samples[TEACHER] >= 0].sum())
    return counts


def _kept(policy: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the batch keeps of the policy's pass, by its names there."""
    names = {"logprobs": "old_logprobs", "ref_logprobs": "ref_logprobs"}
    return {names[name]: array for name, array in policy.items() if name in names}


def _with_teachers(batch: TrainBatch, groups: Sequence[Group], section: DistillationSection) -> TrainBatch:
    """The packed groups, and of each sample which of the section's folders teaches its domain."""
    numbers = {domain: section.folders.index(folder) for domain, folder in section.teachers.items()}
    teachers = [numbers.get(sample.domain, -1) for group in groups for sample in group.samples]
    return dataclasses.replace(batch, samples={**batch.samples, TEACHER: np.array(teachers, np.int64)})


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
