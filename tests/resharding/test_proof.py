"""Faults between trainer parameters and engine layout are named and never committed; a resend heals."""

import dataclasses
import datetime
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.resharding.made_up import MadeUp
from benchmarks.resharding.models import TINY
from benchmarks.resharding.storage import Storage, StorageConsumer
from benchmarks.resharding.trainer import BenchTrainer
from mrl.errors import WeightSyncError
from mrl.models.layout import Layout
from mrl.models.tensors import LocalTensor
from mrl.resharding.planner import engine_manifests, quantised, trainer_manifests
from mrl.resharding.planner.cells import PlanCells, StridedRun
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import Plan, build_plan
from mrl.resharding.planner.topology import Topology
from mrl.resharding.transfer import proof as proof_module
from mrl.resharding.transfer.collectives import RankGroup
from mrl.resharding.transfer.copies import DTYPES
from mrl.resharding.transfer.lease import LentMemory
from mrl.resharding.transfer.proof import EngineProof, TrainerProof, encoded
from mrl.resharding.transfer.sender import WeightSender
from mrl.resharding.transfer.session import Session
from mrl.resharding.transfer.slot_tables import Target
from mrl.resharding.wire.digest import matrix_digests
from tests.ranks import run_ranks
from tests.resharding.simulate import execute
from tests.resharding.slots import CPU, Slot
from tests.resharding.worlds import checkpoint, loaded, random_world

BLOCKS = TINY | {"hidden_size": 256, "head_dim": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2}


