"""Map the tensors of the name tables to the names and tensors of a Hugging Face folder. Pure.

The tables describe a text model whose experts have separate tensors. A folder of a multimodal model has the
text tensors under a prefix, one of two. Some folders store a layer's experts in two tensors [experts, rows,
columns], each expert's gate above its up: Qwen3.5 is published so, while transformers 5.19 writes each expert
separately. Qwen3-VL is published so with each expert transposed. A folder's own names show its form, so both
are read, and an export has the form of the initial folder. (gpt-oss has only one unquantised form, which its
tables know: `CheckpointTensor.stack`.)

A folder's names also show which tensors are quantised: a float8 tensor has its scales next to it, and mxfp4
and int4 store several tensors in place of one. Their export is not quantised.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable
from typing import Any

from mrl.models import int4, mxfp4
from mrl.models.tensors import SCALES, CheckpointTensor

_NESTED = {"model.language_model.": "model.", "language_model.": ""}
"""Prefix of text tensors in a multimodal folder -> what it replaces at the start of a table's name."""
_PREDICTION = "mtp."
"""Prefix of Qwen's multi-token prediction, whose experts may be packed while others are not."""
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_PACKED = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}


@dataclasses.dataclass(frozen=True, slots=True)
class FolderTensor:
    """One tensor of a folder, and the checkpoint tensors it contains."""

    name: str
    parts: tuple[tuple[CheckpointTensor, ...], ...]
    """Tensors of each expert, concatenated by rows; a single one if nothing is packed."""
    packed: bool = False

    @property
    def dtype(self) -> str:
        """torch name without the prefix."""
        return self.parts[0][0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the folder.

        >>> gate, up = (CheckpointTensor(name, (32, 64), "bfloat16") for name in ("gate", "up"))
        >>> FolderTensor("gate_up_proj", ((gate, up),) * 8, packed=True).shape
        (8, 64, 64)
        """
        first = self.parts[0]
        if not self.packed:
            return first[0].stored_shape
        rows, columns = sum(part.shape[0] for part in first), first[0].shape[1]
        return (len(self.parts), columns, rows) if self.turned else (len(self.parts), rows, columns)

    @property
    def turned(self) -> bool:
        """True if each packed expert is transposed."""
        return self.packed and self.parts[0][0].turned

    @property
    def filled_shape(self) -> tuple[int, ...]:
        """Shape of the values that split() and as_stored() take."""
        return self.shape if self.packed else self.parts[0][0].shape

    def split(self, values: Any) -> dict[str, Any]:
        """Split torch `values` [*filled_shape] into views, one per checkpoint tensor."""
        if not self.packed:
            return {self.parts[0][0].name: values}
        values = values.transpose(1, 2) if self.turned else values
        return {
            member.name: rows
            for members, part in zip(self.parts, values, strict=True)
            for member, rows in zip(members, part.split([m.shape[0] for m in members]), strict=True)
        }

    def as_stored(self, values: Any) -> Any:
        """Return the view of torch `values` [*filled_shape] in the folder's form."""
        return values if self.packed else self.parts[0][0].as_stored(values)


@dataclasses.dataclass(frozen=True, slots=True)
class FolderLocation:
    """Location of a checkpoint tensor in a folder: `tensor`, or rows from `row` on of one of its parts."""

    tensor: FolderTensor
    part: int
    row: int

    def box(self, start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Convert a box of the checkpoint tensor to one of a packed folder tensor (first axis of size 1)."""
        rows, columns = (slice(a, a + n) for a, n in zip(start, shape, strict=True))
        moved = slice(rows.start + self.row, rows.stop + self.row)
        part = slice(self.part, self.part + 1)
        return (part, columns, moved) if self.tensor.turned else (part, moved, columns)


@dataclasses.dataclass(frozen=True, slots=True)
class FolderFormat:
    """How the names of a folder differ from those of the tables."""

    nested: str = ""
    """Prefix of text tensors, a key of _NESTED; empty if the folder has only a text model."""
    packed_experts: bool = False
    has_mxfp4_experts: bool = False
    """True if stacked experts are mxfp4."""
    float8: frozenset[str] = frozenset()
    """The folder's float8 tensors, by the folder's names."""
    int4: frozenset[str] = frozenset()
    """Names that the folder's int4 tensors replace."""

    @classmethod
    def of(cls, names: Collection[str]) -> FolderFormat:
        """Detect the form of a folder from its tensor names."""
        packed = int4.SUFFIXES[0]
        return cls(
            nested=next((p for p in _NESTED if any(name.startswith(p) for name in names)), ""),
            packed_experts=any(
                name.endswith(".experts.gate_up_proj") and not name.startswith(_PREDICTION) for name in names
            ),
            has_mxfp4_experts=any(name.endswith(f"_proj{mxfp4.BLOCKS}") for name in names),
            float8=frozenset(n.removesuffix(SCALES) for n in names if n.endswith(SCALES)),
            int4=frozenset(n.removesuffix(packed) for n in names if n.endswith(f".weight{packed}")),
        )

    def is_microscaled(self, tensor: CheckpointTensor) -> bool:
        """Return True if the folder stores a checkpoint tensor in mxfp4."""
        return self.has_mxfp4_experts and bool(tensor.stack) and len(tensor.shape) > 1

    def stored_names(self, tensor: CheckpointTensor) -> list[str]:
        """Return the folder's tensors that contain a checkpoint tensor.

        >>> stacked = CheckpointTensor("down_proj", (512, 32), "bfloat16", stack=8)
        >>> FolderFormat(has_mxfp4_experts=True).stored_names(stacked)
        ['down_proj_blocks', 'down_proj_scales']
        """
        name = self.name(tensor.name)
        if self.is_microscaled(tensor):
            return [name + mxfp4.BLOCKS, name + mxfp4.SCALES]
        if name in self.int4:
            return [name + suffix for suffix in int4.SUFFIXES]
        return [name, name + SCALES] if name in self.float8 else [name]

    def name(self, tensor: str) -> str:
        """Return the folder's name of a checkpoint tensor, packed or not.

        >>> FolderFormat("model.language_model.", True).name("model.layers.0.mlp.experts.3.up_proj.weight")
        'model.language_model.layers.0.mlp.experts.gate_up_proj'
        >>> FolderFormat("language_model.").name("lm_head.weight")
        'language_model.lm_head.weight'
        """
        if self.packed_experts and (expert := _EXPERT.fullmatch(tensor)):
            tensor = f"{expert[1]}.{_PACKED[expert[3]]}"
        if self.nested and tensor.startswith(replaced := _NESTED[self.nested]):
            tensor = self.nested + tensor.removeprefix(replaced)
        return tensor

    def text_name(self, name: str) -> str:
        """Return a folder's name without the prefix of text tensors.

        >>> FolderFormat("language_model.").text_name("language_model.model.norm.weight")
        'model.norm.weight'
        """
        if self.nested and name.startswith(self.nested):
            return _NESTED[self.nested] + name.removeprefix(self.nested)
        return name

    def tensors(self, checkpoint: Iterable[CheckpointTensor]) -> list[FolderTensor]:
        """Return the folder's tensors; the checkpoint lists experts in order, gate before up."""
        parts_by_name: dict[str, dict[str, list[CheckpointTensor]]] = {}
        for tensor in checkpoint:
            expert = _EXPERT.fullmatch(tensor.name) if self.packed_experts else None
            parts = parts_by_name.setdefault(self.name(tensor.name), {})
            parts.setdefault(expert[2] if expert else "", []).append(tensor)
        return [
            FolderTensor(name, tuple(map(tuple, parts.values())), packed="" not in parts)
            for name, parts in parts_by_name.items()
        ]

    def locations(self, checkpoint: Iterable[CheckpointTensor]) -> dict[str, FolderLocation]:
        """Return checkpoint tensor -> its location in the folder."""
        result = {}
        for tensor in self.tensors(checkpoint):
            for number, members in enumerate(tensor.parts):
                row = 0
                for member in members:
                    result[member.name] = FolderLocation(tensor, number, row)
                    row += member.shape[0]
        return result
