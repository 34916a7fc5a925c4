"""Low-rank adapters by name: which parameters have them, what a rank holds of them, and what they are called
outside.

The adapter of a parameter W is a pair A [rank, columns], B [rows, rank]; what is trained is W + scale B A
(arXiv 2106.09685). A parameter that stacks several checkpoint tensors (q, k and v; gate and up) has one A for
all of them, and B has the rows of each. Outside, every checkpoint tensor has a pair of its own, under the names
of the PEFT library (module + lora_A or lora_B); a shared A is stored once, under the first tensor's name. A
parameter that stacks experts has a pair for each. This module imports no engine.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from mrl.config.sections.lora import LoraSection, Target
from mrl.errors import ConfigError
from mrl.models.family import Family
from mrl.models.hf_config import HfConfig, field
from mrl.models.layout import Layout, Place, chunk_layers
from mrl.models.tensors import TRAINER, CheckpointRows, LocalTensor, Row, Spec, cut

STACKED = {"mlp.experts.weight1": 2, "mlp.experts.weight2": 1}
"""The parameters that hold all experts of a rank, and how many blocks of rows each expert has there."""
PREFIXES: dict[Target, str] = {
    "attention": "self_attention.linear_",
    "mlp": "mlp.linear_fc",
    "shared_experts": "mlp.shared_experts.linear_fc",
    "routed_experts": "mlp.experts.",
}
"""What the names of a layer's matrices begin with."""


@dataclasses.dataclass(frozen=True, slots=True)
class Half:
    """A or B of one parameter on one rank."""

    tensor: LocalTensor
    """Its pieces are of stored tensors."""
    stored: Mapping[str, tuple[int, int]]
    """The whole shapes of those."""
    is_split: bool
    """Whether tensor-parallel ranks hold different parts of it; else all of it is on each."""
    replica: tuple[int, int, int]
    """Which copy this is, in Megatron's form; the one of zeros is saved."""


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """The pair of one parameter of one rank."""

    parameter: str
    """The parameter's Megatron name inside its model chunk."""
    chunk: int
    slabs: int
    """How many pairs lie one after the other: the experts of a stacked parameter, or 1."""
    is_routed: bool
    """Of routed experts, of which each rank of an expert-parallel group has others."""
    a: Half
    """[slabs x rank, columns here]"""
    b: Half
    """[rows here, rank]"""


def adapters(
    family: Family,
    hf: HfConfig,
    layout: Layout,
    place: Place,
    lora: LoraSection,
    *,
    dtype: str = "bfloat16",
    spec: Spec = TRAINER,
) -> list[Adapter]:
    """The adapters of one trainer rank, in the order of its parameters.

    ConfigError where a target names nothing in the model, or a chunk of the rank would have nothing to train.
    """
    if missing := set(lora.targets) - {target_of(row) for row in _all_rows(family, hf)}:
        raise ConfigError(
            f"training.lora.targets: {family.model_type} has no {', '.join(sorted(missing))} here"
        )
    shapes, found = adapter_shapes(family, hf, lora), []
    for chunk, prefix, row in family.local_rows(hf, layout, place, spec):
        if (target := target_of(row)) not in lora.targets:
            continue
        is_routed = target == "routed_experts"
        a, b = (
            _half(each, layout, place, shapes, chunk=chunk, prefix=prefix, dtype=dtype, is_routed=is_routed)
            for each in _rows_of(row, lora.rank)
        )
        found.append(Adapter(prefix + row.name, chunk, len(_slabs(row)), is_routed, a, b))
    _require_every_chunk(found, chunk_layers(field(hf, "num_hidden_layers"), layout, place.pp))
    return found


def target_of(row: Row) -> Target | None:
    """What a layer's row belongs to; None where it is no matrix of a linear layer that may have an adapter. Those
    of a folder's stacks (gpt-oss's experts) may not."""
    if not isinstance(row.columns, int) or row.role != "weight" or row.stack:
        return None
    return next((target for target, prefix in PREFIXES.items() if row.name.startswith(prefix)), None)


