"""The policy losses as functions of checked flat tokens, before aggregation.

Owns the formulas and their registry. Checking, old log-probs, aggregation and metrics are losses.policy_loss's.
Notation: rho = exp(logprobs - old_logprobs), A the advantage, sg stop-gradient, |y| the sequence's tokens.

A token's value passes gradient to that token's own log-prob only, also where the value is made of its sequence: so a
token that a correction weighs with 0 gets none.

Deviations, numbered:
1. The log ratio is bounded at +-20 before exp, so that a wild token is finite; it passes no gradient outside.
2. CISPO bounds are offsets from 1 as everywhere else (weight <= 1 + clip_high), not the cap itself.
3. TOPR's positive samples are chosen by raw reward (`scores`), those above 0 and not from 0 on, which is the same for
   rewards of +1 and -1 and also right for 1 and 0; without scores by the sign of the advantage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from mrl.algorithms import checks
from mrl.algorithms.segments import Reduce, Segments

_MAX_LOG_RATIO = 20.0


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
    """What a loss sees. All [N], with 0 where the mask is False; gradients flow through `logprobs` only."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    """[N] bool."""
    segments: Segments
    scores: Tensor | None
    """[N] raw reward of the token's sample, where given."""
    reduce: Reduce | None
    """Sums [B] over the ranks that hold pieces of the same sequences; must be differentiable."""

    def ratio(self) -> Tensor:
        """[N] rho per token."""
        return torch.exp((self.logprobs - self.old_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))

    def sequence_log_ratio(self) -> Tensor:
        """[N] sum of log rho over the token's sequence, without gradient."""
        log_ratio = (self.logprobs - self.old_logprobs).detach()
        return self.segments.spread(self.segments.sum(log_ratio, self.reduce))

    def sequence_length(self) -> Tensor:
        """[N] |y| of the token's sequence, at least 1."""
        lengths = self.segments.sum(self.mask.to(self.logprobs.dtype), self.reduce)
        return self.segments.spread(lengths.clamp(min=1))


@dataclasses.dataclass(frozen=True, slots=True)
class PerToken:
    """What a loss returns: values to minimise, and what the metrics are computed from (detached)."""

    loss: Tensor
    """[N]; each with gradient to the token's own log-prob only (a correction's weights are multiplied with it)."""
    ratio: Tensor
    """[N] the ratio that the loss clips or measures."""
    clipped_low: Tensor
    """[N] bool: the lower bound took the gradient or changed the weight."""
    clipped_high: Tensor
    """[N] bool, the upper bound."""


Loss = Callable[..., PerToken]
"""loss(tokens, *, clip_low=..., clip_high=..., further options with defaults) -> PerToken."""


