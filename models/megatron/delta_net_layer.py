"""Run a gated delta net (arXiv 2412.06464) over packed segments, instead of a layer's self attention.

Megatron's own module (megatron.core.ssm.gated_delta_net, 0.19.2) requires flash-linear-attention, whose
kernels need a GPU, and its torch form refuses packed sequences. Here the rule is that of
models/kernels/delta_rule.py, or flash-linear-attention's if the layer choice says so; the projections are
Megatron's. All parameters are ordered by key head, so tensor parallelism splits them like any other: a rank
has whole key heads with their value heads. A state runs through a whole segment. So under context parallelism
the ranks exchange tokens for heads before the rule, and back after it (as DeepSpeed-Ulysses does for
attention, arXiv 2309.14509): each computes its share of the key heads, for all tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp, all_to_all_sp2hp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor

from mrl.models.kernels.delta_rule import gated_delta_rule, gates, short_convolution
from mrl.models.kernels.slots import to_slots
from mrl.models.layout import divide
from mrl.models.megatron.packed_segments import PackedSegments

_SPLIT = {"conv_weight": 0, "A_log": 0, "dt_bias": 0}
"""The module's own parameters -> the dimension that tensor parallelism splits."""


@dataclasses.dataclass
class DeltaNetSubmodules:
    """Classes of the module's projections: Megatron's own or Transformer Engine's."""

    in_proj: Any = None
    out_proj: Any = None