def a_of(tensor: str) -> str:
    """What A of a checkpoint tensor is called outside.

    >>> a_of("model.layers.0.self_attn.q_proj.weight")
    'model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    return tensor.removesuffix(".weight") + ".lora_A.weight"


def b_of(tensor: str) -> str:
    """What B of a checkpoint tensor is called outside."""
    return tensor.removesuffix(".weight") + ".lora_B.weight"


def adapter_shapes(family: Family, hf: HfConfig, lora: LoraSection) -> dict[str, tuple[int, int]]:
    """The whole shapes of A and B of every matrix of a checkpoint, by their names outside."""
    shapes = {}
    for tensor in family.checkpoint_tensors(hf):
        if len(tensor.shape) == 2:
            rows, columns = tensor.shape
            shapes |= {a_of(tensor.name): (lora.rank, columns), b_of(tensor.name): (rows, lora.rank)}
    return shapes


def changed_tensors(family: Family, hf: HfConfig, lora: LoraSection) -> dict[str, tuple[str, str]]:
    """Checkpoint tensor that adapters change -> the stored names of its A and its B."""
    found = {}
    for row in _all_rows(family, hf):
        for slab in _slabs(row) if target_of(row) in lora.targets else ():
            found |= {segment.tensor: (a_of(slab[0].tensor), b_of(segment.tensor)) for segment in slab}
    return found


def num_elements(family: Family, hf: HfConfig, lora: LoraSection) -> int:
    """Elements of all adapters as a checkpoint stores them."""
    shapes = adapter_shapes(family, hf, lora)
    names = {half for pair in changed_tensors(family, hf, lora).values() for half in pair}
    return sum(math.prod(shapes[name]) for name in names)


def _all_rows(family: Family, hf: HfConfig) -> Iterator[Row]:
    one = Layout()
    return (row for _, _, row in family.local_rows(hf, one, one.place(0), TRAINER))


def _slabs(row: Row) -> list[list[CheckpointRows]]:
    """The segments of each expert of a stack; of the whole row where it is none."""
    size = STACKED.get(row.name, len(row.blocks))
    return [
        [segment for block in row.blocks[at : at + size] for segment in block]
        for at in range(0, len(row.blocks), size)
    ]


def _rows_of(row: Row, rank: int) -> tuple[Row, Row]:
    """A and B of a row: one that is split by columns splits A, one that is split by rows splits B."""
    by_columns = row.dim == 1
    firsts = tuple((CheckpointRows(a_of(slab[0].tensor), 0, rank),) for slab in _slabs(row))
    blocks = tuple(
        tuple(dataclasses.replace(segment, tensor=b_of(segment.tensor)) for segment in block)
        for block in row.blocks
    )
    a = Row(f"{row.name}.lora_A", firsts, row.columns, row.split if by_columns else "none", row.dim)
    return a, Row(f"{row.name}.lora_B", blocks, rank, "none" if by_columns else row.split)


def _half(
    row: Row,
    layout: Layout,
    place: Place,
    shapes: Mapping[str, tuple[int, int]],
    *,
    chunk: int,
    prefix: str,
    dtype: str,
    is_routed: bool,
) -> Half:
    splits = {"none": (1, 0), "tp": (layout.tp, place.tp), "etp": (layout.etp, place.etp)}
    parts, index = splits[row.split]
    tensor = cut(row, parts=parts, index=index, chunk=chunk, dtype=dtype, prefix=prefix)
    is_split = row.split == "tp"
    copy = place.edp if is_routed else place.dp * layout.cp + place.cp
    return Half(
        tensor=tensor,
        stored={piece.tensor: shapes[piece.tensor] for piece in tensor.pieces},
        is_split=is_split,
        replica=(0, 0 if is_split or is_routed else place.tp, copy),
    )


def _require_every_chunk(found: list[Adapter], chunks: tuple[range, ...]) -> None:
    for number, layers in enumerate(chunks):
        if all(adapter.chunk != number for adapter in found):
            raise ConfigError(
                f"training.lora.targets: layers {layers.start} to {layers.stop - 1}, a chunk of a pipeline stage, would "
                "have nothing to train; name a target that all layers have, or lower pp or vpp"
            )
