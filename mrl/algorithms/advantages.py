"""From token rewards to advantages: every estimator, and the whitening that some papers put behind theirs.

Owns the formulas and their registry, all in float64 on checked packed tokens. An outcome estimator turns the sum of a
sample's token rewards into one number that all its policy tokens get; a process estimator keeps each token's reward.
In both, a degenerate group (see groups) gives exactly 0. Estimators do not whiten by themselves.

Choices where frameworks differ: standard deviations have DDOF 1 and EPS 1e-6 (OpenRLHF 1e-9, TRL 1e-4, its asynchronous
form ddof 0 and 1e-8); a degenerate group is found by max - min and gives exactly 0; tokens the policy did not produce are
skipped, also by GAE and by the discount. Whitening: variance with ddof 1 and eps added to it (ROLL, TRL, verl).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from mrl.algorithms.groups import Groups
from mrl.algorithms.tokens import Segments, check_samples, checked
from mrl.config.sections.algorithm import EstimatorSection

DDOF = 1
"""Delta degrees of freedom of every standard deviation."""
EPS = 1e-6
"""Added to a standard deviation before dividing by it."""
TOLERANCE = 1e-6
"""A group whose rewards differ by no more than this share of the largest is degenerate: advantage exactly 0."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rollouts:
    """What an estimator sees; tensors of tokens are [N] float64 with 0 off the mask.

    For OUTCOME_ESTIMATORS a sample may stand as one token, which carries its outcome (reward_rows.py): what they give is the same.
    """

    rewards: Tensor
    mask: Tensor
    """[N] bool; False on all tokens of samples without a reward."""
    segments: Segments
    groups: Groups
    reward_mask: Tensor
    """[N] bool: positions that carry a process reward."""
    values: Tensor | None = None
    reward_parts: Tensor | None = None
    """[B, K] outcome rewards that are normalised on their own."""
    outcomes: Tensor | None = None
    """[B] outcome rewards kept apart from the token rewards."""

    @classmethod
    def of(
        cls,
        *,
        token_rewards: Tensor,
        mask: Tensor,
        segments: Segments,
        group_ids: Tensor,
        values: Tensor | None = None,
        reward_mask: Tensor | None = None,
        reward_parts: Tensor | None = None,
        outcomes: Tensor | None = None,
    ) -> Rollouts:
        """From checked inputs: ValueError or TypeError naming the argument (and sample) for shapes, dtypes, NaN, infinity.

        token_rewards, values [N]: an outcome reward stands on a sample's last policy token. group_ids: [B] integers, equal
        for the samples of one prompt, in any order; groups may have any sizes. A sample without a masked-in token enters
        no statistic, whatever its rewards are. reward_mask: [N] bool (default: all policy tokens). outcomes: [B].
        """
        if group_ids.shape != (segments.count,):
            raise ValueError(
                f"group_ids: shape {tuple(group_ids.shape)}, expected [{segments.count}], one per sample"
            )
        arrays = {"token_rewards": token_rewards} | ({} if values is None else {"values": values})
        tokens = {name: each.double() for name, each in checked(arrays, mask, segments).items()}
        active = segments.sum(mask.double()) > 0
        return cls(
            rewards=tokens["token_rewards"],
            mask=mask,
            segments=segments,
            groups=Groups.of(group_ids, active),
            reward_mask=mask if reward_mask is None else mask & reward_mask,
            values=tokens.get("values"),
            reward_parts=None if reward_parts is None else _parts(reward_parts, active),
            outcomes=None if outcomes is None else _outcomes(outcomes, active),
        )

    def scores(self) -> Tensor:
        """[B] sum of each sample's token rewards."""
        return self.segments.sum(self.rewards)


def _parts(reward_parts: Tensor, active: Tensor) -> Tensor:
    if reward_parts.dim() != 2 or len(reward_parts) != len(active):
        raise ValueError(f"reward_parts: shape {tuple(reward_parts.shape)}, expected [{len(active)}, K]")
    parts = reward_parts.double().masked_fill(~active[:, None], 0.0)
    for column in parts.unbind(1):
        check_samples("reward_parts", column, len(active))
    return parts


