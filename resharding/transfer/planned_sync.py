"""One trainer rank's side of every weight sync: it replays a plan that is made once.

Reads the Megatron worker's description of itself and the engine ranks' manifests. Waits for its peers and its
receivers, each with sync.deadline_seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mrl.config.sections.sync import SyncSection
from mrl.errors import WeightSyncError
from mrl.models.family import Family
from mrl.models.layout import Layout
from mrl.models.tensors import LocalTensor, Spec
from mrl.resharding.planner.cells import PlanCells
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import Plan, PlanOptions, build_plan
from mrl.resharding.planner.slot_plan import SlotPart
from mrl.resharding.planner.topology import Topology
from mrl.resharding.planner.trainer_manifests import trainer_rank_manifests
from mrl.resharding.transfer.changes import SentWeights
from mrl.resharding.transfer.collectives import RankGroup
from mrl.resharding.transfer.lease import LentMemory, describe_device, describe_files, lenders_tensors
from mrl.resharding.transfer.proof import ReadBoxes, TrainerProof
from mrl.resharding.transfer.run_session import ReceiverFeed, SentSession
from mrl.resharding.transfer.sender import WeightSender
from mrl.resharding.transfer.session import Session
from mrl.resharding.transfer.slot_tables import leased_tensors, tables_of
from mrl.resharding.transfer.transports import MeshTransport, PeerTransport, Transport, bucket_messages_of
from mrl.resharding.wire.mesh_link import MeshLink, TrainerMesh
from mrl.resharding.wire.nixl_mesh import nixl
from mrl.resharding.wire.slot_link import SlotLink


class Memory(Protocol):
    """The part of a Megatron worker's parameter memory that the sync uses."""

    @property
    def buffers(self) -> Sequence[Any]: ...

    def export(self) -> list[tuple[int, int]]: ...

    def lease(self) -> int: ...

    def release(self) -> None: ...


class SyncedTrainer(Protocol):
    """The part of a Megatron worker that the sync uses."""

    family: Family
    hf_config: dict[str, Any]
    layout: Layout
    dtype: torch.dtype
    device: torch.device

    @property
    def spec(self) -> Spec:
        """Layer spec that names the parameters."""
        ...

    def local_tensors(self) -> Sequence[tuple[LocalTensor, torch.Tensor, int, int]]:
        """Return (tensor, its values, its buffer's number, its first byte there), in the manifest's order."""
        ...

    def loaded_boxes(self) -> ReadBoxes | None:
        """Return a reader of the folder the parameters were loaded from; None once they have changed."""
        ...

    @property
    def memory(self) -> Memory: ...


