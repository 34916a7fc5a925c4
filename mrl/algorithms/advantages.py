"""Advantages by name: checks, dispatch, and the shapes restored.

Owns the public call. Not the formulas (estimators) and not whitening (whitening), which is a block of its own.

Choices where frameworks differ, all parameters: standard deviations with ddof 1 and eps 1e-6 (OpenRLHF 1e-9, TRL
1e-4, its asynchronous form ddof 0 and 1e-8); a degenerate group is found by max - min and gives exactly 0; tokens the
policy did not produce are skipped, also by GAE and by the discount.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algorithms import checks
from mrl.algorithms.estimators import ESTIMATORS, Constants, Rollouts
from mrl.algorithms.groups import Groups
from mrl.algorithms.segments import Segments


def estimate(
    name: str,
    *,
    token_rewards: Tensor,
    loss_mask: Tensor,
    group_ids: Tensor,
    values: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    segment_ids: Tensor | None = None,
    has_reward: Tensor | None = None,
    reward_mask: Tensor | None = None,
    reward_parts: Tensor | None = None,
    part_weights: Tensor | None = None,
    outcome_rewards: Tensor | None = None,
    process_coefficient: float = 1.0,
    outcome_coefficient: float = 1.0,
    scale: str | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    tolerance: float = 1e-6,
    discount: str = "policy_tokens",
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) in the shape and dtype of `token_rewards`; 0 off the mask. Not whitened.

    token_rewards, loss_mask, values, reward_mask: [B, T], or packed [N] with `segment_ids` [N]. An outcome reward
    stands on a sample's last policy token. group_ids: [B] integers, equal for the samples of one prompt, in any
    order; groups may have any sizes. has_reward: [B] bool; a sample without a verdict enters no statistic and gets 0,
    whatever its rewards are. reward_mask: positions that carry a process reward (default: all policy tokens).
    reward_parts [B, K] and part_weights [K]: gdpo. outcome_rewards [B]: rloo_process.

    Returns: gae: advantages + values. reinforce_pp and the process estimators: the advantages themselves (sums before
    whitening). Outcome estimators: undiscounted rewards-to-go. Computed in float64.

    Raises ValueError or TypeError naming the argument (and sample) for wrong shapes, dtypes, NaN, infinities, names.
    """
    checks.known(name, ESTIMATORS, "estimator")
    mask = checks.mask("loss_mask", loss_mask)
    segments = Segments.of(mask, segment_ids=segment_ids, num_segments=len(group_ids))
    if segments.count != len(group_ids) or group_ids.dim() != 1:
        raise ValueError(
            f"group_ids: shape {tuple(group_ids.shape)}, expected [{segments.count}], one per sample"
        )
    mask = _rewarded_tokens(mask, has_reward, segments)
    arrays = checks.per_token({"token_rewards": token_rewards, "values": values}, mask, segments)
    flat = segments.flat(mask)
    active = segments.sum(flat.to(torch.float64)) > 0
    rollouts = Rollouts(
        rewards=arrays["token_rewards"].double(),
        mask=flat,
        segments=segments,
        groups=Groups.of(group_ids, active),
        values=None if values is None else arrays["values"].double(),
        reward_mask=flat
        if reward_mask is None
        else flat & segments.flat(checks.mask("reward_mask", reward_mask)),
        reward_parts=_parts(reward_parts, active),
        part_weights=None if part_weights is None else part_weights.double(),
        outcomes=_outcomes(outcome_rewards, active),
    )
    constants = Constants(
        gamma=gamma,
        lam=lam,
        ddof=ddof,
        eps=eps,
        tolerance=tolerance,
        scale=scale,
        discount=discount,
        process_coefficient=process_coefficient,
        outcome_coefficient=outcome_coefficient,
    )
    advantages, returns = ESTIMATORS[name](rollouts, constants)
    return tuple(  # type: ignore[return-value]
        segments.shaped(x.masked_fill(~flat, 0.0).to(token_rewards.dtype)) for x in (advantages, returns)
    )


def _rewarded_tokens(mask: Tensor, has_reward: Tensor | None, segments: Segments) -> Tensor:
    if has_reward is None:
        return mask
    chosen = checks.mask(
        "has_reward", checks.per_sample("has_reward", has_reward, segments.count, floating=False)
    )
    return mask & segments.shaped(segments.spread(chosen))


def _parts(reward_parts: Tensor | None, active: Tensor) -> Tensor | None:
    if reward_parts is None:
        return None
    if reward_parts.dim() != 2 or len(reward_parts) != len(active):
        raise ValueError(f"reward_parts: shape {tuple(reward_parts.shape)}, expected [{len(active)}, K]")
    parts = reward_parts.double().masked_fill(~active[:, None], 0.0)
    for column in parts.unbind(1):
        checks.per_sample("reward_parts", column, len(active))
    return parts


def _outcomes(outcome_rewards: Tensor | None, active: Tensor) -> Tensor | None:
    if outcome_rewards is None:
        return None
    if outcome_rewards.shape != active.shape:
        raise ValueError(f"outcome_rewards: shape {tuple(outcome_rewards.shape)}, expected [{len(active)}]")
    return checks.per_sample(
        "outcome_rewards", outcome_rewards.double().masked_fill(~active, 0.0), len(active)
    )
