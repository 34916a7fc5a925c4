"""Describe LoRA adapters by name: which parameters have one, their shards on a rank, and their PEFT names.

The adapter of a parameter W is a pair A [rank, columns], B [rows, rank]; the model computes with W + scale B
A (arXiv 2106.09685). A parameter that stacks several checkpoint tensors (q, k and v; gate and up) has one A
for all, and B has the rows of each. When saved, every checkpoint tensor has its own pair, under PEFT's names
(module + lora_A or lora_B); a shared A is stored once, under the first tensor's name. A parameter that stacks
experts has a pair per expert. This module imports no engine.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from mrl.config.sections.lora import LoraSection, Target
from mrl.errors import ConfigError
from mrl.models.family import Family
from mrl.models.hf_config import HfConfig, field
from mrl.models.layout import Layout, RankCoordinates, chunk_layers
from mrl.models.tensors import TRAINER, CheckpointRows, LocalTensor, ParameterRows, Spec, shard_row

STACKED = {"mlp.experts.weight1": 2, "mlp.experts.weight2": 1}
"""Parameter that contains all experts of a rank -> blocks of rows per expert."""
PREFIXES: dict[Target, str] = {
    "attention": "self_attention.linear_",
    "mlp": "mlp.linear_fc",
    "shared_experts": "mlp.shared_experts.linear_fc",
    "routed_experts": "mlp.experts.",
}
"""Target -> prefix of the names of its matrices in a layer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Half:
    """A or B of one parameter on one rank."""

    tensor: LocalTensor
    """Its pieces refer to stored tensors."""
    stored: Mapping[str, tuple[int, int]]
    """Stored tensor -> full shape."""
    is_split: bool
    """True if tensor-parallel ranks have different parts; False if each has all of it."""
    replica: tuple[int, int, int]
    """Replica id in Megatron's form; the one of zeros is saved."""


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """The LoRA pair of one parameter of one rank."""

    parameter: str
    """Megatron name of the parameter inside its model chunk."""
    chunk: int
    num_pairs: int
    """Number of concatenated pairs: the experts of a stacked parameter, or 1."""
    is_routed: bool
    """True for routed experts, which differ between expert-parallel ranks."""
    a: Half
    """[slabs x rank, local columns]"""
    b: Half
    """[local rows, rank]"""


def adapters(
    family: Family,
    hf: HfConfig,
    layout: Layout,
    place: RankCoordinates,
    lora: LoraSection,
    *,
    dtype: str = "bfloat16",
    spec: Spec = TRAINER,
) -> list[Adapter]:
    """Return the adapters of one trainer rank, in the order of its parameters.

    Raises ConfigError if a target matches nothing in the model, or a chunk of the rank would train nothing.
    """
    if missing := set(lora.targets) - {target_of(row) for row in _all_rows(family, hf)}:
        raise ConfigError(
            f"training.lora.targets: this {family.model_type} model has no {', '.join(sorted(missing))}"
        )
    shapes, rank_adapters = adapter_shapes(family, hf, lora), []
    for chunk, prefix, row in family.local_rows(hf, layout, place, spec):
        if (target := target_of(row)) not in lora.targets:
            continue
        is_routed = target == "routed_experts"
        a, b = (
            _half(half, layout, place, shapes, chunk=chunk, prefix=prefix, dtype=dtype, is_routed=is_routed)
            for half in _rows_of(row, lora.rank)
        )
        rank_adapters.append(Adapter(prefix + row.name, chunk, len(_slabs(row)), is_routed, a, b))
    _require_every_chunk(rank_adapters, chunk_layers(field(hf, "num_hidden_layers"), layout, place.pp))
    return rank_adapters


def target_of(row: ParameterRows) -> Target | None:
    """Return a row's target; None if it is not the matrix of a linear layer that may have an adapter.
    Matrices that a folder stacks (gpt-oss's experts) may not."""
    if not isinstance(row.columns, int) or row.role != "weight" or row.stack:
        return None
    return next((target for target, prefix in PREFIXES.items() if row.name.startswith(prefix)), None)