class PlannedSync:
    """Sends the weights by the static plan, without gathering: an engine rank reads what its slot (on CPUs:
    its node) holds from leased memory, and gets the rest in messages."""

    def __init__(
        self,
        trainer: SyncedTrainer,
        sync: SyncSection,
        addresses: Sequence[str],
        engines: Sequence[RankManifest],
        *,
        topology: Topology,
        store: str | None = None,
    ) -> None:
        """Plan the sync; every trainer rank calls it.

        Args:
            addresses: receivers' addresses, one per engine rank, in order.
            engines: manifests, one per engine rank, in order (`RolloutEngine.engine_manifests` of each
                engine).
            topology: slots and nodes of all ranks.
            store: the trainers' torch.distributed store; only a transport other than auto needs it.
        """
        self._trainer, self._sync = trainer, sync
        world = trainer.layout.world_size
        self._group = dist.group.WORLD if world > 1 else None
        self._rank = dist.get_rank() if world > 1 else 0
        self._num_receivers = len(addresses)
        self._sent = self._sent_weights()
        self._mesh = None if sync.transport == "auto" else self._mesh_through(store)
        if sync.overlap == "on" and self._mesh is None:
            raise WeightSyncError(
                "sync.overlap = on needs messages, but with sync.transport = auto engines read the trainer's "
                "memory, which takes as long as loading; set sync.overlap to auto or off"
            )
        self._in_flight: SentSession | None = None
        """The session that receivers have taken but not loaded."""
        self._senders = {
            r: WeightSender(addresses[r], sync, self._link_to(r))
            for r in range(self._rank, len(addresses), world)
        }
        """By engine rank that this rank feeds: every num_trainers-th, its own slot's if slots are shared."""
        own_tensors = [tensor for tensor, _, _, _ in trainer.local_tensors()]
        trainers = self._trainers(own_tensors)
        on_cpu = trainer.device.type == "cpu"
        self._build = functools.partial(
            build_plan,
            trainers,
            [dataclasses.replace(d, rank=rank) for rank, d in enumerate(engines)],
            topology,
        )
        self.plan = self._build(
            PlanOptions(
                bucket_bytes=sync.bucket_bytes,
                interleave_stages=not on_cpu,
                read_neighbours=on_cpu and self._mesh is None,
                read_buckets=on_cpu and self._mesh is not None,
            )
        )
        self._route = self.plan
        """The plan that the next session follows: without some engine ranks, nobody reads their buckets."""
        self._direct: Plan | None = None
        """The same plan without reading of buckets, once a session needs it."""
        _require_stored_alike(trainer, self.plan)
        self._proof = TrainerProof(PlanCells(self.plan), self._rank, own_tensors, tuple(self._senders))
        self._facts: dict[str, object] = {
            "sync": sync,
            "layout": trainer.layout,
            "dtype": trainer.dtype,
            "model": json.dumps(trainer.hf_config, sort_keys=True, default=str),
            "nodes": list(topology.nodes),
            "engine ranks' manifests": [manifest.digest[:12] for manifest in engines],
            "trainer ranks' manifests": [manifest.digest[:12] for manifest in trainers],
            "plan": self.plan.digest,
        }
        """Facts that must be equal on all ranks, by their names in errors."""
        self._compared_with_folder = False
        self._feeds: list[ReceiverFeed] | None = None
        self.received_bytes = 0
        """Bytes that this rank's receivers get from other slots per session, with alignment; 0 before the
        first."""
        self._lane: Transport | None = None
        self._absent: tuple[int, ...] = ()
        """Engine ranks that the lane skips."""

    def _mesh_through(self, store: str | None) -> TrainerMesh:
        sync = self._sync
        if store is None:
            raise WeightSyncError(
                f"sync.transport = {sync.transport} needs the address of the trainers' store, but none is "
                "given"
            )
        if sync.transport == "nixl":
            nixl()
        return TrainerMesh(
            sync.transport,
            store,
            rank=self._rank,
            num_trainers=self._trainer.layout.world_size,
            num_receivers=self._num_receivers,
            device=self._trainer.device,
            deadline_seconds=sync.deadline_seconds,
            packs=self._sent is not None,
        )

    def _sent_weights(self) -> SentWeights | None:
        """Return the copy of what was sent, if `sync.delta` wants one and the transport can use it."""
        sync, on_cpu = self._sync, self._trainer.device.type == "cpu"
        if sync.delta == "off":
            return None
        if sync.transport == "distributed" and on_cpu:
            return SentWeights(sync.delta)
        if sync.delta == "on":
            raise WeightSyncError(
                f"sync.delta = on needs messages over gloo, but sync.transport is {sync.transport} on "
                f"{self._trainer.device.type}; set sync.delta to auto or off"
            )
        return None

    def _link_to(self, receiver: int) -> SlotLink | MeshLink:
        if self._mesh is None:
            return SlotLink(self._sync.bucket_bytes, self._trainer.device)
        return MeshLink(self._mesh, receiver, self._sync.bucket_bytes)

    def _trainers(self, own_tensors: Sequence[LocalTensor]) -> list[RankManifest]:
        """Build every rank's manifest from the layout, and check this rank's against the tensors it holds."""
        trainer = self._trainer
        dtype = str(trainer.dtype).removeprefix("torch.")
        manifests = trainer_rank_manifests(trainer.hf_config, trainer.layout, dtype=dtype, spec=trainer.spec)
        if RankManifest.of(self._rank, own_tensors).digest != manifests[self._rank].digest:
            raise WeightSyncError(
                f"the tensors of trainer rank {self._rank} differ from those of its layout {trainer.layout}"
            )
        return manifests

    @property
    def part(self) -> SlotPart:
        """This rank's own part of the next session."""
        return self._route.part(self.plan.topology.trainer_slots[self._rank])

    @property
    def digest(self) -> str:
        """Digest that a session must carry; equal on all ranks."""
        return self.plan.digest

    def receiver_feeds(self, ranks: RankGroup) -> list[ReceiverFeed]:
        """Return the engine ranks that this rank feeds; the first call exchanges places of parameters."""
        if self._feeds is None:
            own_memory = ranks.run_on_all(self._lent)
            read = self.plan.options.read_neighbours
            lent = dict(enumerate(ranks.all_gather(own_memory))) if read else {self._rank: own_memory}
            self._feeds = ranks.run_on_all(lambda: [self._feed(r, lent) for r in self._senders])
            self.received_bytes = sum(map(self._received, self._feeds))
        return self._feeds

    def _lent(self) -> LentMemory:
        """Describe the memory that this rank lends in every session."""
        trainer = self._trainer
        files = describe_files(trainer.memory.export()) if trainer.device.type == "cpu" else ()
        return LentMemory(leased_tensors(trainer.local_tensors()), files)

    def _feed(self, receiver: int, lent: Mapping[int, LentMemory]) -> ReceiverFeed:
        part, parcels = self._part_of(receiver), None
        leased = lenders_tensors([lent[rank] for rank in part.lenders])
        tables = tables_of(part, leased, list(self._proof.needed[receiver].values()))
        if self._mesh is not None:
            parcels = bucket_messages_of(part, self._rank_of_slot)
        files = [file for rank in part.lenders for file in lent[rank].files]
        return ReceiverFeed(self._senders[receiver], tables, parcels, receiver, files)

    def _part_of(self, receiver: int) -> SlotPart:
        return self._route.part(self.plan.topology.engine_slots[receiver])

    @property
    def _rank_of_slot(self) -> dict[int, int]:
        return {slot: rank for rank, slot in enumerate(self.plan.topology.trainer_slots)}

    def _received(self, feed: ReceiverFeed) -> int:
        """Return the bytes that a receiver gets from other slots."""
        messages = sum(window.bucket_bytes for window in feed.tables.windows)
        return messages + feed.tables.lent_bytes(len(self._part_of(feed.receiver).trainer_tensors))

    def redial(self, addresses: Mapping[int, str]) -> None:
        """Connect to new processes in place of these engine ranks (number -> address), with equal manifests.

        The plan stays. Every trainer rank gets all addresses."""
        for receiver in addresses.keys() & self._senders.keys():
            self._senders[receiver].redial(addresses[receiver])
        if self._mesh is not None:
            self._mesh.drop()
        self._lane = None

    def send(self, session: Session, absent: Sequence[int] = ()) -> dict[str, float]:
        """Send one session under a lease of the parameter memory; all trainer ranks call it together.

        Nothing is sent to the `absent` engine ranks. Returns seconds and bytes by metric name."""
        with _leased(self._trainer.memory):
            self.send_ahead(session, absent, until_taken=False)
            return self.commit()

    def send_ahead(self, session: Session, absent: Sequence[int] = (), *, until_taken: bool = True) -> None:
        """Send one session until all receivers have taken it; `commit` ends it, another session gives it up.

        The parameters must not change before it returns."""
        trainer, before = self._trainer, self._in_flight
        if before is not None:
            before.give_up(f"{session} took its place")
            self._in_flight = None
        ranks = RankGroup(self._group, self._sync.deadline_seconds, trainer.device)
        with _leased(trainer.memory):  # before the ranks meet: a receiver may read from then on
            self._require_agreed(session, ranks, absent)
            self._leave_out(absent)
            feeds = self.receiver_feeds(ranks)
            in_flight = SentSession(
                [self._with_lease(feed) for feed in feeds if feed.receiver not in absent],
                session,
                self.part,
                [tensor.detach() for _, tensor, _, _ in trainer.local_tensors()],
                self._far(ranks),
                ranks,
                self._proof,
                mesh=self._mesh,
                reads_buckets=self._route.reads_buckets,
                sent=self._sent,
            )
            self._lane = None  # until the commit: its buckets may have messages of a failed session in flight
            in_flight.send(until_taken=until_taken)
        self._in_flight = in_flight

    def commit(self) -> dict[str, float]:
        """End the session of `send_ahead` once all receivers have loaded it; return seconds and bytes by
        metric name. All trainer ranks call it together."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            raise WeightSyncError("no session is in flight; call send_ahead first")
        figures, self._lane = in_flight.commit(), in_flight.lane
        return figures | {
            "cross_slot_bytes": float(self.received_bytes),
            "whole_bytes": float(sum(feed.tables.whole_bytes for feed in self._feeds or ())),
        }

    def _require_agreed(self, session: Session, ranks: RankGroup, absent: Sequence[int]) -> None:
        """Raise WeightSyncError on all ranks if they disagree, or differ from the folder they loaded.

        The first session with a proof compares the folder, later ones do not."""
        opened = (session, session.session_id, session.full, session.digest)
        ranks.require_equal(self._facts | {"session": opened, "absent engine ranks": list(absent)})
        if session.digest != self.digest:
            raise WeightSyncError(
                f"{session} is of another plan (digest {session.digest[:12]}, expected {self.digest[:12]})"
            )
        if session.full and not self._compared_with_folder:
            ranks.run_on_all(self._require_loaded)
            self._compared_with_folder = True

    def _require_loaded(self) -> None:
        read = self._trainer.loaded_boxes()
        if read is not None:
            arrays = [tensor.detach().reshape(-1) for _, tensor, _, _ in self._trainer.local_tensors()]
            self._proof.require_loaded(arrays, read)

    def _leave_out(self, absent: Sequence[int]) -> None:
        """Drop these engine ranks from the next session's lane and mesh."""
        if tuple(absent) != self._absent:
            self._absent, self._lane = tuple(absent), None
            if self.plan.reads_buckets:
                self._route, self._feeds = self._plan_without(absent), None
        if self._mesh is not None:
            self._mesh.keep([r for r in range(self._num_receivers) if r not in absent])
            if self._sync.overlap == "on" and self._trainer.device.type == "cpu":
                self._mesh.num_buckets = max(2, len(self.part.windows))  # GPUs keep windows on the host

    def _plan_without(self, absent: Sequence[int]) -> Plan:
        """Return the plan in which nobody depends on the absent engine ranks."""
        if absent and self._direct is None:
            self._direct = self._build(dataclasses.replace(self.plan.options, read_buckets=False))
        return self._direct if absent and self._direct is not None else self.plan

    def _with_lease(self, feed: ReceiverFeed) -> ReceiverFeed:
        """Add the lease that the receiver reads on a GPU; exported anew for each session."""
        if self._trainer.device.type != "cuda" or not self._part_of(feed.receiver).lenders:
            return feed
        buffers = [buffer.param_data for buffer in self._trainer.memory.buffers]
        return dataclasses.replace(feed, lease=describe_device(buffers))

    def _far(self, ranks: RankGroup) -> Transport | None:
        """Return the lane for what leases do not cover, made in the first session; None if they cover all."""
        topology = self.plan.topology
        if self.plan.options.read_neighbours and len(set(topology.nodes)) == 1:
            return None
        if self._lane is not None:
            return self._lane
        if self._mesh is None:
            self._lane = PeerTransport(ranks, self.part, self._rank_of_slot)
        else:
            receivers = {s: r for r, s in enumerate(topology.engine_slots) if r not in self._absent}
            places = ranks.run_on_all(lambda: self._places(ranks))
            self._lane = MeshTransport(self._mesh, self.part, receivers, places, self._sent)
        return self._lane

    def _places(self, ranks: RankGroup) -> list[dict[int, int]]:
        """Return, per window, slot -> offset of this rank's message in that slot's receive bucket.

        The ranks that feed the slots send the offsets to all others."""
        offsets = {
            part.slot: [{r.peer: r.offset for r in window.receives} for window in part.windows]
            for part in map(self._part_of, self._senders)
        }
        own_slot, places = self.part.slot, [{} for _ in self.part.windows]
        for slot, of_slot in (item for by_slot in ranks.all_gather(offsets) for item in by_slot.items()):
            for window, senders in zip(places, of_slot, strict=True):
                if own_slot in senders:
                    window[slot] = senders[own_slot]
        return places

    def close(self) -> None:
        """Free the buffers; the receivers must have released them."""
        for sender in self._senders.values():
            sender.close()
        if self._mesh is not None:
            self._mesh.drop()


def _require_stored_alike(trainer: SyncedTrainer, plan: Plan) -> None:
    """Raise WeightSyncError if a tensor that must come whole is stored transposed in the checkpoint."""
    tensors = trainer.family.checkpoint_tensors(trainer.hf_config)
    if stacked := [t.name for t in tensors if t.stack and t.name in plan.whole_tensors]:
        raise WeightSyncError(
            f"{stacked[:3]} ({len(stacked)} tensors) must come whole, because the engine's loaders do "
            "more than copy boxes of them or a quantised block is split over trainer ranks; but the "
            "checkpoint stores them transposed, which only a plan by boxes supports"
        )


@contextlib.contextmanager
def _leased(memory: Memory) -> Iterator[None]:
    """Keep the parameters where they are; leases may be nested."""
    memory.lease()
    try:
        yield
    finally:
        memory.release()
