"""Locate a Hugging Face folder's tensors in the trainer's distributed checkpoint, whatever layout wrote it.
Pure.

Such a checkpoint contains whole tensors under Megatron's names (megatron-core 0.19.2,
`TransformerBlock.sharded_state_dict`). If all layers are alike, they are one tensor with a leading axis;
otherwise each layer has its own tensors. A layer's experts are one tensor [experts, rows, columns]. Within a
layer and an expert, rows are as in the name table of a single rank.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container

from mrl.errors import CheckpointError
from mrl.models.family import DRAFTS, Family
from mrl.models.hf_config import HfConfig
from mrl.models.layout import Layout
from mrl.models.tensors import LOCAL

LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
FOLDED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Norms that Megatron's local spec stores under the names of Transformer Engine's fused layers."""

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Stored tensors whose rows are padded to a multiple of the tensor-parallel size that wrote them."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredBox:
    """stored[key][start : start + shape] equals a checkpoint tensor's box at `target`, but for leading 1s."""

    key: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    target: tuple[int, ...]


def has_draft_head(keys: Container[str]) -> bool:
    """Return True if a checkpoint with names `keys` contains a trained draft head."""
    return f"{DRAFTS}final_norm.weight" in keys


def stored_boxes(family: Family, hf_config: HfConfig, keys: Container[str]) -> dict[str, list[StoredBox]]:
    """Return checkpoint tensor -> its boxes in the distributed checkpoint with names `keys`.

    Raises CheckpointError if a name is missing.
    """
    boxes: dict[str, list[StoredBox]] = {}
    one, drafts = Layout(), has_draft_head(keys)
    for local in family.local_tensors(hf_config, one, one.coordinates(0), spec=LOCAL, drafts=drafts):
        key, index = _locate(local.name, keys)
        for piece in local.pieces:
            start, shape = (*index, *piece.local_start), (*(1 for _ in index), *piece.shape)
            boxes.setdefault(piece.tensor, []).append(StoredBox(key, start, shape, piece.start))
    return boxes


def _locate(name: str, keys: Container[str]) -> tuple[str, tuple[int, ...]]:
    """Return the stored name of a single rank's parameter, and its index on the leading axes."""
    layer, draft_layer = LAYER.fullmatch(name), f"{DRAFTS}layer."
    if layer is None and not name.startswith(draft_layer):
        candidates: list[tuple[str, tuple[int, ...]]] = [(name, ())]
    else:
        suffix, index = layer[2] if layer else name.removeprefix(draft_layer), ()
        if expert := EXPERT.fullmatch(suffix):
            suffix, index = f"mlp.experts.experts.{expert[2]}", (int(expert[1]),)
        candidates = []
        for known in (suffix, FOLDED_NORMS.get(suffix, suffix)):
            if layer is None:
                candidates.append((draft_layer + known, index))
                continue
            candidates.append((f"decoder.layers.{known}", (int(layer[1]), *index)))
            candidates.append((f"decoder.layers.{layer[1]}.{known}", index))
    for candidate in candidates:
        if candidate[0] in keys:
            return candidate
    raise CheckpointError(f"the checkpoint has no tensor for {name}; check that it is of this model")
