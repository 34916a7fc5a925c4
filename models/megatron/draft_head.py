"""A draft head (multi-token prediction, arXiv 2412.19437): one layer that predicts the token after the next.

Megatron's own module (megatron.core.transformer.multi_token_prediction, 0.19.2) shifts tokens on the device,
segment by segment, and normalises its loss within a micro-batch. Here callers give the embeddings of the next
tokens and take final states, as for the model itself.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.optimizer import MTP_GRAD_NORM_GROUP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrl.models.megatron.packed_segments import PackedSegments


class DraftHead(MegatronModule):
    """Norms of embeddings and of hidden states, the projection of both, a layer, and a final norm. With
    tensor parallelism all but the layer is the same on every rank, which computes its share of the tokens."""

    def __init__(self, config: TransformerConfig, layer: ModuleSpec, norm: Any) -> None:
        """Build a head with the given layer and class of norms, and random weights."""
        super().__init__(config)
        width = config.hidden_size
        self.embedding_norm, self.hidden_norm, self.final_norm = (
            norm(config=config, hidden_size=width, eps=config.layernorm_epsilon) for _ in range(3)
        )
        self.projection = torch.nn.Linear(2 * width, width, bias=False, dtype=config.params_dtype)
        weight: Any = self.projection.weight
        weight.sequence_parallel = config.sequence_parallel
        self.layer: Any = build_module(layer, config=config, layer_number=1, is_mtp_layer=True)
        parameters: Any = self.parameters()
        for parameter in parameters:  # clipped apart, so that the policy's updates stay what they are
            parameter.grad_norm_group = MTP_GRAD_NORM_GROUP

    def forward(self, embedded: Tensor, hidden: Tensor, packed: PackedSegments) -> Tensor:
        """Return final states [k / tp, 1, D]. `embedded` [k / tp, 1, D] are the embeddings of the tokens
        after those whose `hidden` states [k / tp, 1, D] the model returns."""
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        states, _ = self.layer(
            hidden_states=self.projection(both), attention_mask=None, packed_seq_params=packed
        )
        return self.final_norm(states)
