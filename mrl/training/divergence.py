"""Divergence of policy and teacher over the whole vocabulary, vocabulary-parallel and in chunks of tokens.

Whole logits are never stored: each rank computes its columns per chunk of tokens, and again in the backward
pass. Of the teacher, one hidden state per token and its output layer are kept.

With p the policy's and q the teacher's distribution, s the teacher's share and M = s q + (1 - s) p:

| divergence | D | g = dD/dp, up to a constant |
|---|---|---|
| reverse | sum p (log p - log q) | log p - log q |
| forward | sum q (log q - log p) | -q / p |
| jsd | s sum q (log q - log M) + (1 - s) sum p (log p - log M) | (1 - s) (log p - log M) |

By the policy's logits z: dD/dz = p (g - sum p g), which is p (g - D) for reverse and p - q for forward.
Sources: on-policy distillation as the policy gradient of the reverse KL (arXiv 2306.08543); jsd as in GKD
(arXiv 2306.13649), whose beta is s.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.config.sections.distillation import Divergence
from mrl.training.logprobs import SMALLEST, chunks, local_logits, through_output_layer


@dataclasses.dataclass(frozen=True, slots=True)
class Vocabulary:
    """Vocabulary settings: how to compute logits, and their split over ranks."""

    size: int
    """Tokens of the vocabulary, on all ranks; later rows of the output layer are padding."""
    temperature: float
    chunk: int
    """Tokens per chunk."""
    group: Any = None
    """Ranks that share the vocabulary; None for one."""
    rank: int = 0
    """This rank's place in the group, which selects its rows of the output layer."""

    def log_probs(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return this rank's columns [c, V'] of the log-probs after states [c, D]; SMALLEST for padding."""
        rows = weight.shape[0]
        valid = max(0, min(rows, self.size - self.rank * rows))
        logits = local_logits(hidden, weight, valid, self.temperature)
        logits.sub_(self.largest(logits.max(dim=-1).values)[:, None])
        total = self.summed(logits.exp().sum(dim=-1))
        return logits.sub_(total.log_()[:, None]).clamp_(min=SMALLEST)

    def summed(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        """Take the maximum over all ranks, in place."""
        return self._reduced(values, dist.ReduceOp.MAX)

    @property
    def is_split(self) -> bool:
        """True if other ranks also have columns."""
        return self.group is not None and dist.get_world_size(self.group) > 1

    def _reduced(self, values: Tensor, how: Any) -> Tensor:
        if self.is_split:
            dist.all_reduce(values, op=how, group=self.group)
        return values


class _ChunkedDivergence(torch.autograd.Function):
    """(hidden [m, D], weight [V', D], the teacher's [m, D'] and [V', D']) -> divergence [m]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        taught_hidden: Tensor,
        taught_weight: Tensor,
        kind: Divergence,
        share: float,
        vocabulary: Vocabulary,
    ) -> Tensor:
        parts = []
        for rows in chunks(hidden.shape[0], vocabulary.chunk):
            log_p = vocabulary.log_probs(hidden[rows], weight)
            log_q = vocabulary.log_probs(taught_hidden[rows], taught_weight)
            parts.append(vocabulary.summed(partial_divergence(kind, share, log_p, log_q)))
            del log_p, log_q  # before the next chunk
        ctx.save_for_backward(hidden, weight, taught_hidden, taught_weight)
        ctx.settings = kind, share, vocabulary
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, taught_hidden, taught_weight = ctx.saved_tensors
        kind, share, vocabulary = ctx.settings

        def by_logits(rows: slice) -> Tensor:
            log_p = vocabulary.log_probs(hidden[rows], weight)
            log_q = vocabulary.log_probs(taught_hidden[rows], taught_weight)
            scale = grads[0][rows] / vocabulary.temperature
            return _by_logits(kind, share, log_p, log_q, vocabulary).mul_(scale[:, None])

        trained = grads[0].dtype if ctx.needs_input_grad[1] else None  # None: a frozen output layer
        by_hidden, by_weight = through_output_layer(hidden, weight, by_logits, vocabulary.chunk, trained)
        return by_hidden, by_weight, None, None, None, None, None


def partial_divergence(kind: Divergence, share: float, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the [c] divergence summed over the categories of log-probs [c, V']."""
    if kind == "reverse":
        return torch.einsum("tv,tv->t", log_p.exp(), log_p - log_q)
    if kind == "forward":
        return torch.einsum("tv,tv->t", log_q.exp(), log_q - log_p)
    log_m = _log_mixture(share, log_p, log_q)
    theirs = torch.einsum("tv,tv->t", log_q.exp(), log_q - log_m)
    return share * theirs + (1 - share) * torch.einsum("tv,tv->t", log_p.exp(), log_p - log_m)


def _by_logits(
    kind: Divergence, share: float, log_p: Tensor, log_q: Tensor, vocabulary: Vocabulary
) -> Tensor:
    """Return the [c, V'] derivatives of the divergence by the policy's scaled logits."""
    if kind == "forward":
        return log_p.exp().sub_(log_q.exp())
    if kind == "reverse":
        slope = log_p - log_q
    else:
        slope = (log_p - _log_mixture(share, log_p, log_q)).mul_(1 - share)
    p = log_p.exp()
    mean = vocabulary.summed(torch.einsum("tv,tv->t", p, slope))
    return p.mul_(slope.sub_(mean[:, None]))


def _log_mixture(share: float, log_p: Tensor, log_q: Tensor) -> Tensor:
    return torch.logaddexp(log_q + math.log(share), log_p + math.log1p(-share))


def divergence(
    hidden: Tensor,
    weight: Tensor,
    taught_hidden: Tensor,
    taught_weight: Tensor,
    *,
    kind: Divergence,
    share: float,
    vocabulary: Vocabulary,
) -> Tensor:
    """Return the divergence of policy from teacher after m prefixes, nats: [m] float32 (float64 for float64).

    `hidden` [m, D] and `taught_hidden` [m, D'] are equal on all ranks of the group; the weights [V / tp, D],
    [V / tp, D'] are this rank's rows of the padded output layers. Gradients flow to `hidden` and `weight`;
    the one by `hidden` is this rank's part, which the caller sums over the group. `share` is the teacher's in
    the mixture of jsd.
    """
    return _ChunkedDivergence.apply(hidden, weight, taught_hidden, taught_weight, kind, share, vocabulary)
