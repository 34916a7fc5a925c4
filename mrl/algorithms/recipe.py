"""From rewards to advantages as the configuration names it: the one call the loop makes between scoring and update.

Consumes: a packed batch (with old_logprobs and ref_logprobs where KL is in the reward, values for gae), the samples'
outcomes, and the run's algorithm state. Produces: the batch with `advantages` and `returns` (and `scores` for topr),
and metrics. Runs in the driver on the CPU, in float64.

Order: shaping per domain (clip, length, overlong, truncation, normalisation, weight) -> reward on each sample's last
policy token -> minus KL per token -> estimator -> whitening -> clip of advantages -> truncated samples leave the loss mask.
The last are in every statistic before it (DAPO, arXiv 2503.14476, section 3.4, masks their loss alone), and neither in a
loss (policy, KL, entropy, critic) nor in its denominators. TRL's mask_truncated_completions keeps counting them there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mrl.algorithms import kl
from mrl.algorithms.advantages import estimate
from mrl.algorithms.domains import shape_by_domain, truncated_away
from mrl.algorithms.estimators import on_last_token
from mrl.algorithms.groups import Groups
from mrl.algorithms.outcomes import Outcomes, policy_lengths
from mrl.algorithms.segments import Segments
from mrl.algorithms.state import State
from mrl.algorithms.whitening import whiten
from mrl.config.sections.algorithm import AlgorithmSection
from mrl.samples import Group, TrainBatch


def shape_and_estimate(
    config: AlgorithmSection,
    batch: TrainBatch,
    outcomes: Outcomes | Sequence[Group] | np.ndarray,
    *,
    state: State | None = None,
) -> tuple[TrainBatch, dict[str, float]]:
    """(the batch with float32 arrays advantages and returns, metrics).

    `outcomes`: the samples' facts, or the groups they are read from, or raw rewards [B] alone; in the batch's order.
    A sample without a verdict (NaN) enters no statistic, gets advantage 0 and loses its loss mask; one that
    shaping.mask_truncated names gets the same after the statistics. `state` is needed by moving coefficients and running
    statistics, and is updated; without it a fresh one is used for this call.
    """
    found = _outcomes(outcomes)
    if len(found.rewards) != batch.num_samples:
        raise ValueError(f"outcomes: {len(found.rewards)} samples, but the batch has {batch.num_samples}")
    if state is None:
        _refuse_forgetting(config)
        state = State.of(config)
    work = _Work.of(batch, found)
    shaped, metrics = shape_by_domain(
        config,
        rewards=torch.from_numpy(found.rewards),
        lengths=torch.from_numpy(policy_lengths(batch)),
        group_ids=work.group_ids,
        outcomes=found,
        state=state,
    )
    penalty, kl_metrics = _kl_penalty(config, batch, work, state)
    arguments = _arguments(config, batch, work, found, shaped, penalty)
    section = config.estimator
    advantages, returns = estimate(section.name, **arguments)
    metrics |= kl_metrics | _degenerate(work, shaped, section.tolerance)
    advantages, more = _finish(config, work, found, advantages)
    cut = torch.from_numpy(truncated_away(config, found))
    trained = work.mask & ~work.segments.spread(cut)
    more["reward/masked_truncated"] = float((cut & work.has_reward).sum())
    arrays = {
        "advantages": _float32(advantages.masked_fill(~trained, 0.0)),
        "returns": _float32(returns.masked_fill(~trained, 0.0)),
    }
    if config.loss.name == "topr":
        arrays["scores"] = _float32(work.segments.spread(torch.nan_to_num(torch.from_numpy(found.rewards))))
    masked = dataclasses.replace(batch, loss_mask=trained.numpy())
    return masked.with_arrays(**arrays), metrics | more


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """The batch's layout as tensors."""

    mask: Tensor
    """[N] bool, without the samples that have no verdict."""
    segments: Segments
    group_ids: Tensor
    has_reward: Tensor

    @classmethod
    def of(cls, batch: TrainBatch, outcomes: Outcomes) -> _Work:
        lengths = torch.from_numpy(batch.lengths().astype(np.int64))
        ids = torch.arange(batch.num_samples).repeat_interleave(lengths)
        segments = Segments(ids=ids, count=batch.num_samples, shape=ids.shape)
        has_reward = torch.from_numpy(outcomes.has_reward)
        return cls(
            mask=torch.from_numpy(batch.loss_mask.astype(np.bool_)) & segments.spread(has_reward),
            segments=segments,
            group_ids=torch.from_numpy(batch.group_ids.astype(np.int64)),
            has_reward=has_reward,
        )


