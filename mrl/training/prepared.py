"""A microbatch on the device of one rank."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from mrl.models.megatron.packed_segments import PackedSegments
from mrl.training.packing import Microbatch


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A microbatch on the device; all of it without context parallelism, this rank's chunks with it."""

    plan: Microbatch
    tokens: Tensor
    """[1, k] the tokens of this rank, padding included."""
    kept: np.ndarray
    """[k] their positions in plan.tokens."""
    packed: PackedSegments
    real: Tensor
    """[k / tp] bool, of the tokens whose hidden states this rank holds between layers: False for padding."""
    own_index: np.ndarray
    """[j] the batch's tokens whose log-probs are computed on this rank."""
    rows: Tensor
    """[m] int64 which of the microbatch's n real tokens have their log-probs computed, on whatever rank."""
    own_rows: Tensor
    """[j] int64 positions in `rows` of those computed on this rank: those whose token before is its."""
    before: Tensor
    """[j] int64 positions in `tokens` of the tokens before, whose hidden states predict them."""
    targets: Tensor
    """[j] int64 the tokens that are predicted."""

    def of_all_ranks(self, own: Tensor, *, fill: float, op: dist.ReduceOp.RedOpType) -> np.ndarray:
        """[n, ...] of the microbatch's real tokens, from what every rank of its model has of its own tokens' hidden states:
        [k / tp, ...], where `op` combines pipeline stages, and takes `fill` from none. A collective of those ranks."""
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            own = gather_from_sequence_parallel_region(own)
        whole = own.new_full((len(self.plan.tokens), *own.shape[1:]), fill)
        whole[self.kept] = own
        groups = (
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_context_parallel_group(),
        )
        for group in groups:
            dist.all_reduce(whole, op=op, group=group)
        return whole.cpu().numpy()[self.plan.places]
