"""Where the tensors of a Hugging Face folder lie in the trainer's distributed checkpoint, whatever layout
wrote it. Pure.

Such a checkpoint holds whole tensors under Megatron's names (megatron-core 0.19.2,
`TransformerBlock.sharded_state_dict`): the layers of a model whose layers are all alike are one tensor with a
leading axis, those of other models are tensors of their own, and a layer's experts are one tensor [experts,
rows, columns]. Inside one layer and one expert, rows lie as in the name table of a single rank.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container

from mrl.errors import CheckpointError
from mrl.models.family import Family
from mrl.models.hf_config import HfConfig
from mrl.models.layout import Layout
from mrl.models.tensors import LOCAL

LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
FOLDED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Megatron's local spec stores these norms under the names that they have in Transformer Engine's fused
layers."""

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Stored tensors whose rows are padded to a multiple of the tensor-parallel size that wrote them."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredBox:
    """stored[key][start : start + shape] equals a box at `target` of a checkpoint tensor, whose shape lacks
    the leading axes of size 1."""

    key: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    target: tuple[int, ...]


def stored_boxes(family: Family, hf_config: HfConfig, keys: Container[str]) -> dict[str, list[StoredBox]]:
    """Checkpoint tensor -> the boxes that make it. `keys`: the names in the distributed checkpoint;
    CheckpointError where one is absent."""
    boxes: dict[str, list[StoredBox]] = {}
    one = Layout()
    for local in family.local_tensors(hf_config, one, one.place(0), spec=LOCAL):
        key, index = _locate(local.name, keys)
        for piece in local.pieces:
            start, shape = (*index, *piece.local_start), (*(1 for _ in index), *piece.shape)
            boxes.setdefault(piece.tensor, []).append(StoredBox(key, start, shape, piece.start))
    return boxes


def _locate(name: str, keys: Container[str]) -> tuple[str, tuple[int, ...]]:
    """The stored name of a single rank's parameter, and its place on the leading axes."""
    layer = LAYER.fullmatch(name)
    if layer is None:
        candidates: list[tuple[str, tuple[int, ...]]] = [(name, ())]
    else:
        number, rest, index = int(layer[1]), layer[2], ()
        if expert := EXPERT.fullmatch(rest):
            rest, index = f"mlp.experts.experts.{expert[2]}", (int(expert[1]),)
        candidates = []
        for known in (rest, FOLDED_NORMS.get(rest, rest)):
            candidates.append((f"decoder.layers.{known}", (number, *index)))
            candidates.append((f"decoder.layers.{number}.{known}", index))
    for candidate in candidates:
        if candidate[0] in keys:
            return candidate
    raise CheckpointError(f"the checkpoint holds no tensor for {name}; is it one of another model?")
