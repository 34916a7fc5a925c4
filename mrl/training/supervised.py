"""Next-token cross entropy on the tokens of the loss mask: the objective of `mrl sft`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def cross_entropy(
    *,
    logprobs: Tensor,
    entropy: Tensor,
    arrays: Mapping[str, Tensor],
    segment_ids: Tensor,
    denominators: Mapping[str, Any],
) -> tuple[Tensor, dict[str, Tensor]]:
    """-sum(logprobs over the mask) / denominators["num_tokens"], the step's masked tokens over all ranks."""
    weight = arrays["loss_mask"].to(logprobs.dtype) / denominators["num_tokens"]
    loss = -(logprobs * weight).sum()
    return loss, {"loss": loss, "entropy": (entropy * weight).sum()}
