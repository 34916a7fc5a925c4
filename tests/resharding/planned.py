"""Worlds of a few slots by name, their plans, a consumer that keeps what it is given, and the ranks of a planned session."""

import datetime
import math
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mrl.config.sections.sync import SyncSection
from mrl.errors import WeightSyncError
from mrl.models.layout import Layout
from mrl.resharding.planner import engine_manifests, trainer_manifests
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import Plan, PlanOptions, build_plan
from mrl.resharding.planner.topology import Topology
from mrl.resharding.transfer.copies import DTYPES, run_copies
from mrl.resharding.transfer.proof import EngineProof
from mrl.resharding.transfer.receiver import Receiver
from mrl.resharding.transfer.sender import WeightSender
from mrl.resharding.transfer.session import Session
from mrl.resharding.transfer.slot_tables import Tables
from tests.resharding.leasing import LeasedRank
from tests.resharding.worlds import World, checkpoint, loaded

HF: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": False, "num_experts": 4,
    "moe_intermediate_size": 8, "mlp_only_layers": [],
}  # fmt: skip
SYNC = SyncSection(bucket_bytes=2048, deadline_seconds=90.0)
SHAPES = {
    "one": (Layout(), Layout()),
    "tp2-ep2": (Layout(tp=2, ep=2), Layout(tp=2)),
    "pp2": (Layout(pp=2), Layout(dp=2)),
    "tp2-pp2": (Layout(tp=2, pp=2), Layout(tp=2, dp=2)),
    "ep2-dp2": (Layout(ep=2, dp=4), Layout(tp=4)),
    "cp2-ep2": (Layout(cp=2, ep=2), Layout(dp=2)),
}


def world_of(name: str) -> World:
    train, rollout = SHAPES[name]
    held = trainer_manifests.trainer_rank_manifests(
        HF, train, dtype="bfloat16", router_dtype="float32", pad_vocab_to=8
    )
    needed = engine_manifests.engine_rank_manifests(HF, rollout, dtype="bfloat16")
    return World(
        HF,
        train,
        rollout,
        held,
        needed,
        Topology.shared(len(held)),
        PlanOptions(bucket_bytes=SYNC.bucket_bytes),
    )


def plan_of(world: World) -> Plan:
    return build_plan(world.trainers, world.engines, world.topology, world.options)


def as_torch(array: np.ndarray) -> torch.Tensor:
    return (
        torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype == np.uint16
        else torch.from_numpy(array)
    )


class Parameters:
    """A consumer that keeps the slot's parameters as flat poisoned arrays, module by module."""

    processing_seconds = 0.0

    def __init__(self, manifest: RankManifest, fail_at: int | None = None) -> None:
        self.manifest = manifest
        self.flat: list[torch.Tensor] = []
        self.aborts = 0
        self._fail_at = fail_at
        self._tables = Tables((), (), (), ())

    def start(self, tables: Tables, proof: EngineProof | None) -> None:
        self._tables, self._proof = tables, proof
        self.flat = [
            torch.full((math.prod(t.shape) * DTYPES[t.dtype].itemsize,), 0xFF, dtype=torch.uint8).view(
                DTYPES[t.dtype]
            )
            for t in tables.targets
        ]

    def apply(self, index: int, sources: Sequence[torch.Tensor], bucket: torch.Tensor) -> None:
        if index == self._fail_at:
            raise ValueError(f"window {index} broke on purpose")
        window = self._tables.windows[index]
        run_copies(window.local, sources, self.flat)
        run_copies(window.unpack, bucket, self.flat)
        if self._proof is not None:
            for target in (t for module in window.closes for t in self._tables.targets_of(module)):
                self._proof.look(self._tables.targets[target].name, self.flat[target])

    def finish(self) -> None:
        pass

    def abort(self) -> None:
        self.aborts += 1


def equal(consumer: Parameters, world: World, rank: int) -> bool:
    expected = loaded(world.engines[rank], checkpoint(world))
    return all(
        torch.equal(flat.view(torch.uint8), as_torch(array).reshape(-1).view(torch.uint8))
        for flat, array in zip(consumer.flat, expected, strict=True)
    )


def one_rank(rank: int, size: int, port: int, name: str, broken: int | None) -> list[Any]:
    """Both ends of this rank's slot; the receiver of rank `broken` raises in the middle of the first session."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if size > 1:
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=90))
    group = dist.group.WORLD if size > 1 else None
    world = world_of(name)
    plan = plan_of(world)
    receiver = Receiver(deadline_seconds=90.0, device=torch.device("cpu"))
    sender = WeightSender(receiver.address, SYNC)
    values = [as_torch(a) for a in loaded(world.trainers[rank], checkpoint(world))]
    trainer = LeasedRank(world.trainers[rank].tensors, values)
    outcome: list[str] = []
    for attempt in range(1 if broken is None else 2):
        fail_at = len(plan.windows) // 2 if attempt == 0 and rank == broken else None
        consumer = Parameters(world.engines[rank], fail_at)
        session = Session(f"{attempt:032x}", -1, 0, plan.digest)

        def take(consumer: Parameters = consumer, session: Session = session) -> None:
            try:
                receiver.receive(session, consumer)
            except (WeightSyncError, ValueError) as error:
                outcome.append(f"receiver: {error}")

        thread = threading.Thread(target=take)
        thread.start()
        try:
            trainer.send(sender, session, plan, rank, group=group)
        except WeightSyncError as error:
            outcome.append(f"sender: {error}")
        thread.join(120)
    result = [
        receiver.progress.version,
        equal(consumer, world, rank),
        outcome,
        sum(w.bucket_bytes for w in plan.part(rank).windows),
    ]
    if size > 1:
        dist.destroy_process_group()
    return result
