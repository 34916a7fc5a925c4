"""Correction weights for the mismatch between trainer and engine log-probs of the same tokens.

Owns w = exp(old_logprobs - rollout_logprobs) at token and sequence level, its truncations and its metrics.
The mismatch is always measured (`correction_metrics`) and corrected only if configured; losses.policy_loss
measures the effect of the weights on a step. Weights carry no gradient and change no denominator: a token
with weight 0 still counts.

Choices where frameworks differ:
1. sequence_mask measures a sequence by the geometric mean of w, as OpenRLHF does; TRL takes the product.
2. Sequences kept by sequence_mask have weight 1; token_weights="raw" gives OpenRLHF's, "truncated" caps them.
3. icepop drops tokens outside [low, high] (arXiv 2510.18855); truncated caps w (TIS).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mrl.algorithms.losses import Tokens
from mrl.algorithms.tokens import MAX_LOG_RATIO
from mrl.config.sections.correction import Correction

TOKEN_HIGH = 2.0
"""Cap of truncated token weights under sequence_mask, as in TIS."""


def weights(section: Correction, tokens: Tokens, rollout_logprobs: Tensor) -> Tensor:
    """Return the [N] weight of each token's loss, detached, 0 off the mask; inputs are already checked.

    With w_t per token and W = exp(mean of log w) over a sequence's tokens. off: 1. truncated: min(w_t, high).
    icepop: w_t inside [low, high], else 0. sequence_mask: W inside [low, high] keeps the sequence, with
    `token_weights` none (1), raw (w_t) or truncated (min(w_t, TOKEN_HIGH)). geometric: min(W, high).
    off_policy_mask (arXiv 2512.02556, eq. 9): 0 where A < 0 and the sequence's mean of engine minus new
    log-prob exceeds max_kl, which grows with the updates of a step; else 1.
    """
    log_ratios = _log_ratios(tokens, rollout_logprobs)
    per_token = torch.exp(log_ratios)
    match section.kind:
        case "off":
            values = torch.ones_like(per_token)
        case "truncated":
            values = per_token.clamp(max=section.high)
        case "icepop":
            values = per_token.masked_fill(_outside(section, per_token), 0.0)
        case "sequence_mask":
            kept = {
                "none": torch.ones_like(per_token),
                "raw": per_token,
                "truncated": per_token.clamp(max=TOKEN_HIGH),
            }[section.token_weights]
            values = kept.masked_fill(_outside(section, _geometric(log_ratios, tokens)), 0.0)
        case "geometric":
            values = _geometric(log_ratios, tokens).clamp(max=section.high)
        case "off_policy_mask":
            drift = (rollout_logprobs - tokens.logprobs).detach()
            far = tokens.segments.to_tokens(tokens.segments.mean(drift, tokens.mask)) > section.max_kl
            values = torch.ones_like(per_token).masked_fill(far & (tokens.advantages < 0), 0.0)
    return values.masked_fill(~tokens.mask, 0.0)


def correction_metrics(tokens: Tokens, rollout_logprobs: Tensor) -> dict[str, Tensor]:
    """Measure the mismatch at every granularity over the masked-in tokens, as metrics that add up.

    policy/rollout_mismatch_kl: k3 of KL(engine || trainer) per token, nats. policy/rollout_difference: mean
    |log w|. policy/rollout_weight_<token|geometric>: means over tokens. policy/rollout_difference_max:
    largest |log w|.
    """
    log_ratios = _log_ratios(tokens, rollout_logprobs)
    means = {
        "policy/rollout_mismatch_kl": torch.expm1(log_ratios) - log_ratios,
        "policy/rollout_difference": log_ratios.abs(),
        "policy/rollout_weight_token": torch.exp(log_ratios),
        "policy/rollout_weight_geometric": _geometric(log_ratios, tokens),
    }
    metrics = {name: tokens.token_mean(values) for name, values in means.items()}
    return metrics | {"policy/rollout_difference_max": tokens.token_max(log_ratios.abs())}


def _log_ratios(tokens: Tokens, rollout_logprobs: Tensor) -> Tensor:
    """Return [N] log w, clamped; 0 off the mask."""
    difference = (tokens.old_logprobs - rollout_logprobs).detach().masked_fill(~tokens.mask, 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _outside(section: Any, values: Tensor) -> Tensor:
    return (values < section.low) | (values > section.high)


def _geometric(log_ratios: Tensor, tokens: Tokens) -> Tensor:
    return tokens.segments.to_tokens(torch.exp(tokens.segments.mean(log_ratios, tokens.mask)))
