"""Reward shaping of a batch, domain by domain, as the configuration names it.

Owns which of shaping's functions run, in which order and on which samples. Statistics "batch" and "running" are those
of the domain, so that one domain's scale never enters another's.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mrl.algorithms import checks, shaping
from mrl.algorithms.outcomes import Outcomes
from mrl.algorithms.running import RunningMoments
from mrl.algorithms.state import State
from mrl.config.sections.algorithm import AlgorithmSection
from mrl.config.sections.shaping import ShapingSection


def shape_by_domain(
    config: AlgorithmSection,
    *,
    rewards: Tensor,
    lengths: Tensor,
    group_ids: Tensor,
    outcomes: Outcomes,
    state: State,
) -> tuple[Tensor, dict[str, float]]:
    """([B] shaped rewards, 0 for samples without a verdict; metrics over the scored samples).

    rewards [B] float64 with NaN where there is no verdict; lengths [B] in policy tokens; group_ids [B].
    """
    shaped = torch.zeros_like(rewards)
    has_reward = torch.from_numpy(outcomes.has_reward)
    names = np.array(outcomes.domains)
    clipped = torch.zeros_like(has_reward)
    for domain in sorted(set(outcomes.domains)):
        chosen = has_reward & torch.from_numpy(names == domain)
        if not bool(chosen.any()):
            continue
        section = config.shaping_by_domain.get(domain, config.shaping)
        values, changed = shape(
            section,
            rewards[chosen],
            lengths=lengths[chosen],
            group_ids=group_ids[chosen],
            finished=torch.from_numpy(outcomes.finished)[chosen],
            truncated=torch.from_numpy(outcomes.truncated)[chosen],
            moments=state.moments.get(domain, RunningMoments()),
        )
        shaped[chosen], clipped[chosen] = values[0], changed
        state.moments[domain] = values[1]
    count = max(1, int(has_reward.sum()))
    return shaped, {
        "reward/raw_mean": float(torch.nan_to_num(rewards).sum()) / count,
        "reward/shaped_mean": float(shaped.sum()) / count,
        "reward/clipped_frac": float(clipped.sum()) / count,
    }


def truncated_away(config: AlgorithmSection, outcomes: Outcomes) -> np.ndarray:
    """[B] bool: truncated samples of domains that mask them."""
    masks = [config.shaping_by_domain.get(d, config.shaping).mask_truncated for d in outcomes.domains]
    return outcomes.truncated & np.array(masks, dtype=np.bool_)


def shape(
    section: ShapingSection,
    rewards: Tensor,
    *,
    lengths: Tensor,
    group_ids: Tensor,
    finished: Tensor,
    truncated: Tensor,
    moments: RunningMoments,
) -> tuple[tuple[Tensor, RunningMoments], Tensor]:
    """((shaped [K], moments after these samples), [K] bool whose raw reward was clipped) of one domain."""
    checks.per_sample("rewards", rewards, len(rewards))
    shaped, clipped = shaping.clip(rewards, low=section.clip_low, high=section.clip_high)
    if section.length_reference is not None:
        shaped = shaping.per_length(shaped, lengths, reference=section.length_reference)
    if section.overlong is not None:
        shaped = shaped + shaping.overlong_penalty(lengths, **section.overlong.model_dump())
    if section.stop_properly is not None:
        shaped = shaping.stop_properly(shaped, truncated, coefficient=section.stop_properly)
    if section.missing_eos_penalty:
        shaped = shaping.missing_eos_penalty(shaped, finished, penalty=section.missing_eos_penalty)
    moments = moments.merged(shaped)
    shaped = shaping.normalise(shaped, group_ids=group_ids, running=moments, **section.normalise.model_dump())
    return (shaped * section.weight, moments), clipped
