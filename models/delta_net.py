"""Describe a gated delta net: its sizes, and its tensors in the trainer and in an engine. Imports no engine.

The trainer orders parameters by key head (models/megatron/delta_net_layer.py), whatever the checkpoint's
order. Families differ only in where the rows of the projection to queries, keys, values and gates come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mrl.models.engine_rows import EngineRows
from mrl.models.hf_config import HfConfig, field
from mrl.models.layout import divide
from mrl.models.tensors import CheckpointRows, LocalTensor, ParameterRows, whole_tensor

CHUNK = 64
"""Tokens computed together, by flash-linear-attention's kernels and by ours."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeltaNet:
    """Sizes of one layer: G key heads of width K, H value heads of width V, and filters of W tokens."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    filter_width: int

    @property
    def share(self) -> int:
        """Value heads per key head."""
        return divide(self.value_heads, self.key_heads, name="value heads of delta nets over their key heads")

    @property
    def keys(self) -> int:
        """Rows of all queries; also of all keys."""
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        """Rows of all values; also of all gates."""
        return self.value_heads * self.value_width

    @property
    def state_elements(self) -> int:
        """Elements of all heads' states; constant in the sequence length."""
        return self.value_heads * self.key_width * self.value_width

    @property
    def convolved(self) -> int:
        """Channels of the short convolution."""
        return 2 * self.keys + self.values


def delta_net(hf: HfConfig) -> DeltaNet:
    """Return the sizes of config.json, in transformers' naming."""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    return DeltaNet(*(field(hf, f"linear_{name}") for name in names))


def sections(net: DeltaNet, tensor: str, head: int) -> list[CheckpointRows]:
    """Return the rows of one key head in a tensor that stacks all queries, then all keys, then all values."""
    key, value = net.key_width, net.share * net.value_width
    starts = (head * key, net.keys + head * key, 2 * net.keys + head * value)
    return [
        CheckpointRows(tensor, start, size) for start, size in zip(starts, (key, key, value), strict=True)
    ]


def trainer_rows(
    net: DeltaNet, name: str, hidden: int, projected: Iterable[CheckpointRows]
) -> list[ParameterRows]:
    """Return the rows of a layer's delta net, `name` in the checkpoint.

    `projected`: per key head the rows of its query, key, values and gates, then b and a.
    """
    filters = [
        segment for head in range(net.key_heads) for segment in sections(net, f"{name}.conv1d.weight", head)
    ]
    module, heads = "self_attention", net.value_heads
    return [
        ParameterRows(f"{module}.in_proj.weight", (tuple(projected),), hidden, "tp"),
        ParameterRows(f"{module}.conv_weight", (tuple(filters),), (1, net.filter_width), "tp"),
        ParameterRows(f"{module}.A_log", whole_tensor(f"{name}.A_log", heads), None, "tp"),
        ParameterRows(f"{module}.dt_bias", whole_tensor(f"{name}.dt_bias", heads), None, "tp"),
        ParameterRows(
            f"{module}.out_norm.weight", whole_tensor(f"{name}.norm.weight", net.value_width), None
        ),
        ParameterRows(
            f"{module}.out_proj.weight",
            whole_tensor(f"{name}.out_proj.weight", hidden),
            net.values,
            "tp",
            dim=1,
        ),
    ]


def engine_rows(
    net: DeltaNet,
    name: str,
    hidden: int,
    engine: EngineRows,
    projections: Mapping[str, Sequence[CheckpointRows]],
) -> Iterator[LocalTensor]:
    """Yield the tensors of a delta net on one rank of an engine.

    `projections`: vLLM's name -> segments, each split over tp separately. vLLM keeps A_log in float32,
    whatever the other dtypes. Source: vLLM 0.32, model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py.
    """
    divide(net.key_heads, engine.shard.tp, name="key heads of delta nets over vLLM's tp")
    for projection, parts in projections.items():
        yield engine.sections(f"{name}.{projection}.weight", parts, hidden)
    conv = f"{name}.conv1d.weight"
    starts = (0, net.keys, 2 * net.keys)
    parts = [
        CheckpointRows(conv, start, size)
        for start, size in zip(starts, (net.keys, net.keys, net.values), strict=True)
    ]
    yield engine.sections(conv, parts, 1, net.filter_width)
    for vector, dtype in ((f"{name}.A_log", "float32"), (f"{name}.dt_bias", None)):
        yield engine.sections(vector, [CheckpointRows(vector, 0, net.value_heads)], dtype=dtype)
    yield engine.whole(f"{name}.norm.weight", net.value_width)
    yield engine.split_columns(f"{name}.out_proj.weight", hidden, net.values)
