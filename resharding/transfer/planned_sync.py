"""One trainer rank's side of every weight sync, by a plan that is made once and replayed.

Consumes: the Megatron worker's description of itself, the engine ranks' manifests. Produces: sessions sent. Waits for:
peers and its receivers, each with sync.deadline_seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from mrl.config.sections.sync import SyncSection
from mrl.errors import WeightSyncError
from mrl.models.tensors import LocalTensor
from mrl.resharding.planner.cells import PlanCells
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import PlanOptions, build_plan
from mrl.resharding.planner.slot_plan import SlotPart
from mrl.resharding.planner.topology import Topology
from mrl.resharding.transfer import planned
from mrl.resharding.transfer.collectives import RankGroup
from mrl.resharding.transfer.lease import Lent, describe_device, of_lenders
from mrl.resharding.transfer.planned import Lane, MeshLane, PeerLane, parcels_of
from mrl.resharding.transfer.proof import TrainerProof
from mrl.resharding.transfer.run_session import Feed
from mrl.resharding.transfer.session import Session
from mrl.resharding.transfer.slot_tables import LeasedTensor, Tables, of_part
from mrl.resharding.transfer.timeline import Timeline
from mrl.resharding.transfer.trainer import (
    Start,
    SyncedTrainer,
    endpoints_of,
    group_of,
    lent_by,
    manifests_of,
    reads_neighbours,
)


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
        self._rank = dist.get_rank() if trainer.layout.world_size > 1 else 0
        self._endpoints = endpoints_of(trainer, sync, addresses, store)
        located = trainer.local_tensors()
        trainers = self._trainers([tensor for tensor, _, _, _ in located])
        self.plan = build_plan(
            trainers,
            [dataclasses.replace(d, rank=rank) for rank, d in enumerate(engines)],
            topology,
            PlanOptions(
                bucket_bytes=sync.bucket_bytes,
                interleave_stages=trainer.device.type == "cuda",
                read_neighbours=reads_neighbours(trainer, self._endpoints),
            ),
        )
        self.part = self.plan.part(self.plan.topology.trainer_slots[self._rank])
        self._require_stored_alike()
        own = [tensor for tensor, _, _, _ in located]
        self._proof = TrainerProof(PlanCells(self.plan), self._rank, own, self._endpoints.receivers)
        digests = [manifest.digest[:12] for manifest in engines]
        facts = {"nodes": list(topology.nodes), "engine ranks' manifests": digests}
        facts |= {"trainer ranks' manifests": [manifest.digest[:12] for manifest in trainers]}
        self._start = Start(trainer, sync, facts | {"plan": self.plan.digest})
        self._feeds: list[Feed] | None = None
        self.received_bytes = 0
        """What reaches this rank's receivers from other slots in one session, messages' alignment included; known from
        the first session on."""
        self.timeline = Timeline()
        """Of the last session."""
        self._lane: Lane | None = None
        self._digests = sync.verify != "off"
        self._absent: tuple[int, ...] = ()
        """Engine ranks that the lane has nothing for."""

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

    def feeds(self, ranks: RankGroup) -> list[Feed]:
        """The engine ranks that this rank feeds; in the first session the ranks tell each other where their parameters
        lie."""
        if self._feeds is None:
            own = ranks.together(lambda: lent_by(self._trainer))
            read = self.plan.options.read_neighbours
            lent = dict(enumerate(ranks.told(own))) if read else {self._rank: own}
            self._feeds = ranks.together(lambda: self._feeds_from(lent))
            self.received_bytes = sum(map(self._received, self._feeds))
        return self._feeds

    def _feeds_from(self, lent: Mapping[int, Lent]) -> list[Feed]:
        rank_of_slot = {slot: rank for rank, slot in enumerate(self.plan.topology.trainer_slots)}
        feeds = []
        for receiver, sender in zip(self._endpoints.receivers, self._endpoints.senders, strict=True):
            part = self.plan.part(self.plan.topology.engine_slots[receiver])
            tables = self._tables(part, of_lenders([lent[rank] for rank in part.lenders]), receiver)
            parcels = None if self._endpoints.mesh is None else parcels_of(part, rank_of_slot)
            files = [file for rank in part.lenders for file in lent[rank].files]
            feeds.append(Feed(sender, tables, parcels, receiver, files))
        return feeds

    def _tables(self, part: SlotPart, leased: Sequence[LeasedTensor], receiver: int) -> Tables:
        return of_part(part, leased, list(self._proof.needed[receiver].values()))

    def _trainers(self, own: Sequence[LocalTensor]) -> list[RankManifest]:
        """Every rank's manifest from the layout; this rank's must be what it really holds."""
        trainer = self._trainer
        manifests = manifests_of(trainer)
        if RankManifest.of(self._rank, own).digest != manifests[self._rank].digest:
            raise WeightSyncError(
                f"trainer rank {self._rank} holds other tensors than its layout {trainer.layout} says"
            )
        return manifests

    @property
    def digest(self) -> str:
        """What a session must carry; equal on all ranks."""
        return self.plan.digest

    def redial(self, addresses: Mapping[int, str]) -> None:
        """Other processes have taken the places of these engine ranks, with the same manifests: the plan stays."""
        self._endpoints.redial(addresses)
        self._lane = None

    def send(self, session: Session, absent: Sequence[int] = ()) -> dict[str, float]:
        """Sends one session under a lease of the parameter memory, not to the `absent` engine ranks; all trainer ranks
        call it together."""
        trainer = self._trainer
        ranks = RankGroup(group_of(trainer), self._sync.deadline_seconds, trainer.device)
        self.timeline = Timeline()
        trainer.memory.lease()  # before all have met: some receiver may read from then on
        try:
            self._start.check(session, ranks, lambda: self._proof, absent)
            self._leave_out(absent)
            feeds = self.feeds(ranks)
            stats = planned.send(
                [self._leased(feeds[n]) for n in self._endpoints.present(absent)],
                session,
                self.part,
                [tensor.detach() for _, tensor, _, _ in trainer.local_tensors()],
                self._far(ranks),
                ranks,
                self._proof,
                timeline=self.timeline,
                mesh=self._endpoints.mesh,
            )
        except BaseException:
            self._lane = None  # messages of the failed session may still be under way in its buckets
            raise
        finally:
            trainer.memory.release()
        return stats.figures | {
            "cross_slot_bytes": float(self.received_bytes),
            "whole_bytes": float(sum(feed.tables.whole_bytes for feed in feeds)),
        }

    def _leave_out(self, absent: Sequence[int]) -> None:
        if tuple(absent) != self._absent:
            self._absent, self._lane = tuple(absent), None
        self._endpoints.leave_out(absent)

    def _received(self, feed: Feed) -> int:
        """Bytes from other slots."""
        part = self.plan.part(self.plan.topology.engine_slots[feed.receiver])
        messages = sum(window.bucket_bytes for window in feed.tables.windows)
        return messages + feed.tables.lent_bytes(len(part.trainer_tensors))

    def _far(self, ranks: RankGroup) -> Lane | None:
        """The lane beyond what is read, with its buckets, made in the first session; None where everything is read."""
        topology, mesh = self.plan.topology, self._endpoints.mesh
        if self.plan.options.read_neighbours and len(set(topology.nodes)) == 1:
            return None
        if self._lane is None:
            if mesh is None:
                rank_of_slot = {s: r for r, s in enumerate(topology.trainer_slots)}
                self._lane = PeerLane(ranks, self.part, rank_of_slot, digests=self._digests)
            else:
                slots = enumerate(topology.engine_slots)
                receivers = {s: r for r, s in slots if r not in self._absent}
                self._lane = MeshLane(mesh, self.part, receivers, ranks.together(lambda: self._places(ranks)))
        return self._lane

    def _places(self, ranks: RankGroup) -> list[dict[int, int]]:
        """By window, slot -> where this rank's message begins in its receive bucket: what the ranks that feed the
        slots tell all others."""
        slots = [self.plan.topology.engine_slots[receiver] for receiver in self._endpoints.receivers]
        offsets = {
            slot: [{r.peer: r.offset for r in window.receives} for window in self.plan.part(slot).windows]
            for slot in slots
        }
        own, places = self.part.slot, [{} for _ in self.part.windows]
        for slot, of_slot in (said for every in ranks.told(offsets) for said in every.items()):
            for window, senders in zip(places, of_slot, strict=True):
                if own in senders:
                    window[slot] = senders[own]
        return places

    def _leased(self, feed: Feed) -> Feed:
        """With what its receiver reads in this session."""
        part = self.plan.part(self.plan.topology.engine_slots[feed.receiver])
        if self._trainer.device.type != "cuda" or not part.lenders:
            return feed
        buffers = [buffer.param_data for buffer in self._trainer.memory.buffers]
        return dataclasses.replace(feed, lease=describe_device(buffers))

    def close(self) -> None:
        """Frees the buffers; the receivers must have released them."""
        self._endpoints.close()