def _outcomes(outcomes: Tensor, active: Tensor) -> Tensor:
    scores = outcomes.double().masked_fill(~active, 0.0)
    check_samples("outcomes", scores, len(active))
    return scores


def estimate_advantages(section: EstimatorSection, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """(advantages, returns), both [N] float64 with 0 off the mask; not whitened.

    Returns: gae: advantages + values. reinforce_pp and the process estimators: the advantages themselves (sums before
    whitening). Outcome estimators: undiscounted rewards-to-go.
    """
    advantages, returns = ESTIMATORS[section.name](rollouts, section)
    return advantages.masked_fill(~rollouts.mask, 0.0), returns.masked_fill(~rollouts.mask, 0.0)


def gae(rollouts: Rollouts, section: EstimatorSection) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16); returns are advantages + values, the critic's targets.

    The value after a sequence's last policy token is 0.
    """
    if rollouts.values is None:
        raise ValueError("values: required by the estimator 'gae' and not given")
    compact = _Compact.of(rollouts.mask, rollouts.segments)
    rewards, values = compact.gather(rollouts.rewards), compact.gather(rollouts.values)
    advantages = torch.zeros_like(rewards)
    running, after = rewards.new_zeros(len(rewards)), rewards.new_zeros(len(rewards))
    gamma, lam = section.gamma, section.lam
    for t in range(rewards.shape[1] - 1, -1, -1):
        running = rewards[:, t] + gamma * after - values[:, t] + gamma * lam * running
        after = values[:, t]
        advantages[:, t] = running
    flat = compact.scatter(advantages)
    return flat, flat + rollouts.values


def reinforce_pp(rollouts: Rollouts, section: EstimatorSection) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (arXiv 2501.03262) before its whitening: discounted rewards-to-go of each token.

    The sum runs through the environment's tokens, which do not discount.
    """
    returns = rewards_to_go(rollouts.rewards, rollouts.mask, rollouts.segments, gamma=section.gamma)
    return returns, returns


def reinforce_pp_baseline(rollouts: Rollouts, section: EstimatorSection) -> tuple[Tensor, Tensor]:
    """REINFORCE++-baseline before its whitening: score minus group mean."""
    return _spread(rollouts, _scaled(rollouts, section, default="none"))


def rloo(rollouts: Rollouts, section: EstimatorSection) -> tuple[Tensor, Tensor]:
    """Score minus the mean of the other samples (arXiv 2402.14740); a lone sample gets 0."""
    groups, scores = rollouts.groups, rollouts.scores()
    centred = (scores - groups.mean_of_others(scores)).masked_fill(~groups.active, 0.0)
    if section.scale not in (None, "none"):
        centred = centred / _deviation(rollouts, scores, section.scale)
    return _spread(rollouts, _zero_degenerate_groups(rollouts, scores, centred))


def grpo(rollouts: Rollouts, section: EstimatorSection) -> tuple[Tensor, Tensor]:
    """(score - group mean) / (group std + eps) (arXiv 2402.03300, outcome supervision)."""
    return _spread(rollouts, _scaled(rollouts, section, default="group"))


def dr_grpo(rollouts: Rollouts, section: EstimatorSection) -> tuple[Tensor, Tensor]:
    """Score minus group mean, not divided (arXiv 2503.20783); belongs with aggregation 'constant'."""
    return _spread(rollouts, _scaled(rollouts, section, default="none"))


