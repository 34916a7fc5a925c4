"""The plan of a weight sync between the ranks of any process group: tensors cut in one stated way become the same
tensors cut in another, for a trainer of one's own.

Consumes: tensors that ranks hold, each a box of a whole tensor, by name. Produces: those boxes that ranks need, in
their own memory. Waits for: the peers' messages of each window, with a deadline. Unblocked by: the agreement before
each window, so that one rank's failure is raised by all.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping

import torch
import torch.distributed as dist

from mrl.errors import WeightSyncError
from mrl.models.tensors import SCALES, LocalTensor, Piece
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import Plan, PlanOptions, build_plan
from mrl.resharding.planner.slot_plan import WindowPart
from mrl.resharding.planner.topology import Topology
from mrl.resharding.transfer.collectives import Ranks
from mrl.resharding.transfer.copies import run
from mrl.resharding.transfer.planned import PeerLane

Boxes = Mapping[str, tuple[torch.Tensor, tuple[int, ...]]]
"""Name of a whole tensor -> (this rank's part of it, where that part begins, in each dimension)."""


class TensorSync:
    """Moves what ranks hold to where ranks need it: planned once, then run after every update.

    A rank may hold, and need, a part of a tensor, all or nothing of it; of replicas the nearest is read.
    Every byte that a rank needs and does not hold crosses once, in messages of at most `bucket_bytes` for a window and a
    rank, and every needed element is written exactly once. Dtypes may differ: what is needed has the last word.
    """

    def __init__(
        self,
        held: Boxes,
        needed: Boxes,
        group: dist.ProcessGroup | None = None,
        *,
        bucket_bytes: int = 256 << 20,
        deadline_seconds: float = 600.0,
    ) -> None:
        """Every rank of `group` (by default all) makes one at the same time.

        The tensors are contiguous and stay where they are; those in `held` are read and those in `needed` written by each
        `run`. Raises WeightSyncError, on all ranks, where the two sides do not have the same tensors in the same whole
        shapes, where an element is needed by nobody or held by nobody, and for a tensor of more than two dimensions that
        is cut along another one than the first.
        """
        group = group or dist.group.WORLD
        assert group is not None, "torch.distributed.init_process_group comes first"
        device = next(
            (tensor.device for tensor, _ in (*held.values(), *needed.values())), torch.device("cpu")
        )
        self._ranks = Ranks(group, deadline_seconds, device)
        self._held, self._needed = self._ranks.together(lambda: (_flat(held), _flat(needed)))
        self.plan = _plan(held, needed, group, bucket_bytes)
        """What moves where, for all ranks; `plan.summary()` counts the bytes."""
        self._part = self.plan.part(self._ranks.rank)
        rank_of_slot = {rank: rank for rank in range(self._ranks.size)}
        self._lane = PeerLane(self._ranks, self._part, rank_of_slot)
        size = self._part.receive_bucket_bytes
        self._received = torch.empty(size, dtype=torch.uint8, device=device)

    def run(self) -> None:
        """Fills `needed` from what the ranks hold now; every rank calls it. Raises WeightSyncError on all ranks where one
        of them fails or is not there by the deadline; `needed` is then part old, part new."""
        for turn, window in enumerate(self._part.windows):
            self._ranks.together(lambda turn=turn, window=window: self._pack(turn, window))
            self._lane.start(turn, window, self._received)
            run(window.local, self._held, self._needed)
            self._lane.finish(turn)
            run(window.unpack, self._received, self._needed)
        self._ranks.together(lambda: None)

    def _pack(self, turn: int, window: WindowPart) -> None:
        run(window.pack, self._held, self._lane.bucket(turn))


def _plan(held: Boxes, needed: Boxes, group: dist.ProcessGroup, bucket_bytes: int) -> Plan:
    """The same on every rank, from what all of them say."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    own = _manifest(rank, held), _manifest(rank, needed), socket.gethostname()
    every: list[tuple[RankManifest, RankManifest, str]] = [own] * size
    dist.all_gather_object(every, own, group=group)
    sources, targets, hosts = zip(*every, strict=True)
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    topology = Topology.on([numbers[host] for host in hosts])
    return build_plan(sources, targets, topology, PlanOptions(bucket_bytes=bucket_bytes))


def _manifest(rank: int, boxes: Boxes) -> RankManifest:
    return RankManifest.of(rank, [_box(name, *box) for name, box in boxes.items()])


def _box(name: str, tensor: torch.Tensor, start: tuple[int, ...]) -> LocalTensor:
    """The planner cuts matrices: of a tensor of more dimensions a row is all that one index of the first has, and its
    shape is part of the name, so that others of that size are not taken for it."""
    shape, start = tuple(tensor.shape) or (1,), tuple(start) or (0,)
    if len(shape) > 2:
        name = f"{name} [rows, {', '.join(map(str, shape[1:]))}]"
        shape, start = (shape[0], math.prod(shape[1:])), (start[0], 0)
    piece = Piece(name, start, shape, (0,) * len(shape))
    return LocalTensor(name, 0, shape, str(tensor.dtype).removeprefix("torch."), (piece,))


def _flat(boxes: Boxes) -> list[torch.Tensor]:
    """The tensors' memory, in order."""
    for name, (tensor, start) in boxes.items():
        if name.endswith(SCALES):
            raise WeightSyncError(
                f"{name}: names that end in {SCALES} are kept for the scales of float8 engines"
            )
        if not tensor.is_contiguous():
            raise WeightSyncError(f"{name}: a tensor that is moved in place has to be contiguous")
        if len(start) != tensor.ndim:
            raise WeightSyncError(f"{name}: begins at {start}, but has {tensor.ndim} dimensions")
        if any(start[1:]) and tensor.ndim > 2:
            raise WeightSyncError(
                f"{name}: of {tensor.ndim} dimensions only the first may be cut; begins at {start}"
            )
    return [tensor.detach().view(-1) for tensor, _ in boxes.values()]
