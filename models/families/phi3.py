"""Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905): a dense decoder with merged QKV and merged gate and up
tensors.

vLLM's parameters of these names have the same rows, except for its split over ranks. Source: transformers
5.19, models/phi3; vLLM 0.32, model_executor/models/phi3.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from mrl.models.engine_rows import EngineRows
from mrl.models.family import Family
from mrl.models.hf_config import HfConfig, field, head_dim
from mrl.models.tensors import CheckpointRows, LocalTensor, ParameterRows, Spec, TensorSlice

_PART = re.compile(r"(.+\.)(q|k|v|gate|up)_proj\.weight")


class Phi3(Family):
    """Phi-3 and Phi-4 without windows and LongRoPE."""

    model_type = "phi3"
    partial_rotary = True
    implemented = {"sliding_window": (None,), "embd_pdrop": (None, 0), "resid_pdrop": (None, 0)}
    harmless = ("original_max_position_embeddings",)  # LongRoPE

    def layer(self, hf: HfConfig, number: int, spec: Spec, own_experts: range) -> list[ParameterRows]:
        return [_merged(hf, row) for row in super().layer(hf, number, spec, own_experts)]

    def engine_layer(self, hf: HfConfig, number: int, engine: EngineRows) -> Iterator[LocalTensor]:
        for tensor in super().engine_layer(hf, number, engine):
            pieces = tuple(_merged_piece(hf, piece) for piece in tensor.pieces)
            yield dataclasses.replace(tensor, pieces=pieces)


def _merged(hf: HfConfig, row: ParameterRows) -> ParameterRows:
    """Replace the parts in a row by rows of the merged tensors."""
    blocks = tuple(
        tuple(CheckpointRows(*_home(hf, part.tensor, part.start), part.rows) for part in block)
        for block in row.blocks
    )
    return dataclasses.replace(row, blocks=blocks)


def _merged_piece(hf: HfConfig, piece: TensorSlice) -> TensorSlice:
    tensor, first = _home(hf, piece.tensor, piece.start[0])
    return dataclasses.replace(piece, tensor=tensor, start=(first, *piece.start[1:]))


def _home(hf: HfConfig, tensor: str, row: int) -> tuple[str, int]:
    """Return the folder tensor that contains a row of one of its parts, and the row's number there."""
    part = _PART.fullmatch(tensor)
    if part is None:
        return tensor, row
    queries, keys = (field(hf, f"num_{kind}_heads") * head_dim(hf) for kind in ("attention", "key_value"))
    starts = {"q": 0, "k": queries, "v": queries + keys, "gate": 0, "up": field(hf, "intermediate_size")}
    merged = "gate_up_proj" if part[2] in ("gate", "up") else "qkv_proj"
    return f"{part[1]}{merged}.weight", row + starts[part[2]]
