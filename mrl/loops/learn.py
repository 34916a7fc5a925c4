"""Learn from a step's groups: the phases recompute, estimate and update, the same for every schedule.

| phase | consumes | produces | done by |
|---|---|---|---|
| recompute | packed batch | values; old and reference log-probs and mismatch, if in a pass | trainer ranks |
| estimate | rewards, log-probs | advantages | algorithms, on the driver |
| update | minibatches | weights, metrics; reference log-probs and mismatch, if in no pass | trainer ranks |

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
from mrl.training.batch import first_versions, minibatches, pack, staleness_of
from mrl.training.pass_options import PassOptions

METRIC_PREFIXES: dict[Role, str] = {"policy": "optim", "critic": "critic"}
"""Prefix of a role's optimizer metrics."""


class TrainerRanks(Protocol):
    """All trainer ranks as one object."""

    def forward(self, batch: TrainBatch, options: PassOptions) -> dict[str, np.ndarray]: ...

    def forward_recording(
        self, batch: TrainBatch, options: PassOptions
    ) -> tuple[dict[str, np.ndarray], TrainBatch]:
        """Return the policy's forward() result, and the batch with the routes it took."""
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
    """State of one step, which its phases read and extend."""

    number: int
    """Step number, from 1."""
    version: int
    """Version of the weights that the step trains."""
    started: float = dataclasses.field(default_factory=time.monotonic)
    groups: Sequence[Group] = ()
    served_version: int = -1
    """Version that the engines reported for the step's new samples."""
    batch: TrainBatch | None = None
    """The groups, packed; None before phase recompute, and if there are none."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)


class Learner:
    """Learner: the three phases on the trainer, and the entropy coefficient that an update adapts."""

    def __init__(self, config: Config, train: TrainerRanks, clock: PhaseClock) -> None:
        self._config, self._train, self._clock = config, train, clock
        self._entropy = EntropyCoefficient.of(config.algorithm.entropy)
        self._plain = PassOptions(temperature=config.rollout.temperature)
        self._measuring = dataclasses.replace(
            self._plain,
            # With the engine's routes a router has no choice, so near-ties explain no difference.
            with_router_margins=not self._takes_routes_of_engine,
            with_reference=config.algorithm.needs_reference,
        )
        """Pass that measures the mismatch; also returns reference log-probs if the algorithm needs them."""

    def learn(self, step: TrainingStep) -> None:
        """Run the three phases if the step has groups. Raise BadNumbers if a number is NaN or infinite."""
        if step.groups:
            self._recompute(step)
            self._estimate(step)
            self._update(step)

    def state(self) -> dict[str, Any]:
        """Return JSON values for `restore`."""
        return {"entropy": self._entropy.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self._entropy.restore(state["entropy"])

    def _recompute(self, step: TrainingStep) -> None:
        """Pack the batch, with values; after a policy pass also old and reference log-probs, and mismatch."""
        batch = pack(step.groups, with_routes=self._takes_routes_of_engine)
        batch = batch.with_arrays(age=staleness_of(step.groups, version=step.version))
        if batch.sampling_masks is not None:
            counts = batch.sampling_masks.counts[batch.loss_mask]
            step.metrics |= {
                "policy/kept_tokens_mean": float(counts.mean()) if len(counts) else 0.0,
                "policy/kept_tokens_max": float(counts.max(initial=0)),
            }
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
        assert step.batch is not None
        inputs = step.batch.arrays
        with self._clock.phase("estimate"):
            step.batch, metrics = shape_and_estimate(self._config.algorithm, step.batch, step.groups)
            nan_guard.check_batch(step.batch, [name for name in step.batch.arrays if name not in inputs])
            step.metrics |= metrics
            if self._config.algorithm.needs_values:
                step.metrics["critic/explained_variance"] = explained_variance(step.batch)

    def _update(self, step: TrainingStep) -> None:
        """Run one optimizer step per role, minibatch and epoch, and aggregate their metrics."""
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
        """Return the batch, and the arrays of policy and reference. If later passes replay the trainer's
        routes, the batch contains them, and the reference's pass already takes them."""
        if self._config.routing.replay != "trainer":
            return batch, self._train.forward(batch, self._measuring)
        recording = dataclasses.replace(self._measuring, with_reference=False)
        policy, batch = self._train.forward_recording(batch, recording)
        if self._measuring.with_reference:
            policy["ref_logprobs"] = self._forward(batch, role="reference")["logprobs"]
        return batch, policy

    def _forward(self, batch: TrainBatch, *, role: Role) -> dict[str, np.ndarray]:
        """Return what a model other than the policy computes for the batch."""
        return self._train.forward(batch, dataclasses.replace(self._plain, role=role))

    def _update_part(self, step: TrainingStep, part: TrainBatch) -> dict[str, float]:
        """Run the optimizer steps of one minibatch; count it as skipped if it has no trained token."""
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
        """Run the step's only policy update; its log-probs measure the mismatch before parameters change."""
        policy, metrics = self._train.accumulate(batch, divisors, self._measuring)
        metrics |= self._mismatch(step, batch, policy)
        step.batch = batch.with_arrays(**(kept := _kept(policy)))
        nan_guard.check_batch(step.batch, kept)
        return metrics | self._train.step()

    def _mismatch(
        self, step: TrainingStep, batch: TrainBatch, policy: Mapping[str, np.ndarray]
    ) -> dict[str, float]:
        """Return the mismatch of the policy's log-probs [N]; raise WeightSyncError if it is too large."""
        loop, served = self._config.loop, batch.arrays["age"] == step.version - step.served_version
        if self._takes_routes_of_engine:
            # Earlier tokens have the routes of their own version: all must come from the served one.
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
        return measured | staleness.drift_by_staleness(batch, policy["logprobs"])

    @property
    def _takes_routes_of_engine(self) -> bool:
        """True if passes replay the engine's routes."""
        return self._config.routing.replay == "engine"

    def _recomputes_policy(self, step: TrainingStep) -> bool:
        """Return True if a pass computes the policy's log-probs; always so while only the critic learns."""
        return self._config.algorithm.recomputes_policy or "policy" not in self._updated_roles(step)

    def _updated_roles(self, step: TrainingStep) -> list[Role]:
        """Return the roles to update: the policy after the critic's warm-up, and the critic if there is one.

        The policy comes first: if its update is refused, both stay as they were.
        """
        critic = self._config.critic
        if critic is None:
            return ["policy"]
        return ["policy", "critic"] if step.number > critic.warmup_steps else ["critic"]


