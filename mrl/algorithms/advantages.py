"""Advantage estimators over token rewards, and the whitening that some papers apply after theirs.

Owns the formulas and their registry, all in float64 on checked packed tokens. An outcome estimator turns the
sum of a sample's token rewards into one number for all its policy tokens; a process estimator keeps each
token's reward. In both, a degenerate group (see groups) gives exactly 0. Estimators do not whiten.

Choices where frameworks differ: standard deviations use DDOF 1 and EPS 1e-6 (OpenRLHF 1e-9; TRL 1e-4, its
asynchronous trainer ddof 0 and 1e-8). A group is degenerate by max - min and gives exactly 0. GAE and the
discount skip tokens that the policy did not generate. Whitening uses the variance with ddof 1 and adds eps to
it (ROLL, TRL, verl).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mrl.algorithms.groups import Groups
from mrl.algorithms.tokens import Segments, check_samples, checked
from mrl.algorithms.user_function import require_trial_passes, user_function
from mrl.config.sections.algorithm import EstimatorSection

_FUNCTION = "algorithm.estimator.function"
DDOF = 1
"""Delta degrees of freedom of every standard deviation."""
EPS = 1e-6
"""Added to a standard deviation before dividing by it."""
TOLERANCE = 1e-6
"""A group is degenerate (advantage exactly 0) if its rewards differ by at most this share of the largest."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rollouts:
    """Input of an estimator; token tensors are [N] float64 with 0 off the mask.

    For OUTCOME_ESTIMATORS one token that carries the outcome may represent a sample (reward_rows.py); the
    result is equal.
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
    """[B, K] outcome rewards, each normalised separately."""
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
        """Build from checked inputs.

        Args:
            token_rewards: [N]; an outcome reward is on its sample's last policy token.
            group_ids: [B] integers, equal for the samples of one prompt, in any order. A sample without a
                masked-in token enters no statistic, whatever its rewards.
            values: [N]; reward_mask: [N] bool (default: all policy tokens); outcomes: [B].

        Raises:
            ValueError, TypeError: Shape, dtype, NaN or infinity; the message names the argument (and sample).
        """
        if group_ids.shape != (segments.count,):
            raise ValueError(
                f"group_ids: shape {tuple(group_ids.shape)}, expected [{segments.count}], one per sample"
            )
        arrays = {"token_rewards": token_rewards} | ({} if values is None else {"values": values})
        tokens = {name: array.double() for name, array in checked(arrays, mask, segments).items()}
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
        """Return the [B] sum of each sample's token rewards."""
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
    """Return (advantages, returns), both [N] float64 with 0 off the mask; not whitened.

    Returns are advantages + values for gae, the advantages (sums before whitening) for reinforce_pp and the
    process estimators, and undiscounted rewards-to-go for outcome estimators.
    """
    estimator = custom if section.name == "custom" else ESTIMATORS[section.name]
    advantages, returns = estimator(rollouts, section)
    return advantages.masked_fill(~rollouts.mask, 0.0), returns.masked_fill(~rollouts.mask, 0.0)


def gae(rollouts: Rollouts, section: EstimatorSection) -> tuple[Tensor, Tensor]:
    """Compute generalised advantage estimation (arXiv 1506.02438, eq. 16); returns are advantages + values.

    The returns are the critic's targets. The value after a sequence's last policy token is 0.
    """
    if rollouts.values is None:
        raise ValueError("values: required by the estimator 'gae' but missing; run the critic first")
    compact = _Compact.of(rollouts.mask, rollouts.segments)
    rewards, values = compact.gather(rollouts.rewards), compact.gather(rollouts.values)
    advantages = torch.zeros_like(rewards)
    running, next_values = rewards.new_zeros(len(rewards)), rewards.new_zeros(len(rewards))
    gamma, lam = section.gamma, section.lam
    for t in range(rewards.shape[1] - 1, -1, -1):
        running = rewards[:, t] + gamma * next_values - values[:, t] + gamma * lam * running
        next_values = values[:, t]
        advantages[:, t] = running
    flat = compact.scatter(advantages)
    return flat, flat + rollouts.values


