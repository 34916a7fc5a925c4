"""One trainer rank's side of every weight sync, by a plan that is made once and replayed.

Consumes: the Megatron worker's description of itself, the engine ranks' manifests. Produces: sessions sent. Waits for:
peers and its receivers, each with sync.deadline_seconds.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
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
from mrl.resharding.planner.plan import PlanOptions, build_plan
from mrl.resharding.planner.slot_plan import SlotPart
from mrl.resharding.planner.topology import Topology
from mrl.resharding.planner.trainer_manifests import trainer_rank_manifests
from mrl.resharding.transfer.collectives import RankGroup
from mrl.resharding.transfer.lanes import Lane, MeshLane, PeerLane, parcels_of
from mrl.resharding.transfer.lease import Lent, describe_device, describe_files, of_lenders
from mrl.resharding.transfer.proof import ReadBoxes, TrainerProof
from mrl.resharding.transfer.run_session import Feed, run_session
from mrl.resharding.transfer.sender import WeightSender
from mrl.resharding.transfer.session import Session
from mrl.resharding.transfer.slot_tables import leased_tensors, of_part
from mrl.resharding.wire.mesh_link import MeshLink, TrainerMesh
from mrl.resharding.wire.nixl_mesh import nixl
from mrl.resharding.wire.slot_link import SlotLink


class Memory(Protocol):
    """What is read of a Megatron worker's parameter memory."""

    @property
    def buffers(self) -> Sequence[Any]: ...

    def export(self) -> list[tuple[int, int]]: ...

    def lease(self) -> int: ...

    def release(self) -> None: ...


class SyncedTrainer(Protocol):
    """What is read of a Megatron worker."""

    family: Family
    hf_config: dict[str, Any]
    layout: Layout
    dtype: torch.dtype
    device: torch.device

    @property
    def spec(self) -> Spec:
        """Whose layers name the parameters."""
        ...

    def local_tensors(self) -> Sequence[tuple[LocalTensor, torch.Tensor, int, int]]:
        """(tensor, its values, its buffer's number, its first byte there), in the manifest's order."""
        ...

    def loaded_boxes(self) -> ReadBoxes | None:
        """Reads the folder whose weights the parameters are; None once they were changed."""
        ...

    @property
    def memory(self) -> Memory: ...