def gdpo(rollouts: Rollouts, section: EstimatorSection) -> tuple[Tensor, Tensor]:
    """Each reward part normalised in its group, weighted sum, normalised over the batch (GDPO, arXiv 2601.05242).

    Without reward parts the score is the only part. Groups in which every part is degenerate stay 0.
    """
    groups = rollouts.groups
    parts = rollouts.scores()[:, None] if rollouts.reward_parts is None else rollouts.reward_parts
    weights = parts.new_tensor(list(section.part_weights.values()) or [1.0] * parts.shape[1])
    total, signal = torch.zeros_like(parts[:, 0]), torch.zeros_like(groups.active)
    for k in range(parts.shape[1]):
        part = parts[:, k].masked_fill(~groups.active, 0.0)
        normal = groups.centred(part) / (groups.std(part, DDOF) + EPS)
        flat = groups.degenerate(part, TOLERANCE)
        total = total + weights[k] * normal.masked_fill(flat, 0.0)
        signal = signal | ~flat
    chosen = total[groups.active]
    if len(chosen) > DDOF:
        deviation = chosen.std(correction=DDOF)
        total = (total - chosen.mean()) / (deviation + EPS)
    return _spread(rollouts, total.masked_fill(~(signal & groups.active), 0.0))


def grpo_process(rollouts: Rollouts, section: EstimatorSection) -> tuple[Tensor, Tensor]:
    """Process supervision of DeepSeekMath (arXiv 2402.03300, 4.1.3): rewards normalised over all those of the group,
    then summed from the right. The pool is the positions of `reward_mask` (all policy tokens by default).
    """
    pool = Groups.of(rollouts.groups.index[rollouts.segments.ids], rollouts.reward_mask)
    normal = pool.centred(rollouts.rewards) / (pool.std(rollouts.rewards, DDOF) + EPS)
    normal = normal.masked_fill(pool.degenerate(rollouts.rewards, TOLERANCE), 0.0)
    sums = rewards_to_go(normal, rollouts.mask, rollouts.segments, gamma=section.gamma)
    return sums, sums


def rloo_process(rollouts: Rollouts, section: EstimatorSection) -> tuple[Tensor, Tensor]:
    """Token rewards of PRIME (arXiv 2502.01456, eq. 5) before its whitening.

    n / (n - 1) r_t - sum_j mean_j / (n - 1), mean_j over sample j's reward positions; plus, where `outcomes` are
    given, their leave-one-out value on the last policy token; summed from the right.
    """
    r, groups = rollouts, rollouts.groups
    means = r.segments.mean(r.rewards, r.reward_mask)
    size = groups.size()[groups.index]
    others = (size - 1).clamp(min=1)
    baseline = groups.total(means)[groups.index] / others
    shaped = r.rewards * r.segments.spread(size / others) - r.segments.spread(baseline)
    pool = Groups.of(groups.index[r.segments.ids], r.reward_mask)
    flat = pool.degenerate(r.rewards, TOLERANCE) | r.segments.spread(size < 2)
    shaped = shaped.masked_fill(flat | ~r.reward_mask, 0.0)
    if r.outcomes is not None:
        centred = r.outcomes - groups.mean_of_others(r.outcomes)
        outcome = _zero_degenerate_groups(r, r.outcomes, centred)
        shaped = shaped + r.segments.on_last_token(outcome, r.mask)
    sums = rewards_to_go(shaped, r.mask, r.segments, gamma=section.gamma)
    return sums, sums


OUTCOME_ESTIMATORS = frozenset({"reinforce_pp_baseline", "rloo", "grpo", "dr_grpo", "gdpo"})
"""Those that see a sample's sum of rewards alone, and give all its tokens one advantage."""

