"""The gather path over real process groups: every rank's slot gets every tensor whole, or all ranks raise one error."""

import datetime
import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mrl.config.sections.sync import SyncSection
from mrl.errors import WeightSyncError
from mrl.models.tensors import CheckpointTensor, LocalTensor, Piece
from mrl.resharding.transfer import gather, gather_plan
from mrl.resharding.transfer.receiver import Receiver
from mrl.resharding.transfer.sender import WeightSender
from mrl.resharding.transfer.session import Session
from tests.ranks import run_ranks
from tests.resharding.exchanges import Shelf

SYNC = SyncSection(bucket_bytes=4096, deadline_seconds=90.0)


def world(size: int) -> tuple[list[CheckpointTensor], list[list[LocalTensor]], dict[str, torch.Tensor]]:
    """Per kind: rows split over all ranks, columns split over pairs (held twice or more), whole everywhere, on one only."""
    torch.manual_seed(0)
    shapes = {"rows": (8 * size, 33), "cols": (7, 62), "whole": (129,), "last": (3, 1111)}
    dtypes = {"rows": "float32", "cols": "bfloat16", "whole": "float32", "last": "bfloat16"}
    full = {name: torch.randn(shape).to(getattr(torch, dtypes[name])) for name, shape in shapes.items()}
    ranks: list[list[LocalTensor]] = []
    for rank in range(size):
        pieces = {
            "rows": Piece("rows", (8 * rank, 0), (8, 33), (1, 0)),
            "cols": Piece("cols", (0, 31 * (rank % 2)), (7, 31), (0, 0)),
            "whole": Piece("whole", (0,), (129,), (0,)),
        } | ({"last": Piece("last", (0, 0), (3, 1111), (0, 0))} if rank == size - 1 else {})
        locals_ = []
        for name, piece in pieces.items():
            shape = (10, 33) if name == "rows" else piece.shape  # a row of padding before and after
            locals_.append(LocalTensor(name, 0, shape, dtypes[name], (piece,)))
        ranks.append(locals_)
    return [CheckpointTensor(n, s, dtypes[n]) for n, s in shapes.items()], ranks, full


def local_values(locals_: list[LocalTensor], full: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    values = []
    for local in locals_:
        (piece,) = local.pieces
        value = torch.full(local.shape, float("nan"), dtype=getattr(torch, local.dtype))
        box = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))
        inner = tuple(slice(s, s + n) for s, n in zip(piece.local_start, piece.shape, strict=True))
        value[inner] = full[piece.tensor][box]
        values.append(value)
    return values


def one_rank(rank: int, size: int, port: int, broken: int | None) -> list[Any]:
    """Both ends of this rank's slot; `broken` is the rank whose receiver raises in the first session."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=90))
    checkpoint, ranks, full = world(size)
    plan = gather_plan.build(checkpoint, ranks, SYNC.bucket_bytes)
    receiver = Receiver(deadline_seconds=90.0, device=torch.device("cpu"))
    sender = WeightSender(receiver.address, SYNC)
    outcome: list[Any] = []
    for attempt in range(2 if broken is not None else 1):

        def fail() -> None:
            raise ValueError(f"slot {rank} broke")

        shelf = Shelf("cols", fail) if attempt == 0 and rank == broken else Shelf()
        session = Session(f"{attempt:032x}", -1, 0, plan.digest)

        def take(shelf: Shelf = shelf, session: Session = session) -> None:
            try:
                receiver.receive(session, shelf)
            except (WeightSyncError, ValueError) as error:
                outcome.append(f"receiver: {error}")

        thread = threading.Thread(target=take)
        thread.start()
        try:
            gather.send(
                [sender],
                session,
                plan,
                local_values(ranks[rank], full),
                group=dist.group.WORLD,
                device=sender.device,
                deadline_seconds=90.0,
            )
        except WeightSyncError as error:
            outcome.append(f"sender: {error}")
        thread.join(120)
    equal = all(torch.equal(shelf.tensors[name], value) for name, value in full.items())
    dist.destroy_process_group()
    return [receiver.progress.version, equal, outcome]


@pytest.mark.integration
@pytest.mark.parametrize("size", [2, 4])
def test_every_slot_gets_every_tensor(size: int) -> None:
    assert run_ranks(one_rank, size, None, seconds=240) == [[0, True, []]] * size


@pytest.mark.integration
def test_one_slots_error_is_raised_by_every_rank_and_a_resend_heals() -> None:
    for rank, (version, equal, outcome) in enumerate(run_ranks(one_rank, 2, 1, seconds=240)):
        assert (version, equal) == (0, True)
        assert sorted(o.split(":")[0] for o in outcome) == ["receiver", "sender"]
        assert all("slot 1 broke" in o for o in outcome), f"rank {rank}: {outcome}"
        assert "trainer rank 1" in next(o for o in outcome if o.startswith("sender"))