def reinforce_pp(rollouts: Rollouts, section: EstimatorSection) -> tuple[Tensor, Tensor]:
    """Compute REINFORCE++ (arXiv 2501.03262) before its whitening: discounted rewards-to-go of each token.

    The sum continues across environment tokens, which do not discount.
    """
    returns = rewards_to_go(rollouts.rewards, rollouts.mask, rollouts.segments, gamma=section.gamma)
    return returns, returns


def reinforce_pp_baseline(rollouts: Rollouts, section: EstimatorSection) -> tuple[Tensor, Tensor]:
    """Compute REINFORCE++-baseline before its whitening: score minus group mean."""
    return _spread(rollouts, _scaled(rollouts, section, default="none"))


def rloo(rollouts: Rollouts, section: EstimatorSection) -> tuple[Tensor, Tensor]:
    """Compute score minus the mean of the other samples (arXiv 2402.14740); a lone sample gets 0."""
    groups, scores = rollouts.groups, rollouts.scores()
    centred = (scores - groups.mean_of_others(scores)).masked_fill(~groups.active, 0.0)
    if section.scale not in (None, "none"):
        centred = centred / _deviation(rollouts, scores, section.scale)
    return _spread(rollouts, _zero_degenerate_groups(rollouts, scores, centred))


def grpo(rollouts: Rollouts, section: EstimatorSection) -> tuple[Tensor, Tensor]:
    """Compute (score - group mean) / (group std + eps) (arXiv 2402.03300, outcome supervision)."""
    return _spread(rollouts, _scaled(rollouts, section, default="group"))


def dr_grpo(rollouts: Rollouts, section: EstimatorSection) -> tuple[Tensor, Tensor]:
    """Compute score minus group mean, not divided (arXiv 2503.20783); use it with aggregation 'constant'."""
    return _spread(rollouts, _scaled(rollouts, section, default="none"))


def maxrl(rollouts: Rollouts, section: EstimatorSection) -> tuple[Tensor, Tensor]:
    """Compute (score - group mean) / group mean (arXiv 2602.02710).

    For rewards of 0 and 1 and N samples, its expected gradient is that of the log-probability of success, as
    the series of pass@k / k up to k = N - 1. Raise ValueError for a negative score.
    """
    scores = rollouts.scores()
    if bool((scores < 0).any()):
        sample = int((scores < 0).nonzero()[0, 0])
        raise ValueError(
            f"reward {float(scores[sample]):g} of sample {sample}: the estimator maxrl needs rewards of at "
            "least 0; change the reward, its penalties or the estimator"
        )
    mean = (scores - rollouts.groups.centred(scores)).clamp(min=EPS)
    values = _zero_degenerate_groups(rollouts, scores, rollouts.groups.centred(scores) / mean)
    return _spread(rollouts, values)


def custom(rollouts: Rollouts, section: EstimatorSection) -> tuple[Tensor, Tensor]:
    """Call the user's function; its result is [B], spread over each sample's tokens, or [N]."""
    values = estimator_of(section)(rollouts)
    if fault := _fault(values, rollouts):
        raise ValueError(f"{_FUNCTION} = {section.function}: {fault}")
    if len(values) == rollouts.segments.count:
        return _spread(rollouts, values.double().masked_fill(~rollouts.groups.active, 0.0))
    return values.double(), rewards_to_go(rollouts.rewards, rollouts.mask, rollouts.segments, gamma=1.0)


def estimator_of(section: EstimatorSection) -> Callable[[Rollouts], Tensor]:
    """Return the user's function with its options bound; raise ConfigError if it cannot be imported or
    called."""
    assert section.function is not None, "checked by the section"
    return user_function(section.function, section.options, setting=_FUNCTION, takes=["rollouts"])