def denominators(batch: TrainBatch) -> dict[str, float]:
    """Return the divisors of sums over an optimizer step, independent of microbatches and ranks."""
    trained = policy_lengths(batch)
    fresh = batch.loss_mask & (batch.arrays.get("age", 0) == 0)
    counts = {
        "num_tokens": float(trained.sum()),
        "num_fresh_tokens": float(np.count_nonzero(fresh)),
        "num_sequences": float(_count_samples(batch, trained > 0)),
    }
    if TEACHER in batch.samples:
        counts["num_taught_tokens"] = float(trained[batch.samples[TEACHER] >= 0].sum())
    return counts


def _count_samples(batch: TrainBatch, is_trained: np.ndarray) -> int:
    """Count the samples with a trained segment ([B] bool)."""
    samples = batch.samples.get("sample")
    return int(np.count_nonzero(is_trained)) if samples is None else len(np.unique(samples[is_trained]))


def _kept(policy: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays of the policy's pass that the batch keeps, by their names in the batch."""
    names = {"logprobs": "old_logprobs", "ref_logprobs": "ref_logprobs"}
    return {names[name]: array for name, array in policy.items() if name in names}


def _with_teachers(batch: TrainBatch, groups: Sequence[Group], section: DistillationSection) -> TrainBatch:
    """Return the batch with each sample's teacher: the index of its domain's folder, or -1."""
    numbers = {domain: section.folders.index(folder) for domain, folder in section.teachers.items()}
    teachers = [numbers.get(sequence.domain, -1) for group in groups for sequence in group.sequences()]
    return dataclasses.replace(batch, samples={**batch.samples, TEACHER: np.array(teachers, np.int64)})


def explained_variance(batch: TrainBatch) -> float:
    """Return the share of the returns' variance that the old values explain; 0 if returns do not vary."""
    returns, values = (batch.arrays[n][batch.loss_mask].astype(np.float64) for n in ("returns", "values"))
    spread = float(returns.var()) if len(returns) else 0.0
    return 1.0 - float((returns - values).var()) / spread if spread > 0 else 0.0


def _over_updates(name: str, values: Sequence[float]) -> float:
    """Return a step's metric from its optimizer steps: maximum, minimum or mean by the name's ending."""
    if name.endswith("_max"):
        return float(np.max(values))
    return float(np.min(values) if name.endswith("_min") else np.mean(values))
