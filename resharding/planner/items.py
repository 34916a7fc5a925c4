"""Items of a plan: the checkpoint tensors that engine ranks need, in classes with one pattern each. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from mrl.errors import WeightSyncError
from mrl.models.tensors import SCALES
from mrl.resharding.planner.manifest import Replicas
from mrl.resharding.planner.need_forms import BoxPlace, form_of
from mrl.resharding.planner.pool_transfers import PoolShares
from mrl.resharding.planner.tensor_class import Sides, TensorClass
from mrl.resharding.planner.topology import Topology
from mrl.resharding.planner.transfers import Item, Pattern


def places_of(groups: Sequence[Replicas]) -> dict[str, list[BoxPlace]]:
    """Return every box of every checkpoint tensor, by tensor, in order of group and tensor."""
    places: dict[str, list[BoxPlace]] = {}
    for number, group in enumerate(groups):
        for index, tensor in enumerate(group.tensors):
            for piece in tensor.pieces:
                places.setdefault(piece.tensor, []).append(BoxPlace(number, index, piece))
    return places


@dataclasses.dataclass(slots=True)
class _Members:
    """A class of tensors: its number of members so far; and its pattern, if that needs no shares."""

    tensors: TensorClass | None
    pattern: Pattern | None
    count: int = 0


def items(
    trainers: Sequence[Replicas],
    engines: Sequence[Replicas],
    topology: Topology,
    *,
    block: int,
    read_buckets: bool = False,
    cut_bytes: int = 0,
) -> list[Item]:
    """Return an item per needed checkpoint tensor, in order of first need.

    Args:
        block: edge of the blocks of tensors that are needed quantised and held wider.
        read_buckets: see `PlanOptions`.
        cut_bytes: see `PlanOptions`.

    Raises:
        WeightSyncError: no trainer rank holds some of the boxes, which it names.
    """
    held, needed = places_of(trainers), places_of(engines)
    sides = Sides.of(trainers, engines, topology, read_buckets=read_buckets, cut_bytes=cut_bytes)
    classes: dict[tuple, _Members] = {}
    listed: list[tuple[str, list[BoxPlace], list[BoxPlace], _Members, int]] = []
    missing = []
    for tensor, needs in needed.items():
        scales = tensor.endswith(SCALES) and tensor not in held
        holds = held.get(tensor.removesuffix(SCALES) if scales else tensor, [])
        key = (scales, _key(holds, trainers), _key(needs, engines))
        if key not in classes:
            try:
                form = form_of(tensor, holds, needs, trainers, engines, block, scales=scales)
                tensors = TensorClass(holds, needs, sides, form)
                is_near = not tensors.far_cells
                pattern = tensors.pattern(PoolShares([])) if is_near else None
                classes[key] = _Members(None if is_near else tensors, pattern)
            except WeightSyncError as error:
                missing.append(str(error))
                continue
        members = classes[key]
        listed.append((tensor, holds, needs, members, members.count))
        members.count += 1
    if missing:
        raise WeightSyncError(
            f"no trainer rank holds {len(missing)} tensors or boxes that the rollout needs: "
            + "; ".join(missing[:20])
        )
    shares = PoolShares([(c.tensors.far_cells, c.count) for c in classes.values() if c.tensors])
    for members in classes.values():
        if members.tensors:
            members.pattern = members.tensors.pattern(shares)
    result = []
    for tensor, holds, needs, members, number in listed:
        assert members.pattern is not None
        ordinal = number % members.pattern.period
        result.append(Item(tensor, tuple(holds), tuple(needs), members.pattern, ordinal))
    return result


def _key(places: Iterable[BoxPlace], groups: Sequence[Replicas]) -> tuple:
    return tuple(
        (p.group, p.piece.start, p.piece.shape, groups[p.group].tensors[p.index].dtype) for p in places
    )