class Acting(StorageConsumer):
    """Acts when half of its leased memory is read."""

    def __init__(self, storage: Storage, action: Callable[[], None]) -> None:
        super().__init__(storage)
        self._action = action

    def _read(self, table: np.ndarray, sources: Sequence[torch.Tensor]) -> None:
        super()._read(table[: len(table) // 2], sources)
        self._action()
        super()._read(table[len(table) // 2 :], sources)


def slot_of(hf: dict[str, Any], trainer: BenchTrainer | None = None, **options: Any) -> Slot:
    """Return a trainer and an engine rank, quantised if the model is wide enough."""
    manifests = quantised.manifests(
        engine_manifests.engine_rank_manifests(hf, Layout()), "fp8_block" if hf is BLOCKS else "none"
    )
    slot = Slot(trainer or BenchTrainer(hf, Layout(), 0, device=CPU), manifests, **options)
    slot.trainer.fill(0)
    return slot


@pytest.fixture(params=["plain", "quantised"])
def slot(request: pytest.FixtureRequest) -> Iterator[Slot]:
    made = slot_of(TINY if request.param == "plain" else BLOCKS)
    yield made
    made.close()


def leave_out(table: np.ndarray, row: int, other: int, width: int) -> np.ndarray:
    return np.delete(table, row)


def double(table: np.ndarray, row: int, other: int, width: int) -> np.ndarray:
    table = table.copy()
    table[row] = table[other]
    return table


def shift(table: np.ndarray, row: int, other: int, width: int) -> np.ndarray:
    """Start the copy one row of the parameter too early."""
    table = table.copy()
    table["target_offset"][row] -= width
    return table


@pytest.mark.parametrize("fault", [leave_out, double, shift])
def test_a_row_of_a_table_that_is_wrong_is_never_committed(slot: Slot, fault: Any) -> None:
    """Queries, keys and values are one parameter, so bounds and counts stay correct."""
    feeds = slot.weight_sync.receiver_feeds(RankGroup(None, 60.0, CPU))
    good, tables = feeds[0], feeds[0].tables
    (window,) = tables.windows
    target = next(n for n, t in enumerate(tables.targets) if t.name.endswith("qkv_proj.weight"))
    *others, row = np.flatnonzero(window.local["target"] == target).tolist()
    sizes = window.local[["rows", "cols"]]
    other = next(n for n in others if sizes[n] == sizes[row])
    width = tables.targets[target].shape[-1]
    wrong = dataclasses.replace(window, local=fault(window.local, row, other, width))
    feeds[0] = dataclasses.replace(good, tables=dataclasses.replace(tables, windows=(wrong,)))
    error = slot.sync(0)
    assert "differ from the trainer's parameters" in error and "_proj.weight" in error, error
    feeds[0] = good
    assert slot.sync(0) == "" and slot.outcome(0) == (True, None)


def test_leased_memory_that_changes_while_it_is_read_is_never_committed(slot: Slot) -> None:
    """Both versions are correct; a mixture is not."""
    error = slot.sync(0, Acting(slot.storage, lambda: slot.trainer.fill(1)))
    assert "differ from the trainer's parameters" in error and slot.receiver.progress.version == -1
    assert slot.sync(1) == "" and slot.outcome(1) == (True, None)


def test_a_session_that_is_full_is_never_committed_without_a_proof(slot, monkeypatch) -> None:
    """The sender reports no digests; every byte is correct."""
    finish = WeightSender.finish
    with monkeypatch.context() as silent:
        silent.setattr(WeightSender, "finish", lambda self, proof=None: finish(self))
        assert "its end message has no proof" in slot.sync(0) and slot.receiver.progress.version == -1
    assert slot.sync(0) == "" and slot.outcome(0) == (True, None)


def test_a_session_that_is_not_full_is_committed_without_a_proof() -> None:
    slot = slot_of(TINY)
    assert slot.sync(0, full=False) == "" and slot.figures["prove_seconds"] == 0
    assert slot.outcome(0) == (True, None)
    slot.close()


class Swapped(BenchTrainer):
    """Two parameters of one shape with swapped names, and the folder they were loaded from."""

    swapped = True

    def local_tensors(self) -> list[Any]:
        located = list(super().local_tensors())
        alike: dict[Any, list[int]] = {}
        for number, (tensor, _, _, _) in enumerate(located):
            alike.setdefault((tensor.shape, tensor.dtype, len(tensor.pieces)), []).append(number)
        one, other = next(numbers[:2] for numbers in alike.values() if len(numbers) > 1)
        if self.swapped:
            first, second = located[one], located[other]
            located[one], located[other] = (first[0], *second[1:]), (second[0], *first[1:])
        return located

    def loaded_boxes(self) -> Any:
        made = MadeUp(self.checkpoint, version=0)

        def read(boxes: Any) -> Iterator[tuple[int, torch.Tensor]]:
            for index, (name, (start, shape)) in enumerate(boxes):
                yield index, made.box(name, start, shape, "bfloat16")

        return read


def test_parameters_under_each_others_names_are_refused_by_the_folder_they_came_from() -> None:
    trainer = Swapped(TINY, Layout(), 0, device=CPU)
    slot = slot_of(TINY, trainer)
    session = Session.new(-1, 0, slot.weight_sync.digest)
    with pytest.raises(WeightSyncError, match=r"differ from the folder it loaded in [1-9]\d* boxes"):
        slot.weight_sync.send(session)
    assert slot.receiver.progress.version == -1
    slot.close()
    trainer = Swapped(TINY, Layout(), 0, device=CPU)
    trainer.swapped = False
    slot = slot_of(TINY, trainer)
    assert slot.sync(0) == "" and slot.outcome(0) == (True, None)
    slot.close()


def test_what_a_folder_holds_is_digested_where_the_parameters_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU and CPU digests differ; comparing them would refuse every first session."""
    plan = build_plan(
        trainer_manifests.trainer_rank_manifests(TINY, Layout()),
        engine_manifests.engine_rank_manifests(TINY, Layout()),
        Topology.shared(1),
    )
    (manifest,) = trainer_manifests.trainer_rank_manifests(TINY, Layout())
    proof = TrainerProof(PlanCells(plan), 0, manifest.tensors, [0])
    arrays = [torch.empty(math.prod(t.shape), dtype=DTYPES[t.dtype], device="meta") for t in manifest.tensors]
    devices: list[str] = []

    def digests(pieces: Any) -> list[int]:
        device_types = [matrix.device.type for matrix in pieces]
        devices.extend(device_types)
        return [7] * len(device_types)

    monkeypatch.setattr(proof_module, "matrix_digests", digests)

    def read(boxes: Any) -> Iterator[tuple[int, torch.Tensor]]:
        for index, (_, (_, shape)) in enumerate(boxes):
            yield index, torch.zeros(shape, dtype=torch.bfloat16)

    proof.require_loaded(arrays, read)
    assert set(devices) == {"meta"} and len(devices) >= 2 * len(arrays)


def test_a_plan_for_an_engine_with_two_tensors_in_each_others_place_is_never_committed() -> None:
    """The trainer's manifest differs from the engine's own loaders."""
    (right,) = engine_manifests.engine_rank_manifests(TINY, Layout())
    names = [f"model.layers.{n}.self_attn.o_proj.weight" for n in (0, 1)]
    places = dict(zip(names, reversed(names), strict=True))
    pieces = [
        [dataclasses.replace(p, tensor=places.get(p.tensor, p.tensor)) for p in tensor.pieces]
        for tensor in right.tensors
    ]
    swapped = [dataclasses.replace(t, pieces=tuple(p)) for t, p in zip(right.tensors, pieces, strict=True)]
    slot = slot_of(TINY, planned_for=[RankManifest.of(0, swapped)])
    error = slot.sync(0)
    assert "differ from the trainer's parameters" in error and all(name in error for name in names)
    slot.close()


def misplace_a_neighbours_tensor(slot: Slot, rank: int) -> Callable[[], None]:
    """Report to rank 1's receiver that a tensor of rank 0 begins one element later than it does."""
    all_gather = RankGroup.all_gather

    def shifted(self: RankGroup, value: Any) -> list[Any]:
        every = all_gather(self, value)
        if rank == 1 and isinstance(value, LentMemory):
            first, *others = every[0].tensors
            first = dataclasses.replace(first, byte_offset=first.byte_offset + 2)
            every[0] = dataclasses.replace(every[0], tensors=[first, *others])
        return every

    def mend() -> None:
        RankGroup.all_gather, slot.weight_sync._feeds = all_gather, None  # type: ignore[method-assign]

    RankGroup.all_gather = shifted  # type: ignore[method-assign]
    return mend


def pack_another_row(slot: Slot, rank: int) -> Callable[[], None]:
    """Read the first packed run one element too late."""
    pack = next(w.pack for w in slot.weight_sync.part.windows if len(w.pack))
    pack["source_offset"][0] += rank

    def mend() -> None:
        pack["source_offset"][0] -= rank

    return mend


def change_a_replica(slot: Slot, rank: int) -> Callable[[], None]:
    """Make data-parallel ranks differ; each sends to its own slot."""
    slot.trainer.fill(3 * rank)
    return lambda: slot.trainer.fill(0)


FAULTS: dict[str, tuple[Layout, int, Any]] = {
    "a neighbour's memory": (Layout(pp=2), 2, misplace_a_neighbours_tensor),
    "a packed row": (Layout(pp=2), 1, pack_another_row),
    "a replica": (Layout(dp=2), 1, change_a_replica),
}


def faulty_ranks(rank: int, size: int, port: int) -> dict[str, Any]:
    """Inject and mend each fault once, also ranks that disagree."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=90))
    manifests, results = engine_manifests.engine_rank_manifests(TINY, Layout(dp=2)), {}
    for name, (layout, slots_per_node, fault) in FAULTS.items():
        trainer = BenchTrainer(TINY, layout, rank, device=CPU)
        trainer.fill(0)
        slot = Slot(trainer, manifests, rank, slots_per_node=slots_per_node)
        mend = fault(slot, rank)
        error = slot.sync(0)
        committed = slot.receiver.progress.version
        mend()
        results[name] = (error, committed, slot.sync(0), slot.outcome(0))
        dist.barrier()
        slot.close()
    trainer = BenchTrainer(TINY, Layout(pp=2), rank, device=CPU)
    slot = Slot(trainer, manifests, rank, slots_per_node=1 + rank)
    try:
        slot.weight_sync.send(Session("0" * 32, -1, 0, "of one driver"))
    except WeightSyncError as error:
        results["nodes"] = str(error)
    slot.close()
    dist.destroy_process_group()
    return results


@pytest.mark.integration
def test_faults_between_ranks_are_never_committed_anywhere_and_a_resend_heals() -> None:
    for results in run_ranks(faulty_ranks, 2, seconds=240):
        disagreement = results.pop("nodes")
        assert "before the first byte" in disagreement
        assert "nodes is [0, 1] on ranks [0], [0, 0] on ranks [1]" in disagreement
        assert results.keys() == FAULTS.keys()
        for name, (error, committed, again, outcome) in results.items():
            assert "differ from the trainer's parameters" in error, (name, error)
            assert (committed, again, outcome) == (-1, "", (True, None)), name


@pytest.mark.parametrize(
    ("quantise", "worlds"), [(False, 20), (True, 8), pytest.param(True, 40, marks=pytest.mark.slow)]
)
def test_any_layout_is_proved_and_any_byte_changed_is_seen(quantise: bool, worlds: int) -> None:
    """In random worlds each cell has one owner, cells cover all needs, and both ends agree."""
    seen = 0
    for seed in range(worlds):
        world = random_world(seed, quantise=quantise)
        plan = build_plan(world.trainers, world.engines, world.topology, world.options)
        cells, full = PlanCells(plan), checkpoint(world)
        held = [loaded(manifest, full) for manifest in world.trainers]
        digests = np.zeros(cells.count, np.uint64)
        for manifest, arrays in zip(world.trainers, held, strict=True):
            proof = TrainerProof(cells, manifest.rank, manifest.tensors, [])
            rank_digests = proof._digests([a.reshape(-1) for a in arrays])
            assert not (rank_digests.astype(bool) & digests.astype(bool)).any()
            digests += rank_digests
        results = execute(plan, held)
        for rank, (manifest, arrays) in enumerate(zip(world.engines, results, strict=True)):
            needed = cells.needed(rank)
            engine = EngineProof(list(needed.values()), targets_of(plan, rank), manifest)
            sent = encoded(digests[list(needed)])
            assert look(engine, arrays, sent) == ""
            if needed:
                tensor = next(t for t in tensors_of_engine(plan, rank) if t.pieces)
                others = {name: array for name, array in arrays.items() if name != tensor.name}
                assert "boxes of the engine" in look(engine, others, sent)
                arrays[tensor.name].reshape(-1).view(torch.uint8)[0] ^= 1
                assert tensor.pieces[0].tensor in look(engine, arrays, sent)
                seen += 1
    assert seen > worlds


def tensors_of_engine(plan: Plan, rank: int) -> tuple[LocalTensor, ...]:
    return next(group.tensors for group in plan.engines if rank in group.ranks)


def targets_of(plan: Plan, rank: int) -> list[Target]:
    return [Target(t.name, t.dtype, t.shape) for t in tensors_of_engine(plan, rank)]


def look(engine: EngineProof, arrays: dict[str, torch.Tensor], sent: str) -> str:
    engine.start()
    for name, array in arrays.items():
        engine.digest_target(name, array.reshape(-1))
    try:
        engine.compare(sent)
    except WeightSyncError as error:
        return str(error)
    return ""


def test_cells_that_leave_a_hole_or_overlap_are_refused() -> None:
    (needed,) = engine_manifests.engine_rank_manifests(TINY, Layout())
    plan = build_plan(trainer_manifests.trainer_rank_manifests(TINY, Layout()), [needed], Topology.shared(1))
    cells = list(PlanCells(plan).needed(0).values())
    targets = targets_of(plan, 0)
    EngineProof(cells, targets, needed)
    for wrong in (cells[1:], [*cells, cells[0]]):
        with pytest.raises(WeightSyncError, match="the cells to prove do not cover 1 boxes"):
            EngineProof(wrong, targets, needed)
    module = targets[0].name.rpartition(".")[0]
    with pytest.raises(WeightSyncError, match="neither planned nor come whole"):
        EngineProof(cells, [t for t in targets if t.name.rpartition(".")[0] != module], needed)


def test_a_matrix_has_one_digest_however_its_rows_lie() -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, cols, width, at in ((3, 5, 9, 2), (700, 768, 1536, 16), (1, 1000, 1000, 0), (64, 3, 3, 7)):
        flat = torch.randn(at + rows * width, generator=generator)
        together = flat[at:].view(rows, width)[:, :cols].reshape(-1).clone()
        strided, whole = StridedRun(at, width, rows, cols), StridedRun(0, rows * cols, 1, rows * cols)
        assert matrix_digests([strided.of(flat)]) == matrix_digests([whole.of(together)])
        together[0] += 1
        assert matrix_digests([strided.of(flat)]) != matrix_digests([whole.of(together)])
