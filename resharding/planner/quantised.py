"""Checkpoint tensors that a block-quantised engine takes in another form, and where their blocks are. Pure.

Such an engine has two parameters per quantised checkpoint tensor: float8 values under its name, and float32
scales, one per square block, under the name with `_scale_inv` (DeepSeek-V3's checkpoint form). An engine
manifest shows both, so the planner needs no option: float8 needed and a wider dtype held means quantise.
Blocks are counted from the checkpoint tensor's first element; the last may be smaller. The arithmetic is in
`fp8`.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from mrl.errors import WeightSyncError
from mrl.models.tensors import BLOCK, SCALES, CheckpointTensor, LocalTensor, TensorSlice
from mrl.resharding.planner.boxes import Box, cells, contains, full_shape
from mrl.resharding.planner.manifest import RankManifest, module_of, whole_modules

VALUES = "float8_e4m3fn"
_LINEAR = re.compile(r"(_proj|_proj_with_mqa|\.w[123])\.weight$")


def quantises(name: str) -> bool:
    """Return True for projections of attention, dense layers and experts; not for embeddings, norms, routers
    and the output layer."""
    return _LINEAR.search(name) is not None


def quantised_checkpoint(tensors: Iterable[CheckpointTensor], block: int = BLOCK) -> list[CheckpointTensor]:
    """Return the checkpoint as the engine sees it, with values and scales; unchanged if `block` is 0."""
    result = []
    for tensor in tensors:
        if block and quantises(tensor.name):
            result.append(dataclasses.replace(tensor, dtype=VALUES))
            scales = tuple(-(-size // block) for size in tensor.shape)
            result.append(CheckpointTensor(tensor.name + SCALES, scales, "float32"))
        else:
            result.append(tensor)
    return result


def engine_settings(num_layers: int) -> dict[str, Any]:
    """Return the `quantization_config` of a Hugging Face config that quantises exactly these tensors.

    It excludes routers by name, because vLLM makes linear layers of some."""
    routers = [f"model.layers.{n}.{m}.gate" for n in range(num_layers) for m in ("mlp", "block_sparse_moe")]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", *routers],
    }


def quantised_manifest(wide: RankManifest, block: int = BLOCK) -> RankManifest:
    """Return an engine rank's quantised manifest; raise WeightSyncError if one of its boxes cuts a block."""
    result: list[LocalTensor] = []
    for _, module in itertools.groupby(wide.tensors, key=lambda t: module_of(t.name)):
        tensors = list(module)
        chosen = [t for t in tensors if t.pieces and all(quantises(p.tensor) for p in t.pieces)]
        result += [dataclasses.replace(t, dtype=VALUES) if t in chosen else t for t in tensors]
        result += [_scales_of(t, block) for t in chosen]
    return RankManifest.of(wide.rank, result, wide.unplanned)


def manifests(wide: Sequence[RankManifest], quantization: str) -> list[RankManifest]:
    """Return engine ranks' manifests in the form of `rollout.quantization`."""
    return list(wide) if quantization == "none" else [quantised_manifest(rank) for rank in wide]