def ppo_clip(
    tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> PerToken:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) (arXiv 1707.06347); dual clip as in `dual_clip`."""
    return _clipped(tokens, tokens.ratio(), clip_low, clip_high, dual_clip)


def dual_clip(
    tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 3.0
) -> PerToken:
    """PPO clip; for A < 0 the objective is at least dual_clip * A (arXiv 1912.09729, eq. 5)."""
    return _clipped(tokens, tokens.ratio(), clip_low, clip_high, dual_clip)


def gspo(
    tokens: Tokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4, normalise: bool = True
) -> PerToken:
    """PPO clip with one ratio per sequence, s = exp(mean of log rho over its tokens) (GSPO, arXiv 2507.18071, eq. 5-7).

    In the token form sg(s) pi / sg(pi) (GSPO-token, eq. 13-14): the value is the sequence's, the gradient the token's
    own. Where A is the sequence's both forms have the same gradient; with a correction only this one weighs each token's.
    `normalise=False` takes s = exp(sum), the plain sequence ratio, whose gradient is |y| times as large.
    """
    length, exponent = tokens.sequence_length(), tokens.sequence_log_ratio()
    if normalise:
        exponent = exponent / length
    own = tokens.logprobs - tokens.logprobs.detach()  # 0, with the gradient of the log-prob
    own = torch.where(exponent.abs() <= _MAX_LOG_RATIO, own if normalise else own * length, 0.0)
    ratio = torch.exp(exponent.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO) + own)
    return _clipped(tokens, ratio, clip_low, clip_high, None)


def cispo(
    tokens: Tokens, *, clip_low: float = 1.0, clip_high: float = 4.0, mask_clipped: bool = False
) -> PerToken:
    """-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A logprobs (arXiv 2506.13585, eq. 4-5).

    `mask_clipped` drops the tokens whose gradient PPO's clip would drop (eq. 7).
    """
    ratio = tokens.ratio().detach()
    low, high = ratio < 1 - clip_low, ratio > 1 + clip_high
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    if mask_clipped:
        low, high = low & (tokens.advantages < 0), high & (tokens.advantages > 0)
        weight = weight.masked_fill(low | high, 0.0)
    return PerToken(
        loss=-weight * tokens.advantages * tokens.logprobs, ratio=ratio, clipped_low=low, clipped_high=high
    )


def topr(
    tokens: Tokens, *, clip_low: float = 1.0, clip_high: float = 0.0, positive_above: float = 0.0
) -> PerToken:
    """Positive samples -A logprobs, others -sg(clip(R, 1 - clip_low, 1 + clip_high)) A logprobs (arXiv 2503.14286).

    R = exp(sum of log rho) is the ratio of the whole trajectory, which the paper clips to [0, 1].
    """
    ratio = torch.exp(tokens.sequence_log_ratio().clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    scores = tokens.advantages if tokens.scores is None else tokens.scores
    positive = scores > positive_above
    weight = torch.where(positive, torch.ones_like(ratio), ratio.clamp(1 - clip_low, 1 + clip_high))
    return PerToken(
        loss=-weight * tokens.advantages * tokens.logprobs,
        ratio=ratio,
        clipped_low=~positive & (ratio < 1 - clip_low),
        clipped_high=~positive & (ratio > 1 + clip_high),
    )


def reinforce(tokens: Tokens) -> PerToken:
    """-A logprobs."""
    never = torch.zeros_like(tokens.mask)
    loss = -tokens.advantages * tokens.logprobs
    return PerToken(loss=loss, ratio=tokens.ratio().detach(), clipped_low=never, clipped_high=never)


def kimi15(tokens: Tokens, *, tau: float = 0.1) -> PerToken:
    """-A logprobs, plus tau / 2 (sum of log rho)^2 over each sequence's tokens together (arXiv 2501.12599, eq. 3).

    A token's share of the square is tau / 2 sg(sum) log rho; its gradient is the square's, tau sg(sum).
    """
    plain, log_ratio = reinforce(tokens), tokens.logprobs - tokens.old_logprobs
    pull = tau * tokens.sequence_log_ratio() * (log_ratio - log_ratio.detach() / 2)
    return dataclasses.replace(plain, loss=plain.loss + pull)


def _clipped(
    tokens: Tokens, ratio: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> PerToken:
    advantages = tokens.advantages
    free = -ratio * advantages
    loss = torch.maximum(free, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        if not dual_clip > 1:
            raise ValueError(f"dual_clip = {dual_clip}: must be above 1")
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    still = ratio.detach()
    return PerToken(
        loss=loss,
        ratio=still,
        clipped_low=(still < 1 - clip_low) & (advantages < 0),
        clipped_high=(still > 1 + clip_high) & (advantages > 0),
    )


LOSSES: dict[str, Loss] = {
    "ppo_clip": ppo_clip,
    "dual_clip": dual_clip,
    "gspo": gspo,
    "cispo": cispo,
    "topr": topr,
    "reinforce": reinforce,
    "kimi15": kimi15,
}
"""Name to loss; `register` adds to it."""


def register(name: str) -> Callable[[Loss], Loss]:
    """Decorator that makes a loss callable by name. A taken name is refused."""

    def add(loss: Loss) -> Loss:
        if name in LOSSES:
            raise ValueError(f"policy loss '{name}' is already registered; choose another name")
        LOSSES[name] = loss
        return loss

    return add


def find(name: str) -> Loss:
    """The loss of that name; ValueError with the known names otherwise."""
    checks.known(name, LOSSES, "policy loss")
    return LOSSES[name]