def _outcomes(outcomes: Outcomes | Sequence[Group] | np.ndarray) -> Outcomes:
    if isinstance(outcomes, Outcomes):
        return outcomes
    return Outcomes.plain(outcomes) if isinstance(outcomes, np.ndarray) else Outcomes.of(outcomes)


def _refuse_forgetting(config: AlgorithmSection) -> None:
    sections = [config.shaping, *config.shaping_by_domain.values()]
    running = any("running" in (s.normalise.mean, s.normalise.std) for s in sections)
    if running or config.kl.controller.kind != "fixed":
        raise ValueError(
            "state: required, because normalisation over 'running' or a moving KL coefficient must remember earlier steps; "
            "make one with State.of(config.algorithm) at the start of the run"
        )


def _kl_penalty(
    config: AlgorithmSection, batch: TrainBatch, work: _Work, state: State
) -> tuple[Tensor | None, dict[str, float]]:
    """[N] what is subtracted from the token rewards, and the measurement that moves the coefficient."""
    section = config.kl
    if section.location != "reward":
        return None, {}
    for name in ("old_logprobs", "ref_logprobs"):
        if name not in batch.arrays:
            raise ValueError(
                f"batch.arrays: no {name}, which kl.location = reward needs; recompute it before this call"
            )
    old, reference = (torch.from_numpy(batch.arrays[n]).double() for n in ("old_logprobs", "ref_logprobs"))
    difference = (old - reference).masked_fill(~work.mask, 0.0)
    values, clamped = kl.estimate_counted(
        section.kind, difference, torch.zeros_like(difference), clamp=section.clamp
    )
    count = max(1, int(work.mask.sum()))
    mean, coefficient = float(values.sum()) / count, state.kl.coefficient
    state.kl.update(mean, num_samples=int(work.has_reward.sum()))
    return coefficient * values, {
        "reward/kl_reference": mean,
        "reward/kl_coefficient": coefficient,
        "reward/kl_clamped_frac": float(clamped.sum()) / count,
    }


def _arguments(
    config: AlgorithmSection,
    batch: TrainBatch,
    work: _Work,
    outcomes: Outcomes,
    shaped: Tensor,
    penalty: Tensor | None,
) -> dict[str, Any]:
    """Keyword arguments of `estimate`."""
    section = config.estimator
    on_last = on_last_token(shaped, work.mask, work.segments)
    arguments: dict[str, Any] = section.model_dump(
        include={
            "gamma",
            "lam",
            "discount",
            "scale",
            "ddof",
            "eps",
            "tolerance",
            "process_coefficient",
            "outcome_coefficient",
        }
    )
    arguments |= {"token_rewards": on_last, "loss_mask": work.mask, "group_ids": work.group_ids}
    arguments |= {"segment_ids": work.segments.ids, "has_reward": work.has_reward}
    if outcomes.token_rewards is not None:
        arguments |= _with_process_rewards(section.name, outcomes.token_rewards, on_last, shaped, work)
    elif section.name in ("grpo_process", "rloo_process"):
        arguments["reward_mask"] = on_last_token(torch.ones_like(shaped), work.mask, work.segments) > 0
    if penalty is not None:
        arguments["token_rewards"] = arguments["token_rewards"] - penalty
    if section.name == "gae":
        if "values" not in batch.arrays:
            raise ValueError(
                "batch.arrays: no values, which gae needs; run the critic's forward pass before this call"
            )
        arguments["values"] = torch.from_numpy(batch.arrays["values"]).double()
    if section.name == "gdpo" and section.part_weights:
        arguments |= _parts(section.part_weights, outcomes)
    return arguments


