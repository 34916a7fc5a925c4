"""The advantage estimators as functions of checked flat tokens.

Owns the formulas and their registry; advantages.estimate checks, dispatches and restores shapes. All in float64.

An outcome estimator turns the sum of a sample's token rewards into one number that all its policy tokens get. A
process estimator keeps each token's reward. In both, a degenerate group (see groups) gives exactly 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from mrl.algorithms import checks, scans
from mrl.algorithms.groups import Groups
from mrl.algorithms.segments import Segments


@dataclasses.dataclass(frozen=True, slots=True)
class Rollouts:
    """What an estimator sees; token tensors are [N] float64 with 0 off the mask."""

    rewards: Tensor
    mask: Tensor
    """[N] bool; False on all tokens of samples that were not scored."""
    segments: Segments
    groups: Groups
    values: Tensor | None
    reward_mask: Tensor
    """[N] bool: positions that carry a process reward."""
    reward_parts: Tensor | None
    """[B, K] outcome rewards that are normalised on their own."""
    part_weights: Tensor | None
    """[K]."""
    outcomes: Tensor | None
    """[B] outcome rewards kept apart from the token rewards."""

    def scores(self) -> Tensor:
        """[B] sum of each sample's token rewards."""
        return self.segments.sum(self.rewards)


@dataclasses.dataclass(frozen=True, slots=True)
class Constants:
    """The numbers of config.algorithm.estimator."""

    gamma: float
    lam: float
    ddof: int
    eps: float
    tolerance: float
    scale: str | None
    discount: str
    process_coefficient: float
    outcome_coefficient: float


Estimator = Callable[[Rollouts, Constants], tuple[Tensor, Tensor]]
"""(rollouts, constants) -> (advantages [N], returns [N]); advantages.estimate clears both off the mask."""


def gae(rollouts: Rollouts, constants: Constants) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation; returns are advantages + values, the critic's targets."""
    r, values = rollouts, rollouts.values
    if values is None:
        raise ValueError("values: required by the estimator 'gae' and not given")
    advantages = scans.gae(r.rewards, values, r.mask, r.segments, gamma=constants.gamma, lam=constants.lam)
    return advantages, advantages + values


