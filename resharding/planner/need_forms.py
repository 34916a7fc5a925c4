"""Forms in which boxes are needed: as held, cast, or quantised by the sender. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mrl.errors import WeightSyncError
from mrl.models.tensors import TensorSlice
from mrl.resharding.planner.boxes import Box
from mrl.resharding.planner.manifest import DTYPE_BYTES, WIRE_DTYPES, Replicas
from mrl.resharding.planner.quantised import VALUES, Blocks


@dataclasses.dataclass(frozen=True, slots=True)
class BoxPlace:
    """Place of a box of a checkpoint tensor: tensor `index` of the ranks of `group`."""

    group: int
    index: int
    piece: TensorSlice

    @property
    def box(self) -> Box:
        return self.piece.start, self.piece.shape


def form_of(
    tensor: str,
    holds: Sequence[BoxPlace],
    needs: Sequence[BoxPlace],
    trainers: Sequence[Replicas],
    engines: Sequence[Replicas],
    block: int,
    *,
    scales: bool,
) -> PlainForm:
    dtypes = {engines[p.group].tensors[p.index].dtype for p in needs}
    narrow = VALUES in dtypes
    if narrow and len(dtypes) > 1:
        raise WeightSyncError(
            f"{tensor}: all engine ranks must take a quantised tensor in one dtype, but they need "
            f"{sorted(dtypes)}"
        )
    wider = any(trainers[p.group].tensors[p.index].dtype != VALUES for p in holds)
    if wider and (narrow or scales):
        return QuantisedForm(tensor, holds, block, scales=scales)
    return PlainForm(tensor, holds)


class PlainForm:
    """A tensor that is needed as it is held, or cast."""

    block = 0

    def __init__(self, tensor: str, holds: Sequence[BoxPlace]) -> None:
        self.tensor = tensor
        self.boxes: list[Box] = [place.box for place in holds]
        """What each holding can give, in the need's units."""

    def check(self, box: Box) -> None:
        """Raise WeightSyncError for a need that this form cannot meet."""

    def extent(self, cell: Box) -> tuple[int, ...]:
        """Return the cell's shape in elements of the held tensor."""
        return cell[1]

    def origin(self, cell: Box, hold: int) -> tuple[int, ...]:
        """Return where a cell begins in a holding, in its elements."""
        return relative(cell[0], self.boxes[hold][0])

    def wire(self, held: str, needed: str, *, local: bool) -> int:
        """Return the wire dtype's number: the engine's dtype for local copies, else the narrower one."""
        if local or DTYPE_BYTES[needed] <= DTYPE_BYTES[held]:
            return WIRE_DTYPES.index(needed)
        return WIRE_DTYPES.index(held)


class QuantisedForm(PlainForm):
    """The values (in elements) or scales (in blocks) of a tensor that senders quantise, in whole blocks."""

    def __init__(self, tensor: str, holds: Sequence[BoxPlace], block: int, *, scales: bool) -> None:
        super().__init__(tensor, holds)
        self.block, self._scales, self._held = block, scales, self.boxes
        self._blocks = Blocks.of(self._held, block)
        inside = [self._blocks.inside(*box) for box in self._held]
        self.boxes = inside if scales else [self._blocks.elements(*box) for box in inside]

    def check(self, box: Box) -> None:
        if not self._scales and self._blocks.elements(*self._blocks.inside(*box)) != box:
            raise WeightSyncError(f"{self.tensor}: the box {box} cuts a block of {self.block} x {self.block}")

    def extent(self, cell: Box) -> tuple[int, ...]:
        return self._blocks.elements(*cell)[1] if self._scales else cell[1]

    def origin(self, cell: Box, hold: int) -> tuple[int, ...]:
        start = self._blocks.elements(*cell)[0] if self._scales else cell[0]
        return relative(start, self._held[hold][0])

    def wire(self, held: str, needed: str, *, local: bool) -> int:
        return WIRE_DTYPES.index(needed)


def relative(start: tuple[int, ...], base: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(start, base, strict=True))
