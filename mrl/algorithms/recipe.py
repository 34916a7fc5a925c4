"""From rewards to advantages as configured: the one call of the loop between scoring and update.

Consumes: a packed batch (with old_logprobs and ref_logprobs for KL in the reward, values for gae) and the
samples' outcomes. Produces: the batch with `advantages` and `returns` (and `scores` for a user-defined loss),
and metrics. Runs in the driver on the CPU, in float64.

Order: shaping per domain (clip, overlong, truncation) -> reward on each sample's last policy token -> minus
KL per token -> estimator -> whitening -> truncated samples leave the loss mask. They enter every statistic
before that (DAPO, arXiv 2503.14476, section 3.4, masks only their loss), but no loss (policy, KL, entropy,
critic) and no denominator. TRL's mask_truncated_completions counts them in denominators.

Values equal for all tokens of a sample are computed once per sample (reward_rows.py) and spread at the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from mrl.algorithms import kl
from mrl.algorithms.advantages import OUTCOME_ESTIMATORS, TOLERANCE, Rollouts, estimate_advantages, whiten
from mrl.algorithms.groups import Groups
from mrl.algorithms.outcomes import Outcomes, masked_truncated, policy_lengths, shape_by_domain
from mrl.algorithms.reward_rows import AdvantageRows
from mrl.config.sections.algorithm import AlgorithmSection
from mrl.samples import Group, TrainBatch


def shape_and_estimate(
    config: AlgorithmSection, batch: TrainBatch, outcomes: Outcomes | Sequence[Group] | np.ndarray
) -> tuple[TrainBatch, dict[str, float]]:
    """Return (the batch with float32 arrays advantages and, if a critic learns them, returns; metrics).

    `outcomes`: Outcomes, the groups to read them from, or raw rewards [B], in the batch's order. A sample
    without a reward (NaN) enters no statistic, gets advantage 0 and leaves the loss mask.
    shaping.mask_truncated takes truncated samples out of the loss mask in the same way, after the statistics.
    A sample of several sequences is estimated as one, of all their tokens in order.
    """
    sequences, batch = batch, _one_segment_per_sample(batch)
    outcomes = _outcomes(outcomes)
    if len(outcomes.rewards) != batch.num_samples:
        raise ValueError(f"outcomes: {len(outcomes.rewards)} samples, but the batch has {batch.num_samples}")
    work = _Work.of(config, batch, outcomes)
    shaped, metrics = shape_by_domain(config, outcomes, lengths=torch.from_numpy(policy_lengths(batch)))
    penalty, kl_metrics = _kl_penalty(config, batch, work)
    rollouts = _rollouts(config, batch, work, outcomes, shaped, penalty)
    advantages, returns = estimate_advantages(config.estimator, rollouts)
    metrics |= kl_metrics | _degenerate(work, rollouts.groups, shaped)
    advantages, advantage_metrics = _finish(config, work, advantages)
    masked = torch.from_numpy(masked_truncated(config, outcomes))
    metrics |= advantage_metrics | {"reward/masked_truncated": float((masked & work.has_reward).sum())}
    remaining = work.rows.mask & ~work.rows.segments.to_tokens(masked)
    trained = batch.loss_mask if remaining.all() else batch.loss_mask & work.rows.to_tokens(remaining)
    arrays = {"advantages": advantages} | ({"returns": returns} if config.needs_values else {})
    if config.loss.name == "custom":
        rewards = torch.nan_to_num(torch.from_numpy(outcomes.rewards))
        arrays["scores"] = work.rows.segments.to_tokens(rewards)
    spread = {name: _on_trained(work.rows, values, trained) for name, values in arrays.items()}
    if config.distillation is not None and config.distillation.teachers_only:
        spread["advantages"] = np.zeros_like(spread["advantages"])
    facts = dict(sequences.samples)
    if sequences is not batch:
        counts = policy_lengths(dataclasses.replace(batch, loss_mask=trained))
        facts["sample_tokens"] = np.repeat(
            counts, np.diff(_first_segments(sequences), append=sequences.num_samples)
        )
    return dataclasses.replace(sequences, loss_mask=trained, samples=facts).with_arrays(**spread), metrics


def _first_segments(batch: TrainBatch) -> np.ndarray:
    """Return [S] the first segment of each sample of a batch with branches."""
    return np.flatnonzero(np.diff(batch.samples["sample"], prepend=-1))


def _one_segment_per_sample(batch: TrainBatch) -> TrainBatch:
    """Join the segments of each sample; the batch itself if no sample has several."""
    if "sample" not in batch.samples:
        return batch
    first = _first_segments(batch)
    return dataclasses.replace(
        batch,
        cu_seqlens=np.append(batch.cu_seqlens[first], batch.cu_seqlens[-1]),
        group_ids=batch.group_ids[first],
        sample_ids=tuple(batch.sample_ids[segment] for segment in first),
        routes=None,
        samples={},
        microbatches=None,
    )


def _on_trained(rows: AdvantageRows, values: Tensor, trained: np.ndarray) -> np.ndarray:
    """Spread [K] values to the batch's tokens as [N] float32, 0 on untrained tokens."""
    spread = rows.to_tokens(values.to(torch.float32, copy=True))
    np.copyto(spread, 0, where=~trained)
    return spread


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """The batch's layout as tensors."""

    rows: AdvantageRows
    group_ids: Tensor
    """[B] int64."""
    has_reward: Tensor
    """[B] bool."""

    @classmethod
    def of(cls, config: AlgorithmSection, batch: TrainBatch, outcomes: Outcomes) -> _Work:
        """Use one row per sample if rewards and advantages are per sample, else one row per token."""
        whole = config.estimator.name in OUTCOME_ESTIMATORS and config.kl.location != "reward"
        return cls(
            rows=(AdvantageRows.of_samples if whole else AdvantageRows.of_tokens)(batch, outcomes.has_reward),
            group_ids=torch.from_numpy(batch.group_ids.astype(np.int64)),
            has_reward=torch.from_numpy(outcomes.has_reward),
        )