def try_estimator(section: EstimatorSection) -> None:
    """Call a user-defined estimator with two made-up groups. Raise ConfigError if it fails or does not return
    one finite number per sample or token."""
    if section.name != "custom":
        return
    function = estimator_of(section)
    rollouts = Rollouts.of(
        token_rewards=torch.tensor([0.0, 1.0, 0.0, 0.0, 0.5, 0.0, 1.0, 1.0], dtype=torch.float64),
        mask=torch.tensor([False, True, False, True, True, True, True, True]),
        segments=Segments.of(np.array([2, 2, 1, 3])),
        group_ids=torch.tensor([0, 0, 1, 1]),
    )
    path = str(section.function)
    require_trial_passes(path, lambda: _fault(function(rollouts), rollouts), setting=_FUNCTION)


def _fault(values: object, rollouts: Rollouts) -> str:
    """Return the error in a user-defined estimator's result; empty if there is none."""
    sizes = rollouts.segments.count, len(rollouts.mask)
    if not torch.is_tensor(values) or values.dim() != 1 or len(values) not in sizes:
        shape = list(values.shape) if torch.is_tensor(values) else type(values).__name__
        return f"it returned {shape}, not a tensor of {sizes[0]} samples or {sizes[1]} tokens"
    return "" if bool(torch.isfinite(values).all()) else f"it returned {values.tolist()}"


def gdpo(rollouts: Rollouts, section: EstimatorSection) -> tuple[Tensor, Tensor]:
    """Normalise each reward part in its group, sum by weight, normalise over the batch (arXiv 2601.05242).

    Without reward parts the score is the only part. Groups whose parts are all degenerate stay 0.
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
    """Sum normalised rewards from the right, DeepSeekMath's process supervision (arXiv 2402.03300, 4.1.3).

    Each reward is normalised over all positions of `reward_mask` (default: all policy tokens) in its group.
    """
    pooled = Groups.of(rollouts.groups.index[rollouts.segments.ids], rollouts.reward_mask)
    normal = pooled.centred(rollouts.rewards) / (pooled.std(rollouts.rewards, DDOF) + EPS)
    normal = normal.masked_fill(pooled.degenerate(rollouts.rewards, TOLERANCE), 0.0)
    sums = rewards_to_go(normal, rollouts.mask, rollouts.segments, gamma=section.gamma)
    return sums, sums


def rloo_process(rollouts: Rollouts, section: EstimatorSection) -> tuple[Tensor, Tensor]:
    """Compute token rewards of PRIME (arXiv 2502.01456, eq. 5) before its whitening.

    n / (n - 1) r_t - sum_j mean_j / (n - 1), with mean_j over sample j's reward positions. Given `outcomes`,
    add their leave-one-out value on the last policy token. Then sum from the right.
    """
    r, groups = rollouts, rollouts.groups
    means = r.segments.mean(r.rewards, r.reward_mask)
    size = groups.size()[groups.index]
    others = (size - 1).clamp(min=1)
    baseline = groups.total(means)[groups.index] / others
    shaped = r.rewards * r.segments.to_tokens(size / others) - r.segments.to_tokens(baseline)
    pooled = Groups.of(groups.index[r.segments.ids], r.reward_mask)
    flat = pooled.degenerate(r.rewards, TOLERANCE) | r.segments.to_tokens(size < 2)
    shaped = shaped.masked_fill(flat | ~r.reward_mask, 0.0)
    if r.outcomes is not None:
        centred = r.outcomes - groups.mean_of_others(r.outcomes)
        outcome = _zero_degenerate_groups(r, r.outcomes, centred)
        shaped = shaped + r.segments.on_last_token(outcome, r.mask)
    sums = rewards_to_go(shaped, r.mask, r.segments, gamma=section.gamma)
    return sums, sums


OUTCOME_ESTIMATORS = frozenset({"reinforce_pp_baseline", "rloo", "grpo", "dr_grpo", "gdpo", "maxrl"})
"""Estimators that use only a sample's sum of rewards and give all its tokens one advantage."""