def reinforce_pp(rollouts: Rollouts, constants: Constants) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (arXiv 2501.03262) before its whitening: discounted rewards-to-go of each token.

    The sum runs through the environment's tokens; with discount="all_tokens" they discount too.
    """
    counted = rollouts.mask if constants.discount == "policy_tokens" else torch.ones_like(rollouts.mask)
    returns = scans.rewards_to_go(rollouts.rewards, counted, rollouts.segments, gamma=constants.gamma)
    return returns, returns


def reinforce_pp_baseline(rollouts: Rollouts, constants: Constants) -> tuple[Tensor, Tensor]:
    """REINFORCE++-baseline before its whitening: score minus group mean."""
    scaled = _scaled(rollouts, constants, default="none")
    return _spread(rollouts, scaled)


def rloo(rollouts: Rollouts, constants: Constants) -> tuple[Tensor, Tensor]:
    """Score minus the mean of the other samples (arXiv 2402.14740); a lone sample gets 0.

    scale="leave_one_out" divides by the others' standard deviation + eps, and not at all where that is 0.
    """
    groups, scores = rollouts.groups, rollouts.scores()
    centred = (scores - groups.mean_of_others(scores)).masked_fill(~groups.active, 0.0)
    if constants.scale == "leave_one_out":
        deviation = groups.std_of_others(scores, constants.ddof)
        negligible = deviation <= constants.tolerance * scores.abs().max()
        centred = torch.where(negligible, centred, centred / (deviation + constants.eps))
    elif constants.scale not in (None, "none"):
        centred = centred / _deviation(rollouts, scores, constants, constants.scale)
    return _spread(rollouts, _without_signal_zero(rollouts, scores, centred, constants))


def grpo(rollouts: Rollouts, constants: Constants) -> tuple[Tensor, Tensor]:
    """(score - group mean) / (group std + eps) (arXiv 2402.03300, outcome supervision)."""
    return _spread(rollouts, _scaled(rollouts, constants, default="group"))


def dr_grpo(rollouts: Rollouts, constants: Constants) -> tuple[Tensor, Tensor]:
    """Score minus group mean, not divided (arXiv 2503.20783); belongs with aggregation 'constant'."""
    return _spread(rollouts, _scaled(rollouts, constants, default="none"))


def gdpo(rollouts: Rollouts, constants: Constants) -> tuple[Tensor, Tensor]:
    """Each reward part normalised in its group, weighted sum, normalised over the batch (GDPO, arXiv 2601.05242).

    Without `reward_parts` the score is the only part. Groups in which every part is degenerate stay 0.
    """
    groups = rollouts.groups
    parts = rollouts.scores()[:, None] if rollouts.reward_parts is None else rollouts.reward_parts
    weights = parts.new_ones(parts.shape[1]) if rollouts.part_weights is None else rollouts.part_weights
    total, signal = torch.zeros_like(parts[:, 0]), torch.zeros_like(groups.active)
    for k in range(parts.shape[1]):
        part = parts[:, k].masked_fill(~groups.active, 0.0)
        normal = groups.centred(part) / (groups.std(part, constants.ddof) + constants.eps)
        flat = groups.degenerate(part, constants.tolerance)
        total = total + weights[k] * normal.masked_fill(flat, 0.0)
        signal = signal | ~flat
    chosen = total[groups.active]
    if len(chosen) > constants.ddof:
        deviation = chosen.std(correction=constants.ddof)
        total = (total - chosen.mean()) / (deviation + constants.eps)
    return _spread(rollouts, total.masked_fill(~(signal & groups.active), 0.0))


def grpo_process(rollouts: Rollouts, constants: Constants) -> tuple[Tensor, Tensor]:
    """Process supervision of DeepSeekMath (arXiv 2402.03300, 4.1.3): rewards normalised over all those of the group,
    then summed from the right. The pool is the positions of `reward_mask` (all policy tokens unless given).
    """
    pool = Groups.of(rollouts.groups.index[rollouts.segments.ids], rollouts.reward_mask)
    normal = pool.centred(rollouts.rewards) / (pool.std(rollouts.rewards, constants.ddof) + constants.eps)
    normal = normal.masked_fill(pool.degenerate(rollouts.rewards, constants.tolerance), 0.0)
    sums = scans.rewards_to_go(normal, rollouts.mask, rollouts.segments, gamma=constants.gamma)
    return sums, sums


def rloo_process(rollouts: Rollouts, constants: Constants) -> tuple[Tensor, Tensor]:
    """Token rewards of PRIME (arXiv 2502.01456, eq. 5) before its whitening.

    n / (n - 1) r_t - sum_j mean_j / (n - 1), mean_j over sample j's reward positions; plus, where `outcomes` are
    given, their leave-one-out value on the last policy token; weighted, summed from the right.
    """
    r, groups = rollouts, rollouts.groups
    means = r.segments.mean(r.rewards, r.reward_mask)
    size = groups.size()[groups.index]
    others = (size - 1).clamp(min=1)
    baseline = groups.total(means)[groups.index] / others
    shaped = r.rewards * r.segments.spread(size / others) - r.segments.spread(baseline)
    pool = Groups.of(groups.index[r.segments.ids], r.reward_mask)
    flat = pool.degenerate(r.rewards, constants.tolerance) | r.segments.spread(size < 2)
    shaped = constants.process_coefficient * shaped.masked_fill(flat | ~r.reward_mask, 0.0)
    if r.outcomes is not None:
        scores = r.outcomes.masked_fill(~groups.active, 0.0)
        centred = scores - groups.mean_of_others(scores)
        outcome = _without_signal_zero(r, scores, centred, constants)
        shaped = shaped + constants.outcome_coefficient * on_last_token(outcome, r.mask, r.segments)
    sums = scans.rewards_to_go(shaped, r.mask, r.segments, gamma=constants.gamma)
    return sums, sums


def on_last_token(values: Tensor, mask: Tensor, segments: Segments) -> Tensor:
    """[B] to [N]: each sequence's value on its last masked-in token; lost for a sequence without one."""
    positions = mask.nonzero()[:, 0]
    last = positions.new_full((segments.count,), -1).scatter_reduce(
        0, segments.ids[positions], positions, "amax"
    )
    flat = values.new_zeros(len(mask))
    flat[last[last >= 0]] = values[last >= 0]
    return flat


def _scaled(rollouts: Rollouts, constants: Constants, *, default: str) -> Tensor:
    scores, scale = rollouts.scores(), constants.scale or default
    centred = rollouts.groups.centred(scores)
    if scale != "none":
        centred = centred / _deviation(rollouts, scores, constants, scale)
    return _without_signal_zero(rollouts, scores, centred, constants)


def _deviation(rollouts: Rollouts, scores: Tensor, constants: Constants, scale: str) -> Tensor:
    """[B] or scalar standard deviation + eps; "batch" is over raw scores, differences between groups included."""
    checks.known(scale, ("group", "batch", "none"), "scale")
    if scale == "group":
        return rollouts.groups.std(scores, constants.ddof) + constants.eps
    chosen = scores[rollouts.groups.active]
    spread = chosen.std(correction=constants.ddof) if len(chosen) > constants.ddof else scores.new_zeros(())
    return spread + constants.eps


def _without_signal_zero(rollouts: Rollouts, scores: Tensor, values: Tensor, constants: Constants) -> Tensor:
    """Exactly 0 where the group is degenerate or the sample does not take part."""
    groups = rollouts.groups
    return values.masked_fill(groups.degenerate(scores, constants.tolerance) | ~groups.active, 0.0)


def _spread(rollouts: Rollouts, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """(advantage of its sample on every token, undiscounted rewards-to-go)."""
    returns = scans.rewards_to_go(rollouts.rewards, rollouts.mask, rollouts.segments, gamma=1.0)
    return rollouts.segments.spread(advantages), returns


ESTIMATORS: dict[str, Estimator] = {
    "gae": gae,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "rloo": rloo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "gdpo": gdpo,
    "grpo_process": grpo_process,
    "rloo_process": rloo_process,
}
"""Name to estimator."""