def lora_a_name(tensor: str) -> str:
    """Return the PEFT name of A of a checkpoint tensor.

    >>> lora_a_name("model.layers.0.self_attn.q_proj.weight")
    'model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    return tensor.removesuffix(".weight") + ".lora_A.weight"


def lora_b_name(tensor: str) -> str:
    """Return the PEFT name of B of a checkpoint tensor."""
    return tensor.removesuffix(".weight") + ".lora_B.weight"


def adapter_shapes(family: Family, hf: HfConfig, lora: LoraSection) -> dict[str, tuple[int, int]]:
    """Return PEFT name -> full shape of A and B for every matrix of a checkpoint."""
    shapes = {}
    for tensor in family.checkpoint_tensors(hf):
        if len(tensor.shape) == 2:
            rows, columns = tensor.shape
            shapes |= {
                lora_a_name(tensor.name): (lora.rank, columns),
                lora_b_name(tensor.name): (rows, lora.rank),
            }
    return shapes


def changed_tensors(family: Family, hf: HfConfig, lora: LoraSection) -> dict[str, tuple[str, str]]:
    """Return checkpoint tensor that adapters change -> the stored names of its A and B."""
    names = {}
    for row in _all_rows(family, hf):
        for slab in _slabs(row) if target_of(row) in lora.targets else ():
            names |= {
                segment.tensor: (lora_a_name(slab[0].tensor), lora_b_name(segment.tensor)) for segment in slab
            }
    return names


def num_elements(family: Family, hf: HfConfig, lora: LoraSection) -> int:
    """Return the number of elements of all adapters as a checkpoint stores them."""
    shapes = adapter_shapes(family, hf, lora)
    names = {half for pair in changed_tensors(family, hf, lora).values() for half in pair}
    return sum(math.prod(shapes[name]) for name in names)


def _all_rows(family: Family, hf: HfConfig) -> Iterator[ParameterRows]:
    one = Layout()
    return (row for _, _, row in family.local_rows(hf, one, one.coordinates(0), TRAINER))


def _slabs(row: ParameterRows) -> list[list[CheckpointRows]]:
    """Return the segments of each expert of a stack, or of the whole row if it is not a stack."""
    size = STACKED.get(row.name, len(row.blocks))
    return [
        [segment for block in row.blocks[first : first + size] for segment in block]
        for first in range(0, len(row.blocks), size)
    ]


def _rows_of(row: ParameterRows, rank: int) -> tuple[ParameterRows, ParameterRows]:
    """Return A and B of a row: a row split by columns splits A, a row split by rows splits B."""
    by_columns = row.dim == 1
    a_blocks = tuple((CheckpointRows(lora_a_name(slab[0].tensor), 0, rank),) for slab in _slabs(row))
    blocks = tuple(
        tuple(dataclasses.replace(segment, tensor=lora_b_name(segment.tensor)) for segment in block)
        for block in row.blocks
    )
    a = ParameterRows(
        f"{row.name}.lora_A", a_blocks, row.columns, row.split if by_columns else "none", row.dim
    )
    return a, ParameterRows(f"{row.name}.lora_B", blocks, rank, "none" if by_columns else row.split)


def _half(
    row: ParameterRows,
    layout: Layout,
    place: RankCoordinates,
    shapes: Mapping[str, tuple[int, int]],
    *,
    chunk: int,
    prefix: str,
    dtype: str,
    is_routed: bool,
) -> Half:
    splits = {"none": (1, 0), "tp": (layout.tp, place.tp), "etp": (layout.etp, place.etp)}
    parts, index = splits[row.split]
    tensor = shard_row(row, parts=parts, index=index, chunk=chunk, dtype=dtype, prefix=prefix)
    is_split = row.split == "tp"
    copy = place.edp if is_routed else place.dp * layout.cp + place.cp
    return Half(
        tensor=tensor,
        stored={piece.tensor: shapes[piece.tensor] for piece in tensor.pieces},
        is_split=is_split,
        replica=(0, 0 if is_split or is_routed else place.tp, copy),
    )


def _require_every_chunk(rank_adapters: list[Adapter], chunks: tuple[range, ...]) -> None:
    for number, layers in enumerate(chunks):
        if all(adapter.chunk != number for adapter in rank_adapters):
            raise ConfigError(
                f"training.lora.targets: layers {layers.start} to {layers.stop - 1}, a chunk of a pipeline "
                "stage, would train nothing; add a target that all layers have, or lower pp or vpp"
            )