ESTIMATORS: dict[str, Callable[[Rollouts, EstimatorSection], tuple[Tensor, Tensor]]] = {
    "gae": gae,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "rloo": rloo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "gdpo": gdpo,
    "maxrl": maxrl,
    "grpo_process": grpo_process,
    "rloo_process": rloo_process,
}
"""Name to estimator, but for the user's own: (rollouts, section) -> (advantages [N], returns [N]), not yet
cleared off the mask."""


def _scaled(rollouts: Rollouts, section: EstimatorSection, *, default: str) -> Tensor:
    scores, scale = rollouts.scores(), section.scale or default
    centred = rollouts.groups.centred(scores)
    if scale != "none":
        centred = centred / _deviation(rollouts, scores, scale)
    return _zero_degenerate_groups(rollouts, scores, centred)


def _deviation(rollouts: Rollouts, scores: Tensor, scale: str) -> Tensor:
    """Return the standard deviation + eps, [B] or scalar; "batch" includes differences between groups."""
    if scale == "group":
        return rollouts.groups.std(scores, DDOF) + EPS
    chosen = scores[rollouts.groups.active]
    spread = chosen.std(correction=DDOF) if len(chosen) > DDOF else scores.new_zeros(())
    return spread + EPS


def _zero_degenerate_groups(rollouts: Rollouts, scores: Tensor, values: Tensor) -> Tensor:
    """Set values to exactly 0 for degenerate groups and inactive samples."""
    groups = rollouts.groups
    return values.masked_fill(groups.degenerate(scores, TOLERANCE) | ~groups.active, 0.0)


def _spread(rollouts: Rollouts, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return (each sample's advantage on all its tokens, undiscounted rewards-to-go)."""
    returns = rewards_to_go(rollouts.rewards, rollouts.mask, rollouts.segments, gamma=1.0)
    return rollouts.segments.to_tokens(advantages), returns


def rewards_to_go(rewards: Tensor, mask: Tensor, segments: Segments, *, gamma: float) -> Tensor:
    """Return [N] sums of gamma^k times the reward k policy tokens later; 0 off the mask.

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
    """Masked-in tokens of each sequence: [B, L], left-aligned, 0 after the end.

    Sums along tokens therefore skip tokens that the policy did not generate, as if they were deleted.
    """

    rows: Tensor
    """[K] int64 sequence of each masked-in token."""
    columns: Tensor
    """[K] int64 position among its sequence's masked-in tokens."""
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
        """Convert [N] to [B, L]."""
        padded = values.new_zeros(self.shape)
        padded[self.rows, self.columns] = values[self.mask]
        return padded

    def scatter(self, padded: Tensor) -> Tensor:
        """Convert [B, L] to [N], 0 off the mask."""
        flat = padded.new_zeros(len(self.mask))
        flat[self.mask] = padded[self.rows, self.columns]
        return flat


def whiten(
    values: Tensor, mask: Tensor, *, weights: Tensor | None = None, ddof: int = 1, eps: float = 1e-8
) -> Tensor:
    """Return [K] (values - mean) / sqrt(variance + eps), 0 off the mask; keep fewer than two entries as is.

    `weights` [K] count how many tokens a masked-in row represents (default 1).
    """
    entries = values[mask]
    counts = torch.ones_like(entries) if weights is None else weights[mask]
    if (total := counts.sum()) < 2:
        return values.masked_fill(~mask, 0.0)
    mean = (entries * counts).sum() / total
    variance = ((entries - mean).square() * counts).sum() / (total - ddof)
    return ((values - mean) / (variance + eps).sqrt()).masked_fill(~mask, 0.0)