def _with_process_rewards(
    name: str, token_rewards: np.ndarray, on_last: Tensor, shaped: Tensor, work: _Work
) -> dict[str, Any]:
    """Outcome estimators ignore them; gae and reinforce_pp add the outcome; process estimators keep them apart."""
    given = torch.from_numpy(token_rewards).double()
    if given.shape != work.mask.shape:
        raise ValueError(f"token_rewards: shape {tuple(given.shape)}, expected [{len(work.mask)}]")
    present = ~torch.isnan(given) & work.mask
    process = given.masked_fill(~present, 0.0)
    if name in ("gae", "reinforce_pp"):
        return {"token_rewards": on_last + process}
    if name == "grpo_process":
        return {"token_rewards": process, "reward_mask": present}
    if name == "rloo_process":
        return {"token_rewards": process, "reward_mask": present, "outcome_rewards": shaped}
    return {}


def _parts(weights: dict[str, float], outcomes: Outcomes) -> dict[str, Tensor]:
    missing = sorted(set(weights) - set(outcomes.parts))
    if missing:
        known = ", ".join(sorted(outcomes.parts)) or "none"
        raise ValueError(
            f"estimator.part_weights names {', '.join(missing)}, but the verifiers gave the parts: {known}"
        )
    columns = np.stack([outcomes.parts[name] for name in weights], axis=1)
    return {
        "reward_parts": torch.from_numpy(columns),
        "part_weights": torch.tensor(list(weights.values())).double(),
    }


def _finish(
    config: AlgorithmSection, work: _Work, outcomes: Outcomes, advantages: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Whitening, then the clip of advantages, then what is reported about them."""
    section, clipped = config.estimator, 0.0
    if section.whitening != "off":
        for mask in _whitening_masks(section.whiten_per_domain, work, outcomes):
            white = whiten(
                advantages, mask, segment_ids=work.segments.ids, weigh_by=section.whitening, ddof=section.ddof
            )
            advantages = torch.where(mask, white, advantages)
    tokens = max(1, int(work.mask.sum()))
    if section.clip is not None:
        clipped = float((advantages.abs() > section.clip).sum()) / tokens
        advantages = advantages.clamp(-section.clip, section.clip)
    per_sample = work.segments.mean(advantages, work.mask)
    samples = max(1, int((work.segments.sum(work.mask.double()) > 0).sum()))
    return advantages, {
        "advantage/token_mean": float(advantages.sum()) / tokens,
        "advantage/sample_mean": float(per_sample.sum()) / samples,
        "advantage/abs_max": float(advantages.abs().max()) if len(advantages) else 0.0,
        "advantage/clipped_frac": clipped,
    }


def _whitening_masks(per_domain: bool, work: _Work, outcomes: Outcomes) -> list[Tensor]:
    if not per_domain:
        return [work.mask]
    names = np.array(outcomes.domains)
    chosen = [torch.from_numpy(names == name) for name in sorted(set(outcomes.domains))]
    return [work.mask & work.segments.spread(members) for members in chosen]


def _degenerate(work: _Work, shaped: Tensor, tolerance: float) -> dict[str, float]:
    active = work.segments.sum(work.mask.double()) > 0
    flat = Groups.of(work.group_ids, active).degenerate(shaped, tolerance) & active
    return {
        "group/degenerate_samples_frac": float(flat.sum()) / max(1, int(active.sum())),
        "reward/without_tokens": float((~active & work.has_reward).sum()),
        "reward/no_reward": float((~work.has_reward).sum()),
    }


def _float32(values: Tensor) -> np.ndarray:
    return values.to(torch.float32).numpy()