def _scales_of(tensor: LocalTensor, block: int) -> LocalTensor:
    pieces = []
    for piece in tensor.pieces:
        outer, local = piece.local_start[:-2], piece.local_start[-2:]
        if any(at % block for at in (*piece.start, *local)):
            raise WeightSyncError(
                f"{tensor.name}: the engine's box of {piece.tensor} at {piece.start} must begin on a block "
                f"of {block}"
            )
        start = tuple(at // block for at in piece.start)
        shape = tuple(-(-size // block) for size in piece.shape)
        pieces.append(
            TensorSlice(piece.tensor + SCALES, start, shape, (*outer, *(at // block for at in local)))
        )
    shape = (*tensor.shape[:-2], *(-(-size // block) for size in tensor.shape[-2:]))
    return LocalTensor(tensor.name + SCALES, tensor.chunk, shape, "float32", tuple(pieces))


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """Square blocks of one checkpoint tensor."""

    full: tuple[int, ...]
    """Shape of the tensor."""
    edge: int

    @classmethod
    def of(cls, boxes: Iterable[Box], edge: int) -> Blocks:
        """Return the blocks of the tensor that the boxes make up."""
        return cls(full_shape(boxes), edge)

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of blocks along each dimension."""
        return tuple(-(-size // self.edge) for size in self.full)

    def inside(self, start: Sequence[int], shape: Sequence[int]) -> Box:
        """Return the whole blocks in a box, in blocks; size 0 if there are none.

        >>> Blocks((10, 8), 4).inside((2, 0), (8, 8))
        ((1, 0), (2, 2))
        """
        low = [-(-at // self.edge) for at in start]
        high = [
            n if at + size == whole else (at + size) // self.edge
            for at, size, whole, n in zip(start, shape, self.full, self.grid, strict=True)
        ]
        return tuple(low), tuple(max(0, h - a) for a, h in zip(low, high, strict=True))

    def elements(self, start: Sequence[int], shape: Sequence[int]) -> Box:
        """Return a box of blocks in elements."""
        ends = (a + n for a, n in zip(start, shape, strict=True))
        low, high = (
            tuple(min(at * self.edge, whole) for at, whole in zip(side, self.full, strict=True))
            for side in (start, ends)
        )
        return low, tuple(h - a for a, h in zip(low, high, strict=True))


# Tensors that trainer ranks cut inside a block leave the plan, module by module, and are quantised by the
# receiver: ranks with a part of a block each would have to agree on its scale before any could send.


def without_cut_modules(
    trainers: Sequence[RankManifest], engines: Sequence[RankManifest], block: int
) -> list[RankManifest]:
    """Drop the modules that need a block which no trainer rank holds whole from the engine manifests; their
    tensors become `unplanned`. Without quantised tensors, return the manifests unchanged."""
    if not any(t.dtype == VALUES for d in engines for t in d.tensors):
        return list(engines)
    cut = cut_inside_blocks(trainers, block)
    reduced: dict[str, RankManifest] = {}
    for engine in engines:
        if engine.digest not in reduced:
            reduced[engine.digest] = _without(engine, cut)
    return [dataclasses.replace(reduced[d.digest], rank=d.rank) for d in engines]


def cut_inside_blocks(trainers: Sequence[RankManifest], block: int) -> set[str]:
    """Return names of tensors with a block that no rank holds whole."""
    held: dict[str, dict[Box, None]] = {}
    for manifest in {trainer.digest: trainer for trainer in trainers}.values():
        for piece in (p for tensor in manifest.tensors for p in tensor.pieces if quantises(p.tensor)):
            held.setdefault(piece.tensor, {})[piece.start, piece.shape] = None
    covered: dict[tuple[Box, ...], bool] = {}
    for boxes in {tuple(boxes) for boxes in held.values()}:
        covered[boxes] = _covered(boxes, block)
    return {name for name, boxes in held.items() if not covered[tuple(boxes)]}


def _covered(boxes: Iterable[Box], block: int) -> bool:
    """Return True if each block of the boxes' tensor is whole in one of them."""
    blocks = Blocks.of(boxes, block)
    whole = [blocks.inside(*box) for box in boxes]
    grid = ((0,) * len(blocks.full), blocks.grid)
    return all(any(contains(box, cell) for box in whole) for cell in cells(grid, whole))


def _without(manifest: RankManifest, cut: set[str]) -> RankManifest:
    feeds: dict[str, set[str]] = {}
    for tensor in manifest.tensors:
        feeds.setdefault(module_of(tensor.name), set()).update(p.tensor for p in tensor.pieces)
    whole = whole_modules(feeds, {module for module, fed in feeds.items() if fed & cut})
    return RankManifest.of(
        manifest.rank,
        (tensor for tensor in manifest.tensors if module_of(tensor.name) not in whole),
        {*manifest.unplanned, *(tensor for module in whole for tensor in feeds[module])},
    )