ESTIMATORS: dict[str, Callable[[Rollouts, EstimatorSection], tuple[Tensor, Tensor]]] = {
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
"""Name to estimator: (rollouts, section) -> (advantages [N], returns [N]); `estimate_advantages` clears both off the mask."""


def _scaled(rollouts: Rollouts, section: EstimatorSection, *, default: str) -> Tensor:
    scores, scale = rollouts.scores(), section.scale or default
    centred = rollouts.groups.centred(scores)
    if scale != "none":
        centred = centred / _deviation(rollouts, scores, scale)
    return _zero_degenerate_groups(rollouts, scores, centred)


def _deviation(rollouts: Rollouts, scores: Tensor, scale: str) -> Tensor:
    """[B] or scalar standard deviation + eps; "batch" is over raw scores, differences between groups included."""
    if scale == "group":
        return rollouts.groups.std(scores, DDOF) + EPS
    chosen = scores[rollouts.groups.active]
    spread = chosen.std(correction=DDOF) if len(chosen) > DDOF else scores.new_zeros(())
    return spread + EPS


def _zero_degenerate_groups(rollouts: Rollouts, scores: Tensor, values: Tensor) -> Tensor:
    """Exactly 0 where the group is degenerate or the sample does not take part."""
    groups = rollouts.groups
    return values.masked_fill(groups.degenerate(scores, TOLERANCE) | ~groups.active, 0.0)


def _spread(rollouts: Rollouts, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """(advantage of its sample on every token, undiscounted rewards-to-go)."""
    returns = rewards_to_go(rollouts.rewards, rollouts.mask, rollouts.segments, gamma=1.0)
    return rollouts.segments.spread(advantages), returns


def rewards_to_go(rewards: Tensor, mask: Tensor, segments: Segments, *, gamma: float) -> Tensor:
    """[N]: sum of gamma^k times the reward k policy tokens later; 0 off the mask.

    >>> rewards_to_go of [1, x, 2] with mask [1, 0, 1] and gamma 0.5 is [2, 0, 2]
    """
    compact = _Compact.of(mask, segments)
    padded = compact.gather(rewards)
    if gamma == 1.0:
        return compact.scatter(padded.flip(1).cumsum(1).flip(1))
    running = padded.new_zeros(len(padded))
    for t in range(padded.shape[1] - 1, -1, -1):
        running = padded[:, t] + gamma * running
        padded[:, t] = running
    return compact.scatter(padded)


@dataclasses.dataclass(frozen=True, slots=True)
class _Compact:
    """Masked-in tokens of each sequence side by side: [B, L], left-aligned, 0 after the end.

    So sums along the tokens skip those the policy did not produce: the result is that of deleting them, computing, and
    putting the values back.
    """

    rows: Tensor
    """[K] int64 sequence of each masked-in token."""
    columns: Tensor
    """[K] int64 its position among its sequence's masked-in tokens."""
    mask: Tensor
    """[N] bool."""
    shape: tuple[int, int]

    @classmethod
    def of(cls, mask: Tensor, segments: Segments) -> _Compact:
        rows = segments.ids[mask]
        counts = torch.bincount(rows, minlength=segments.count)
        columns = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
        longest = int(counts.max()) if len(counts) else 0
        return cls(rows=rows, columns=columns, mask=mask, shape=(segments.count, longest))

    def gather(self, values: Tensor) -> Tensor:
        """[N] to [B, L]."""
        padded = values.new_zeros(self.shape)
        padded[self.rows, self.columns] = values[self.mask]
        return padded

    def scatter(self, padded: Tensor) -> Tensor:
        """[B, L] to [N], 0 off the mask."""
        flat = padded.new_zeros(len(self.mask))
        flat[self.mask] = padded[self.rows, self.columns]
        return flat


def whiten(
    values: Tensor, mask: Tensor, *, weights: Tensor | None = None, ddof: int = 1, eps: float = 1e-8
) -> Tensor:
    """[K] (values - mean) / sqrt(variance + eps), 0 off the mask; with fewer than two entries nothing changes.

    Every masked-in row counts as often as it stands for tokens (`weights` [K]; once by default). Values are 0 off the mask.
    """
    entries = values[mask]
    counts = torch.ones_like(entries) if weights is None else weights[mask]
    if (total := counts.sum()) < 2:
        return values.masked_fill(~mask, 0.0)
    mean = (entries * counts).sum() / total
    variance = ((entries - mean).square() * counts).sum() / (total - ddof)
    return ((values - mean) / (variance + eps).sqrt()).masked_fill(~mask, 0.0)
