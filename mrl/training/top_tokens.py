"""Divergence of policy and teacher over the teacher's k likeliest tokens and one bucket for all others.

What is kept of the teacher is k tokens and k + 1 log-probs a place, in the place of a hidden state and an output layer, and an
update computes the policy's logits alone. With c(v) the category of a token v (itself among the k, else the bucket), P(c) the
sum of p(v) over c(v) = c, and Q the teacher's alike, the divergence is that of P and Q: a true divergence of k + 1 categories,
>= 0, never above that of whole distributions (data processing inequality), and equal to it with k the whole vocabulary. Sums over
the k alone, without the bucket, are none of this: they fall below 0 where the policy gives more than the teacher.

By the policy's logits z: d log P(c) / dz(v) = [c(v) = c] p(v) / P(c) - p(v).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.config.sections.distillation import Divergence
from mrl.training.divergence import Vocabulary, summed_over
from mrl.training.logprobs import SMALLEST, chunks, through_output_layer


@torch.no_grad()
def top_tokens(hidden: Tensor, weight: Tensor, k: int, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """(ids [m, k] int32 of the likeliest tokens after hidden states [m, D], log-probs [m, k + 1] of them and of all others
    together); k no larger than the vocabulary. The same on all ranks."""
    ids, log_probs = [], []
    for rows in chunks(hidden.shape[0], vocabulary.chunk):
        here = vocabulary.log_probs(hidden[rows], weight)
        ids.append(_likeliest(here, k, vocabulary))
        log_probs.append(_gathered(here, ids[-1], vocabulary))
    return torch.cat(ids).int(), torch.cat(log_probs)


def top_divergence(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    taught: Tensor,
    *,
    kind: Divergence,
    share: float,
    vocabulary: Vocabulary,
) -> Tensor:
    """Of the policy's distribution from the teacher's after each of m prefixes, in nats: [m].

    `ids` [m, k] and `taught` [m, k + 1] are what top_tokens() gave for the teacher. The rest is as in divergence.divergence().
    """
    return summed_over(kind, share, _ChunkedCategories.apply(hidden, weight, ids, vocabulary), taught)


class _ChunkedCategories(torch.autograd.Function):
    """(hidden [m, D], weight [V', D], ids [m, k]) -> log-probs [m, k + 1]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, vocabulary: Vocabulary) -> Tensor:
        found = [
            _gathered(vocabulary.log_probs(hidden[rows], weight), ids[rows].long(), vocabulary)
            for rows in chunks(hidden.shape[0], vocabulary.chunk)
        ]
        result = torch.cat(found)
        ctx.save_for_backward(hidden, weight, ids, result)
        ctx.vocabulary = vocabulary
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, known = ctx.saved_tensors
        vocabulary: Vocabulary = ctx.vocabulary

        def by_logits(rows: slice) -> Tensor:
            log_p = vocabulary.log_probs(hidden[rows], weight)
            found = _by_logits(log_p, ids[rows].long(), known[rows], grads[0][rows], vocabulary)
            return found.div_(vocabulary.temperature)

        trained = grads[0].dtype if ctx.needs_input_grad[1] else None  # None: a frozen output layer
        by_hidden, by_weight = through_output_layer(hidden, weight, by_logits, vocabulary.chunk, trained)
        return by_hidden, by_weight, None, None


def _likeliest(log_p: Tensor, k: int, vocabulary: Vocabulary) -> Tensor:
    """[c, k] int64 ids over the whole vocabulary, from this rank's columns [c, V']."""
    values, ids = log_p.topk(min(k, log_p.shape[1]), dim=-1)
    ids += vocabulary.rank * log_p.shape[1]
    if not vocabulary.is_split:
        return ids
    size = dist.get_world_size(vocabulary.group)
    offered = [torch.empty_like(values) for _ in range(size)], [torch.empty_like(ids) for _ in range(size)]
    for parts, own in zip(offered, (values, ids), strict=True):
        dist.all_gather(parts, own.contiguous(), group=vocabulary.group)
    values, ids = (torch.cat(parts, dim=-1) for parts in offered)
    return ids.gather(1, values.topk(k, dim=-1).indices)


def _gathered(log_p: Tensor, ids: Tensor, vocabulary: Vocabulary) -> Tensor:
    """[c, k + 1] log-probs of tokens ids [c, k] and of all others together, from this rank's columns [c, V'], overwritten."""
    column, here = _columns(log_p, ids, vocabulary)
    own = torch.where(here, log_p.gather(1, column), 0.0)
    log_p.scatter_add_(1, column, torch.where(here, SMALLEST, 0.0).to(log_p.dtype))
    largest = vocabulary.largest(log_p.max(dim=-1).values)
    others = vocabulary.summed(log_p.sub_(largest[:, None]).exp_().sum(dim=-1))
    rest = (others.log_() + largest).clamp_(min=SMALLEST, max=0.0)
    return torch.cat([vocabulary.summed(own), rest[:, None]], dim=1)


def _by_logits(log_p: Tensor, ids: Tensor, known: Tensor, grad: Tensor, vocabulary: Vocabulary) -> Tensor:
    """[c, V'] the derivatives by scaled logits, from those by the categories' log-probs, grad [c, k + 1]; overwrites log_p.

    A token of the bucket has p(v) / P(rest), which stays a number where P(rest) is too small to be one.
    """
    column, here = _columns(log_p, ids, vocabulary)
    by_category = grad - known.exp() * grad.sum(dim=-1, keepdim=True)
    log_p.scatter_add_(1, column, torch.where(here, SMALLEST, 0.0).to(log_p.dtype))
    share = log_p.sub_(known[:, -1:]).clamp_(max=0.0).exp_()
    by_logits = share.mul_(by_category[:, -1:])
    return by_logits.scatter_add_(1, column, torch.where(here, by_category[:, :-1], 0.0))


def _columns(log_p: Tensor, ids: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """(this rank's columns [c, k] of tokens ids, and which of them [c, k] are this rank's); any column for the others."""
    local = ids - vocabulary.rank * log_p.shape[1]
    here = (local >= 0) & (local < log_p.shape[1])
    return local.clamp(0, log_p.shape[1] - 1), here