def _outcomes(outcomes: Outcomes | Sequence[Group] | np.ndarray) -> Outcomes:
    if isinstance(outcomes, Outcomes):
        return outcomes
    return Outcomes.plain(outcomes) if isinstance(outcomes, np.ndarray) else Outcomes.of(outcomes)


def _kl_penalty(
    config: AlgorithmSection, batch: TrainBatch, work: _Work
) -> tuple[Tensor | None, dict[str, float]]:
    """Return what to subtract from the token rewards, [N], and the distance to the reference as metrics."""
    section = config.kl
    if section.location != "reward":
        return None, {}
    for name in ("old_logprobs", "ref_logprobs"):
        if name not in batch.arrays:
            raise ValueError(
                f"batch.arrays: no {name}, but kl.location = reward needs it; recompute it before this call"
            )
    old, reference = (torch.from_numpy(batch.arrays[n]).double() for n in ("old_logprobs", "ref_logprobs"))
    difference = (old - reference).masked_fill(~work.rows.mask, 0.0)
    values, clamped = kl.estimate_kl(section.kind, difference)
    count = max(1, int(work.rows.mask.sum()))
    return section.coefficient * values, {
        "reward/kl_reference": float(values.sum()) / count,
        "reward/kl_clamped_frac": float(clamped.sum()) / count,
    }


