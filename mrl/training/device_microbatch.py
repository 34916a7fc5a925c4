"""A micro-batch on the device of one rank."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from mrl.models.megatron.packed_segments import PackedSegments
from mrl.training.logprobs import Kept
from mrl.training.packing import Microbatch


@dataclasses.dataclass(frozen=True, slots=True)
class DraftTokens:
    """Tokens of a micro-batch that a draft head reads and predicts: the token after the next."""

    following: Tensor
    """[k] int64 the token after each of this rank's; -1 for a segment's first token, which vLLM drafts
    without, and for its last."""
    rows: Tensor
    """[i] int64 positions in DeviceMicrobatch.rows that this rank computes."""
    before: Tensor
    """[i] int64 positions in `tokens` of the tokens two before them."""
    targets: Tensor
    """[i] int64 predicted tokens."""
    is_drafted: Tensor
    """[m] bool, False for rows that nothing drafts: a segment's second token."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceMicrobatch:
    """A micro-batch on the device; with context parallelism, this rank's chunks of it."""

    plan: Microbatch
    tokens: Tensor
    """[1, k] tokens of this rank, with padding."""
    mine: np.ndarray
    """[k] their positions in plan.tokens."""
    packed: PackedSegments
    real: Tensor
    """[k / tp] bool, False for padding, of the tokens whose hidden states this rank has between layers."""
    own_index: np.ndarray
    """[j] the batch's tokens whose log-probs this rank computes."""
    rows: Tensor
    """[m] int64 rows of the micro-batch's n real tokens whose log-probs any rank computes."""
    own_rows: Tensor
    """[j] int64 positions in `rows` that this rank computes, because it has their previous tokens."""
    before: Tensor
    """[j] int64 positions in `tokens` of the previous tokens, whose hidden states predict."""
    targets: Tensor
    """[j] int64 predicted tokens."""
    kept: Kept | None
    """Sampling masks of the predicted tokens; None without any."""
    drafts: DraftTokens | None = None
    """For a draft head; None if none is trained."""

    def gather(self, values: Tensor, *, fill: float, op: dist.ReduceOp.RedOpType) -> np.ndarray:
        """Collect [n, ...] of the micro-batch's real tokens from all ranks' `values` [k / tp, ...]; a
        collective. `op` combines the model's ranks, which contribute `fill` for tokens that they do not have.
        """
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            values = gather_from_sequence_parallel_region(values)
        whole = values.new_full((len(self.plan.tokens), *values.shape[1:]), fill)
        whole[self.mine] = values
        groups = (
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_context_parallel_group(),
        )
        for group in groups:
            dist.all_reduce(whole, op=op, group=group)
        return whole.cpu().numpy()[self.plan.places]