class PlannedSync:
    """Follows the static plan: nobody gathers; an engine rank reads what its slot holds, and on CPUs what its node
    holds, from leased memory, and gets the rest in messages."""

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
        """`addresses`, `engines`: of every engine rank in order (`RolloutEngine.engine_manifests` of each
        engine). `topology`: where all of them are. `store`: the trainers' torch.distributed store (distributed
        transport)."""
        self._trainer, self._sync = trainer, sync
        world = trainer.layout.world_size
        self._group = dist.group.WORLD if world > 1 else None
        self._rank = dist.get_rank() if world > 1 else 0
        self._num_receivers = len(addresses)
        self._mesh = None if sync.transport == "auto" else self._mesh_through(store)
        self._senders = {
            r: WeightSender(addresses[r], sync, self._link_to(r))
            for r in range(self._rank, len(addresses), world)
        }
        """Of the engine ranks that this rank feeds: every num_trainers-th, and so its slot's if slots are
        shared."""
        own = [tensor for tensor, _, _, _ in trainer.local_tensors()]
        trainers = self._trainers(own)
        self.plan = build_plan(
            trainers,
            [dataclasses.replace(d, rank=rank) for rank, d in enumerate(engines)],
            topology,
            PlanOptions(
                bucket_bytes=sync.bucket_bytes,
                interleave_stages=trainer.device.type == "cuda",
                read_neighbours=trainer.device.type == "cpu" and self._mesh is None,
            ),
        )
        self.part = self.plan.part(topology.trainer_slots[self._rank])
        self._require_stored_alike()
        self._proof = TrainerProof(PlanCells(self.plan), self._rank, own, tuple(self._senders))
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
        """What must be the same on all ranks, by the words that an error names it with."""
        self._compared_with_folder = False
        self._feeds: list[Feed] | None = None
        self.received_bytes = 0
        """What reaches this rank's receivers from other slots in one session, messages' alignment included; known from
        the first session on."""
        self._lane: Lane | None = None
        self._absent: tuple[int, ...] = ()
        """Engine ranks that the lane has nothing for."""

    def _mesh_through(self, store: str | None) -> TrainerMesh:
        sync = self._sync
        if store is None:
            raise WeightSyncError(
                f"sync.transport = {sync.transport} needs the address of the trainers' store"
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
        )

    def _link_to(self, receiver: int) -> SlotLink | MeshLink:
        if self._mesh is None:
            return SlotLink(self._sync.bucket_bytes, self._trainer.device)
        return MeshLink(self._mesh, receiver, self._sync.bucket_bytes)

    def _trainers(self, own: Sequence[LocalTensor]) -> list[RankManifest]:
        """Every rank's manifest from the layout; this rank's must be what it really holds."""
        trainer = self._trainer
        dtype = str(trainer.dtype).removeprefix("torch.")
        manifests = trainer_rank_manifests(trainer.hf_config, trainer.layout, dtype=dtype, spec=trainer.spec)
        if RankManifest.of(self._rank, own).digest != manifests[self._rank].digest:
            raise WeightSyncError(
                f"trainer rank {self._rank} holds other tensors than its layout {trainer.layout} says"
            )
        return manifests

    def _require_stored_alike(self) -> None:
        """WeightSyncError for a tensor that must come whole and that engines read in another form than trainers hold."""
        trainer, whole = self._trainer, self.plan.whole_tensors
        tensors = trainer.family.checkpoint_tensors(trainer.hf_config)
        if stacked := [t.name for t in tensors if t.stack and t.name in whole]:
            raise WeightSyncError(
                f"{stacked[:3]} ({len(stacked)} tensors) must come whole, because the engine's loaders do more than copy "
                "boxes of them or a quantised block lies on several trainer ranks. They lie transposed in the folder, "
                "which only a plan by boxes can follow"
            )

    @property
    def digest(self) -> str:
        """What a session must carry; equal on all ranks."""
        return self.plan.digest

    def feeds(self, ranks: RankGroup) -> list[Feed]:
        """The engine ranks that this rank feeds; in the first session the ranks tell each other where their parameters
        lie."""
        if self._feeds is None:
            own = ranks.together(self._lent)
            read = self.plan.options.read_neighbours
            lent = dict(enumerate(ranks.told(own))) if read else {self._rank: own}
            self._feeds = ranks.together(lambda: [self._feed(r, lent) for r in self._senders])
            self.received_bytes = sum(map(self._received, self._feeds))
        return self._feeds

    def _lent(self) -> Lent:
        """What this rank lends in every session."""
        trainer = self._trainer
        files = describe_files(trainer.memory.export()) if trainer.device.type == "cpu" else ()
        return Lent(leased_tensors(trainer.local_tensors()), files)

    def _feed(self, receiver: int, lent: Mapping[int, Lent]) -> Feed:
        part, parcels = self._part_of(receiver), None
        leased = of_lenders([lent[rank] for rank in part.lenders])
        tables = of_part(part, leased, list(self._proof.needed[receiver].values()))
        if self._mesh is not None:
            parcels = parcels_of(part, self._rank_of_slot)
        files = [file for rank in part.lenders for file in lent[rank].files]
        return Feed(self._senders[receiver], tables, parcels, receiver, files)

    def _part_of(self, receiver: int) -> SlotPart:
        return self.plan.part(self.plan.topology.engine_slots[receiver])

    @property
    def _rank_of_slot(self) -> dict[int, int]:
        return {slot: rank for rank, slot in enumerate(self.plan.topology.trainer_slots)}

    def _received(self, feed: Feed) -> int:
        """Bytes from other slots."""
        messages = sum(window.bucket_bytes for window in feed.tables.windows)
        return messages + feed.tables.lent_bytes(len(self._part_of(feed.receiver).trainer_tensors))

    def redial(self, addresses: Mapping[int, str]) -> None:
        """Other processes have taken the places of these engine ranks, by number, with the same manifests:
        the plan stays. Every trainer rank is told of all."""
        for receiver in addresses.keys() & self._senders.keys():
            self._senders[receiver].redial(addresses[receiver])
        if self._mesh is not None:
            self._mesh.drop()
        self._lane = None

    def send(self, session: Session, absent: Sequence[int] = ()) -> dict[str, float]:
        """Sends one session under a lease of the parameter memory, not to the `absent` engine ranks; all trainer ranks
        call it together."""
        trainer = self._trainer
        ranks = RankGroup(self._group, self._sync.deadline_seconds, trainer.device)
        trainer.memory.lease()  # before all have met: some receiver may read from then on
        try:
            self._require_agreed(session, ranks, absent)
            self._leave_out(absent)
            feeds = self.feeds(ranks)
            figures = run_session(
                [self._leased(feed) for feed in feeds if feed.receiver not in absent],
                session,
                self.part,
                [tensor.detach() for _, tensor, _, _ in trainer.local_tensors()],
                self._far(ranks),
                ranks,
                self._proof,
                mesh=self._mesh,
            )
        except BaseException:
            self._lane = None  # messages of the failed session may still be under way in its buckets
            raise
        finally:
            trainer.memory.release()
        return figures | {
            "cross_slot_bytes": float(self.received_bytes),
            "whole_bytes": float(sum(feed.tables.whole_bytes for feed in feeds)),
        }

    def _require_agreed(self, session: Session, ranks: RankGroup, absent: Sequence[int]) -> None:
        """WeightSyncError on all ranks where they disagree about anything, or hold other weights than the
        folder they loaded (asked once, in the first session that is proved)."""
        opened = (session, session.session_id, session.full, session.digest)
        ranks.agree(self._facts | {"session": opened, "absent engine ranks": list(absent)})
        if session.digest != self.digest:
            raise WeightSyncError(
                f"{session} was made for another plan (digest {session.digest[:12]}, here {self.digest[:12]})"
            )
        if session.full and not self._compared_with_folder:
            ranks.together(self._require_loaded)
            self._compared_with_folder = True

    def _require_loaded(self) -> None:
        read = self._trainer.loaded_boxes()
        if read is not None:
            arrays = [tensor.detach().reshape(-1) for _, tensor, _, _ in self._trainer.local_tensors()]
            self._proof.require_loaded(arrays, read)

    def _leave_out(self, absent: Sequence[int]) -> None:
        """The lane and the mesh of the next session are without these engine ranks."""
        if tuple(absent) != self._absent:
            self._absent, self._lane = tuple(absent), None
        if self._mesh is not None:
            self._mesh.keep([r for r in range(self._num_receivers) if r not in absent])

    def _leased(self, feed: Feed) -> Feed:
        """With what its receiver reads in this session."""
        if self._trainer.device.type != "cuda" or not self._part_of(feed.receiver).lenders:
            return feed
        buffers = [buffer.param_data for buffer in self._trainer.memory.buffers]
        return dataclasses.replace(feed, lease=describe_device(buffers))

    def _far(self, ranks: RankGroup) -> Lane | None:
        """The lane beyond what is read, with its buckets, made in the first session; None where everything is read."""
        topology = self.plan.topology
        if self.plan.options.read_neighbours and len(set(topology.nodes)) == 1:
            return None
        if self._lane is not None:
            return self._lane
        if self._mesh is None:
            self._lane = PeerLane(ranks, self.part, self._rank_of_slot)
        else:
            receivers = {s: r for r, s in enumerate(topology.engine_slots) if r not in self._absent}
            places = ranks.together(lambda: self._places(ranks))
            self._lane = MeshLane(self._mesh, self.part, receivers, places)
        return self._lane

    def _places(self, ranks: RankGroup) -> list[dict[int, int]]:
        """By window, slot -> where this rank's message begins in its receive bucket: what the ranks that feed the
        slots tell all others."""
        offsets = {
            part.slot: [{r.peer: r.offset for r in window.receives} for window in part.windows]
            for part in map(self._part_of, self._senders)
        }
        own, places = self.part.slot, [{} for _ in self.part.windows]
        for slot, of_slot in (said for every in ranks.told(offsets) for said in every.items()):
            for window, senders in zip(places, of_slot, strict=True):
                if own in senders:
                    window[slot] = senders[own]
        return places

    def close(self) -> None:
        """Frees the buffers; the receivers must have released them."""
        for sender in self._senders.values():
            sender.close()
        if self._mesh is not None:
            self._mesh.drop()
