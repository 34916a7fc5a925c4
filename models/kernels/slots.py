"""Move packed tokens to padded slots and back; each direction is the gradient of the other. Torch alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_slots(tokens: Tensor, slot_tokens: Tensor, token_slots: Tensor) -> Tensor:
    """Move tokens [N, ...] to slots [M, ...]: slot i gets token `slot_tokens[i]`; `token_slots[n]` is token
    n's own slot.

    Only a token's own slot may have a gradient; padding, which repeats tokens, has none. index_select's own
    backward adds rows one by one; a second gather is several times faster on CPU.
    """
    return _ToSlots.apply(tokens, slot_tokens, token_slots)


def to_tokens(slots: Tensor, token_slots: Tensor) -> Tensor:
    """Move slots [M, ...] to tokens [N, ...]; the gradient of padding slots is zero."""
    return _ToTokens.apply(slots, token_slots)


class _ToSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, slot_tokens: Tensor, token_slots: Tensor) -> Tensor:
        ctx.save_for_backward(token_slots)
        return tokens.index_select(0, slot_tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (token_slots,) = ctx.saved_tensors
        return grads[0].index_select(0, token_slots), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slots: Tensor, token_slots: Tensor) -> Tensor:
        ctx.save_for_backward(token_slots)
        ctx.num_slots = slots.shape[0]
        return slots.index_select(0, token_slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (token_slots,) = ctx.saved_tensors
        grad = grads[0]
        padded = grad.new_zeros((ctx.num_slots, *grad.shape[1:]))
        padded[token_slots] = grad
        return padded, None