def _rollouts(
    config: AlgorithmSection,
    batch: TrainBatch,
    work: _Work,
    outcomes: Outcomes,
    shaped: Tensor,
    penalty: Tensor | None,
) -> Rollouts:
    """Build the estimator's input, with the shaped reward on each sample's last row with policy tokens."""
    section, rows = config.estimator, work.rows
    on_last = rows.segments.on_last_token(shaped, rows.mask)
    inputs = {"token_rewards": on_last} | _process_rewards(section.name, outcomes, on_last, shaped, rows)
    if penalty is not None:
        inputs["token_rewards"] = inputs["token_rewards"] - penalty
    if section.name == "gae":
        if "values" not in batch.arrays:
            raise ValueError(
                "batch.arrays: no values, but gae needs them; run the critic's forward pass before this call"
            )
        inputs["values"] = torch.from_numpy(batch.arrays["values"]).double()
    if section.name == "gdpo" and section.part_weights:
        inputs["reward_parts"] = _parts(section.part_weights, outcomes)
    return Rollouts.of(mask=rows.mask, segments=rows.segments, group_ids=work.group_ids, **inputs)


def _process_rewards(
    name: str, outcomes: Outcomes, on_last: Tensor, shaped: Tensor, rows: AdvantageRows
) -> dict[str, Tensor]:
    """Return the estimator's inputs of process rewards; outcome estimators ignore them.

    gae and reinforce_pp add the outcome, unless it is their sum. Process estimators keep both separate;
    without process rewards they use the outcome alone.
    """
    if name in OUTCOME_ESTIMATORS:
        return {}
    keeps_apart = name in ("grpo_process", "rloo_process")
    if outcomes.token_rewards is None:
        ones = torch.ones_like(shaped)
        return {"reward_mask": rows.segments.on_last_token(ones, rows.mask) > 0} if keeps_apart else {}
    values = torch.from_numpy(outcomes.token_rewards).double()
    if values.shape != rows.mask.shape:
        raise ValueError(f"token_rewards: shape {tuple(values.shape)}, expected [{len(rows.mask)}]")
    present = ~torch.isnan(values) & rows.mask
    process = values.masked_fill(~present, 0.0)
    if name in ("gae", "reinforce_pp"):
        if outcomes.are_returns is not None:  # subtract the raw sums; what shaping added stays
            sums = torch.nan_to_num(torch.from_numpy(outcomes.rewards * outcomes.are_returns))
            on_last = on_last - rows.segments.on_last_token(sums, rows.mask)
        return {"token_rewards": on_last + process}
    separate = {"outcomes": shaped} if name == "rloo_process" else {}
    return {"token_rewards": process, "reward_mask": present} | separate if keeps_apart else {}


def _parts(weights: Mapping[str, float], outcomes: Outcomes) -> Tensor:
    """Return [B, K] the parts that have weights."""
    missing = sorted(set(weights) - set(outcomes.parts))
    if missing:
        offered = ", ".join(sorted(outcomes.parts)) or "none"
        raise ValueError(
            f"estimator.part_weights names {', '.join(missing)}, but the verifiers return parts: {offered}"
        )
    return torch.from_numpy(np.stack([outcomes.parts[name] for name in weights], axis=1))


def _finish(config: AlgorithmSection, work: _Work, advantages: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Whiten the advantages and compute their metrics."""
    rows = work.rows
    if config.estimator.whitens:
        white = whiten(advantages, rows.mask, weights=rows.weights)
        advantages = torch.where(rows.mask, white, advantages)
    weights = rows.weights.masked_fill(~rows.mask, 0.0)
    tokens = max(1.0, float(weights.sum()))
    per_sample = rows.segments.mean(advantages, rows.mask)
    samples = max(1, int((rows.segments.sum(weights) > 0).sum()))
    return advantages, {
        "advantage/token_mean": float((advantages * weights).sum()) / tokens,
        "advantage/sample_mean": float(per_sample.sum()) / samples,
        "advantage/abs_max": float(advantages.abs().max()) if len(advantages) else 0.0,
    }


def _degenerate(work: _Work, groups: Groups, shaped: Tensor) -> dict[str, float]:
    active = groups.active
    flat = groups.degenerate(shaped, TOLERANCE) & active
    return {
        "group/degenerate_samples_frac": float(flat.sum()) / max(1, int(active.sum())),
        "reward/without_tokens": float((~active & work.has_reward).sum()),
        "reward/no_reward": float((~work.has_reward).sum()),
    }
