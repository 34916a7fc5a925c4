"""Which checkpoint tensors an engine with block-quantised weights takes in another form, and where their
blocks lie. Pure.

Such an engine has two parameters for one checkpoint tensor: float8 values under its name, and float32 scales,
one for each square block of it, under the name with `_scale_inv` (DeepSeek-V3's own checkpoint form). An
engine manifest shows both, so the planner needs no option: float8 needed and something wider held means
quantise. Blocks are counted from the checkpoint tensor's first element; those at its ends may be smaller. The
arithmetic is `fp8`'s.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from mrl.errors import WeightSyncError
from mrl.models.tensors import BLOCK, SCALES, CheckpointTensor, LocalTensor, Piece
from mrl.resharding.planner.boxes import Box, cells, contains, full_shape
from mrl.resharding.planner.manifest import RankManifest, module_of, whole_modules

VALUES = "float8_e4m3fn"
_LINEAR = re.compile(r"(_proj|_proj_with_mqa|\.w[123])\.weight$")


def quantises(name: str) -> bool:
    """Projections of attention, dense layers and experts; not embeddings, norms, routers and the output
    layer."""
    return _LINEAR.search(name) is not None


def checkpoint(tensors: Iterable[CheckpointTensor], block: int = BLOCK) -> list[CheckpointTensor]:
    """The checkpoint as the engine sees it: quantised tensors as values and scales. `block` 0: as it is."""
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
    """`quantization_config` of a Hugging Face config with exactly these tensors quantised (routers are named
    because vLLM makes linear layers of some)."""
    routers = [f"model.layers.{n}.{m}.gate" for n in range(num_layers) for m in ("mlp", "block_sparse_moe")]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", *routers],
    }


def quantised_manifest(wide: RankManifest, block: int = BLOCK) -> RankManifest:
    """An engine rank's manifest with quantised weights, from the one without. WeightSyncError where it cuts
    inside a block."""
    result: list[LocalTensor] = []
    for _, module in itertools.groupby(wide.tensors, key=lambda t: module_of(t.name)):
        tensors = list(module)
        chosen = [t for t in tensors if t.pieces and all(quantises(p.tensor) for p in t.pieces)]
        result += [dataclasses.replace(t, dtype=VALUES) if t in chosen else t for t in tensors]
        result += [_scales_of(t, block) for t in chosen]
    return RankManifest.of(wide.rank, result, wide.unplanned)


def manifests(wide: Sequence[RankManifest], quantization: str) -> list[RankManifest]:
    """Engine ranks' manifests in the form that `rollout.quantization` names."""
    return list(wide) if quantization == "none" else [quantised_manifest(rank) for rank in wide]


def _scales_of(tensor: LocalTensor, block: int) -> LocalTensor:
    pieces = []
    for piece in tensor.pieces:
        outer, local = piece.local_start[:-2], piece.local_start[-2:]
        if any(at % block for at in (*piece.start, *local)):
            raise WeightSyncError(
                f"{tensor.name}: the engine's box of {piece.tensor} at {piece.start} does not begin on a block of {block}"
            )
        start = tuple(at // block for at in piece.start)
        shape = tuple(-(-size // block) for size in piece.shape)
        pieces.append(Piece(piece.tensor + SCALES, start, shape, (*outer, *(at // block for at in local))))
    shape = (*tensor.shape[:-2], *(-(-size // block) for size in tensor.shape[-2:]))
    return LocalTensor(tensor.name + SCALES, tensor.chunk, shape, "float32", tuple(pieces))


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """The square blocks of one checkpoint tensor."""

    full: tuple[int, ...]
    """The tensor's shape."""
    edge: int

    @classmethod
    def of(cls, boxes: Iterable[Box], edge: int) -> Blocks:
        """The blocks of the tensor that the boxes make up."""
        return cls(full_shape(boxes), edge)

    @property
    def grid(self) -> tuple[int, ...]:
        """Blocks along each dimension."""
        return tuple(-(-size // self.edge) for size in self.full)

    def inside(self, start: Sequence[int], shape: Sequence[int]) -> Box:
        """The whole blocks of a box, in blocks; of size 0 where there are none.

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
        """A box of blocks in elements."""
        ends = (a + n for a, n in zip(start, shape, strict=True))
        low, high = (
            tuple(min(at * self.edge, whole) for at, whole in zip(side, self.full, strict=True))
            for side in (start, ends)
        )
        return low, tuple(h - a for a, h in zip(low, high, strict=True))


# Tensors that trainer ranks cut inside a block leave the plan, module by module, and are quantised where they
# arrive: ranks that hold a part of a block each would have to agree on its scale before anyone could send.


def leave_whole(
    trainers: Sequence[RankManifest], engines: Sequence[RankManifest], block: int
) -> list[RankManifest]:
    """The engine manifests without the modules that need a block which no trainer rank holds whole:
    `unplanned` names what feeds them. Without quantised tensors, the engine manifests as they are."""
    if not any(t.dtype == VALUES for d in engines for t in d.tensors):
        return list(engines)
    cut = cut_inside_blocks(trainers, block)
    reduced: dict[str, RankManifest] = {}
    for engine in engines:
        if engine.digest not in reduced:
            reduced[engine.digest] = _without(engine, cut)
    return [dataclasses.replace(reduced[d.digest], rank=d.rank) for d in engines]


def cut_inside_blocks(trainers: Sequence[RankManifest], block: int) -> set[str]:
    """Names of the tensors with a block that no rank holds whole."""
    held: dict[str, dict[Box, None]] = {}
    for manifest in {trainer.digest: trainer for trainer in trainers}.values():
        for piece in (p for tensor in manifest.tensors for p in tensor.pieces if quantises(p.tensor)):
            held.setdefault(piece.tensor, {})[piece.start, piece.shape] = None
    covered: dict[tuple[Box, ...], bool] = {}
    for boxes in {tuple(boxes) for boxes in held.values()}:
        covered[boxes] = _covered(boxes, block)
    return {name for name, boxes in held.items() if not covered[tuple(boxes)]}


def _covered(boxes: Iterable[Box], block: int) -> bool:
    """Whether each block of the tensor that the boxes make up lies whole in one of them."""
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
