"""Log-probs and entropy of given tokens from hidden states, vocabulary-parallel and in chunks of tokens.

Logits are never gathered over tensor-parallel ranks, and at most two chunks exist at a time (the logits and
one derived array of the same size): the backward pass recomputes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

SMALLEST = -1e30
"""Replaces the -inf of padded columns in products with 0."""


def local_logits(hidden: Tensor, weight: Tensor, valid: int, temperature: float) -> Tensor:
    """Compute float32 (or float64) logits [c, V'] / temperature from [c, D], [V', D]; padding is -inf."""
    logits = torch.mm(hidden, weight.t())
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        logits = logits.div_(temperature)
    if valid < weight.shape[0]:
        logits[:, valid:] = float("-inf")
    return logits


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """Sampling masks of m rows of logits: the tokens over which each is normalised."""

    bounds: np.ndarray
    """[m + 1]: row i keeps tokens[bounds[i]:bounds[i + 1]]; an empty mask keeps all."""
    tokens: Tensor
    """[bounds[m]] int32."""

    def apply(self, logits: Tensor, rows: slice, first: int) -> None:
        """Set the other columns of logits [c, V'] to -inf. `rows` are theirs among the m; column 0 is token
        `first`."""
        bounds = self.bounds[rows.start : rows.stop + 1]
        counts = torch.from_numpy(np.diff(bounds)).to(logits.device)
        columns = self.tokens[bounds[0] : bounds[-1]].long() - first
        width = logits.shape[1]
        columns = torch.where((columns >= 0) & (columns < width), columns, width)  # of other ranks: dropped
        owners = torch.repeat_interleave(counts, output_size=len(columns))
        left_out = (counts > 0)[:, None].expand(-1, width + 1).contiguous()
        left_out[owners, columns] = False
        logits.masked_fill_(left_out[:, :width], float("-inf"))


class _ChunkedLogprobs(torch.autograd.Function):
    """(hidden [m, D], weight [V', D], targets [m]) -> logprobs [m], entropy [m]. With p the softmax of the
    logits z over the whole vocabulary: d logp[t] / dz = onehot(t) - p, and d H / dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, settings: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, normaliser = [], [], []
        for rows in chunks(hidden.shape[0], settings["chunk"]):
            logits = _kept_logits(hidden, weight, rows, settings)
            chunk = _forward_chunk(logits, targets[rows] - settings["first"], settings["group"])
            for values_of, value in zip((logprobs, entropy, normaliser), chunk, strict=True):
                values_of.append(value)
            del logits  # before the next chunk
        result = [torch.cat(values) for values in (logprobs, entropy, normaliser)]
        ctx.save_for_backward(hidden, weight, targets, result[1], result[2])
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        return result[0], result[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, weight, targets, entropy, normaliser = ctx.saved_tensors
        settings = ctx.settings
        by_logprob = torch.zeros_like(entropy) if grads[0] is None else grads[0]
        by_entropy = grads[1]  # None if nothing depends on it

        def by_logits(rows: slice) -> Tensor:
            logits = _kept_logits(hidden, weight, rows, settings)
            grad = _backward_chunk(
                logits.sub_(normaliser[rows, None]),
                targets[rows] - settings["first"],
                by_logprob[rows],
                entropy[rows],
                None if by_entropy is None else by_entropy[rows],
            )
            return grad if settings["temperature"] == 1.0 else grad.div_(settings["temperature"])

        trained = entropy.dtype if ctx.needs_input_grad[1] else None  # None: a frozen output layer
        return *through_output_layer(hidden, weight, by_logits, settings["chunk"], trained), None, None


def _kept_logits(hidden: Tensor, weight: Tensor, rows: slice, settings: dict[str, Any]) -> Tensor:
    logits = local_logits(hidden[rows], weight, settings["valid"], settings["temperature"])
    if settings["kept"] is not None:
        settings["kept"].apply(logits, rows, settings["first"])
    return logits


def through_output_layer(
    hidden: Tensor,
    weight: Tensor,
    by_logits: Callable[[slice], Tensor],
    chunk: int,
    trained: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """Return derivatives by hidden states [m, D] and by weight [V', D] from those by logits.

    `by_logits` returns the latter for some rows [c, V'], a chunk at a time. The weight's are summed in type
    `trained`, and omitted if it is None.
    """
    grad_hidden, grad_weight = torch.empty_like(hidden), None
    if trained is not None:
        grad_weight = torch.zeros(weight.shape, dtype=trained, device=weight.device)
    for rows in chunks(hidden.shape[0], chunk):
        grad = by_logits(rows).to(weight.dtype)
        torch.mm(grad, weight, out=grad_hidden[rows])
        if grad_weight is not None:
            grad_weight += torch.mm(grad.t(), hidden[rows])
        del grad
    return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


def chunks(num_rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, num_rows)) for start in range(0, max(num_rows, 1), size)]


def _forward_chunk(logits: Tensor, local_targets: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return logprobs, entropy and log-sum-exp of a chunk. Overwrites the logits; one MAX, one SUM."""
    split = group is not None and dist.get_world_size(group) > 1
    largest = logits.max(dim=-1).values
    if split:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    logits.sub_(largest[:, None])
    here = (local_targets >= 0) & (local_targets < logits.shape[1])
    target = logits.gather(1, local_targets.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    weights = logits.exp()
    # sum p z over the vocabulary; -inf x 0 of padded columns would be NaN
    weighted = torch.einsum("tv,tv->t", weights, logits.clamp_(min=SMALLEST))
    sums = torch.stack([weights.sum(dim=-1), weighted, torch.where(here, target, torch.zeros_like(target))])
    if split:
        dist.all_reduce(sums, group=group)
    log_total = sums[0].log()
    return sums[2] - log_total, log_total - sums[1] / sums[0], log_total + largest


def _backward_chunk(
    log_p: Tensor, local_targets: Tensor, grad: Tensor, entropy: Tensor, grad_entropy: Tensor | None
) -> Tensor:
    """Return the gradient of the loss by the (scaled) logits of a chunk. Overwrites log_p."""
    here = (local_targets >= 0) & (local_targets < log_p.shape[1])
    column = local_targets.clamp(0, log_p.shape[1] - 1)[:, None]
    if grad_entropy is None:
        result = log_p.exp_().mul_(-grad[:, None])
    else:
        p = log_p.exp()
        shifted = log_p.clamp_(min=SMALLEST).add_(entropy[:, None])
        result = p.mul_(shifted.mul_(-grad_entropy[:, None]).sub_(grad[:, None]))
    result.scatter_add_(1, column, torch.where(here, grad, torch.zeros_like(grad))[:, None])
    return result


def logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    chunk_tokens: int,
    group: Any = None,
    group_rank: int = 0,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of targets [m] and the entropy of the distribution (nats), each [m] float32.

    With `kept`, both are of the distribution over the kept tokens, to which the targets must belong.

    `hidden` [m, D] is equal on all ranks of the group; `weight` [V / tp, D] is this rank's rows of the padded
    output layer. The gradient by `hidden` is this rank's part: the caller sums it over the group.
    """
    rows = weight.shape[0]
    settings = {
        "chunk": chunk_tokens,
        "first": group_rank * rows,
        "valid": max(0, min(rows, vocab_size - group_rank * rows)),
        "temperature": temperature,
        "group": group,
        "kept": kept,
    }
    return _ChunkedLogprobs.apply(hidden, weight, targets, settings)