class GatedNorm(torch.nn.Module):
    """Root-mean-square norm of each value head, times SiLU of the gate. Each rank has the whole weight and
    its own heads' gradient."""

    def __init__(self, config: TransformerConfig, width: int) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.weight: Any = torch.nn.Parameter(torch.ones(width, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # its gradient is summed over tp

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Norm x [N, H, V] by gate [N, H, V]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        normed = torch.nn.functional.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps)
        return (normed * torch.nn.functional.silu(gate.to(wide))).to(x.dtype)


class PackedDeltaNet(MegatronModule):
    """Gated delta net of a rank's G key heads, each with H / G value heads.

    For each key head `in_proj` gives query, key, values, gates, b and a, in this order. `conv_weight`
    [channels, 1, W] filters query, key and values, also by key head; `A_log` and `dt_bias` are [H].
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DeltaNetSubmodules,
        layer_number: int,
        *,
        pg_collection: Any,
        fused: bool = False,
        **kwargs: Any,
    ) -> None:
        """`fused`: use flash-linear-attention's kernels. Megatron passes the rest as to attention."""
        super().__init__(config)
        self.layer_number, self.fused = layer_number, fused
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        tp = self.tp_group.size()
        self.key_heads = divide(config.linear_num_key_heads or 0, tp, name="key heads of delta nets over tp")
        self.value_heads = divide(
            config.linear_num_value_heads or 0, tp, name="value heads of delta nets over tp"
        )
        self.share = divide(self.value_heads, self.key_heads, name="value heads per key head")
        key, value = config.linear_key_head_dim, config.linear_value_head_dim
        assert key and value and config.linear_conv_kernel_dim
        self.key_width, self.value_width = key, value
        self.convolved = 2 * key + self.share * value
        """Channels per key head that are convolved."""
        self.projected = self.convolved + self.share * (value + 2)
        """Rows of `in_proj` per key head."""
        build = functools.partial(
            build_module, config=config, bias=False, is_expert=False, tp_group=self.tp_group
        )
        self.in_proj = build(
            submodules.in_proj,
            config.hidden_size,
            self.key_heads * tp * self.projected,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
        )
        self.out_proj = build(
            submodules.out_proj,
            self.value_heads * tp * value,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
        )
        self.conv_weight = _parameter(
            config, self.key_heads * self.convolved, 1, config.linear_conv_kernel_dim
        )
        self.A_log, self.dt_bias = (_parameter(config, self.value_heads) for _ in range(2))
        self.out_norm = GatedNorm(config, value)
        if config.perform_initialization:
            self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """Initialise as the published models' code does: decays of 0.01 to 16, dt_bias 1."""
        self.conv_weight.normal_(0.0, self.config.init_method_std)
        self.A_log.uniform_(0.01, 16).log_()
        self.dt_bias.fill_(1.0)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSegments,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Map hidden_states [N / tp, 1, hidden] to the same shape; the mask is always None."""
        projected = self._of_all_tokens(self.in_proj(hidden_states)[0].squeeze(1), packed_seq_params)
        core = functools.partial(self._core, packed=packed_seq_params)
        mixed = checkpoint(core, False, projected) if self._recomputes else core(projected)
        return self.out_proj(self._of_all_heads(mixed, packed_seq_params).unsqueeze(1))[0], None

    def _of_all_tokens(self, x: Tensor, packed: PackedSegments) -> Tensor:
        """Exchange [own tokens, channels of all heads] for [all tokens, channels of own share of heads]."""
        if self.cp_group.size() == 1:
            return x
        order = packed.zigzag
        return to_slots(all_to_all_sp2hp(x, group=self.cp_group), order.rows, order.tokens)

    def _of_all_heads(self, x: Tensor, packed: PackedSegments) -> Tensor:
        """Undo `_of_all_tokens`."""
        if self.cp_group.size() == 1:
            return x
        order = packed.zigzag
        return all_to_all_hp2sp(to_slots(x, order.tokens, order.rows), group=self.cp_group)

    def _share(self, parameter: Tensor) -> Tensor:
        """Return the rows of the heads that this context-parallel rank computes."""
        return parameter.chunk(self.cp_group.size())[self.cp_group.rank()]

    @property
    def _recomputes(self) -> bool:
        """True if everything between the projections is recomputed, as core attention is."""
        return self.config.recompute_granularity == "selective" and self.training

    def _core(self, projected: Tensor, *, packed: PackedSegments) -> Tensor:
        """Map [N, G x projected] to [N, H x V] for the G key and H value heads of this rank."""
        share, value_width = self.share, self.value_width
        projected = projected.unflatten(1, (-1, self.projected))
        mixed, gate, b, a = projected.split([self.convolved, share * value_width, share, share], dim=-1)
        mixed = short_convolution(mixed.flatten(1), self._share(self.conv_weight)[:, 0], packed.positions)
        sizes = [self.key_width, self.key_width, share * value_width]
        query, key, value = mixed.unflatten(1, (-1, self.convolved)).split(sizes, dim=-1)
        value, gate = (x.reshape(len(x), -1, value_width) for x in (value, gate))
        decay, beta = gates(a.flatten(1), b.flatten(1), self._share(self.A_log), self._share(self.dt_bias))
        if self.fused:
            out = _fused_rule(query, key, value, decay, beta, packed.cu_seqlens_q)
        else:
            out, _ = gated_delta_rule(query, key, value, decay, beta, packed.chunks)
        return self.out_norm(out, gate).flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the parameters under their own names, as whole tensors split over tp by rows."""
        metadata, full = ensure_metadata_has_dp_cp_group(metadata), {}
        self._save_to_state_dict(full, "", keep_vars=True)
        shards = make_sharded_tensors_for_checkpoint(
            full, prefix, _SPLIT, sharded_offsets, tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"]
        )
        for name, module in self.named_children():
            shards |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return shards

    def backward_dw(self) -> None:
        """Do nothing: Megatron may defer weight gradients, these projections do not."""


def _fused_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, bounds: Tensor
) -> Tensor:
    """Compute gated_delta_rule() with flash-linear-attention's kernels; not run on a GPU yet."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    share = value.shape[1] // key.shape[1]
    query, key = (x.repeat_interleave(share, dim=1) for x in (query, key))
    rows = [x.contiguous().unsqueeze(0) for x in (query, key, value, decay, beta)]
    out, _ = chunk_gated_delta_rule(*rows, use_qk_l2norm_in_kernel=True, cu_seqlens=bounds.long())
    return out[0]


def _parameter(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """Return zeros, split over tp by their first dimension."""
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    parameter = torch.nn.Parameter(torch.zeros(shape, dtype=config.params_dtype, device=device))
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter
