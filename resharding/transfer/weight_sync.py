"""One trainer rank's side of every weight sync of a run: its sender, and the plan made once and replayed.

Consumes: the Megatron worker's description of itself. Produces: sessions sent. Waits for: peers and the
slot's receiver, each with sync.deadline_seconds. Modes: `gather` streams full tensors; `planned` follows the
static plan.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mrl.config.sections.sync import SyncSection
from mrl.errors import WeightSyncError
from mrl.models.family import Family
from mrl.models.layout import Layout
from mrl.models.tensors import LocalTensor, Spec
from mrl.resharding.planner.cells import Listing, PlanCells
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import PlanOptions, build_plan
from mrl.resharding.planner.quantised import unquantised
from mrl.resharding.planner.slot_plan import SlotPart
from mrl.resharding.planner.topology import Topology
from mrl.resharding.planner.trainer_manifests import from_layout
from mrl.resharding.transfer import gather, gather_plan, planned
from mrl.resharding.transfer.collectives import Ranks
from mrl.resharding.transfer.endpoints import Endpoints, open_endpoints
from mrl.resharding.transfer.lease import describe_device, describe_files
from mrl.resharding.transfer.node_lane import Neighbours, NodeLane, Offer
from mrl.resharding.transfer.planned import Lane, MeshLane, PeerLane, parcels_of
from mrl.resharding.transfer.proof import ReadBoxes, TrainerProof
from mrl.resharding.transfer.run_session import Feed, SendStats
from mrl.resharding.transfer.session import Session
from mrl.resharding.transfer.slot_tables import LeasedTensor, Tables, leased_tensors, of_part


class Memory(Protocol):
    """What is read of a Megatron worker's parameter memory."""

    @property
    def buffers(self) -> Sequence[Any]: ...

    def export(self) -> list[tuple[int, int]]: ...

    def lease(self) -> int: ...

    def release(self) -> None: ...


class Trainer(Protocol):
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

    def local_tensors(self) -> Sequence[tuple[LocalTensor, torch.Tensor, int, int]]: ...

    def loaded_boxes(self) -> ReadBoxes | None:
        """Reads the folder whose weights the parameters are; None once they were changed."""
        ...

    @property
    def memory(self) -> Memory: ...


def _manifests_of(trainer: Trainer) -> list[RankManifest]:
    """What every trainer rank holds, from the layout."""
    dtype = str(trainer.dtype).removeprefix("torch.")
    return from_layout(trainer.hf_config, trainer.layout, dtype=dtype, spec=trainer.spec)


class Start:
    """What is made sure of before the first byte of a session."""

    def __init__(self, trainer: Trainer, sync: SyncSection, facts: Mapping[str, object]) -> None:
        """`facts`: what else must be the same on all ranks, by the words an error names it with."""
        self._trainer = trainer
        self._facts = {
            "sync": sync,
            "layout": trainer.layout,
            "dtype": trainer.dtype,
            "model": json.dumps(trainer.hf_config, sort_keys=True, default=str),
            **facts,
        }
        self._compared = False

    def check(
        self, session: Session, ranks: Ranks, proof: Callable[[], TrainerProof], absent: Sequence[int] = ()
    ) -> None:
        """WeightSyncError on all ranks where they disagree about anything, or hold other weights than the
        folder they loaded (asked once, in the first session that is proved)."""
        opened = (session, session.session_id, session.full, session.digest)
        ranks.agree(self._facts | {"session": opened, "absent engine ranks": list(absent)})
        if session.digest != self._facts["plan"]:
            raise WeightSyncError(
                f"{session} was made for another plan (digest {session.digest[:12]}, here {str(self._facts['plan'])[:12]})"
            )
        if session.full and not self._compared:
            ranks.together(lambda: self._require_loaded(proof()))
            self._compared = True

    def _require_loaded(self, proof: TrainerProof) -> None:
        read = self._trainer.loaded_boxes()
        if read is not None:
            arrays = [tensor.detach().reshape(-1) for _, tensor, _, _ in self._trainer.local_tensors()]
            proof.require_loaded(arrays, read)


class GatherSync:
    """Sends full checkpoint tensors, one bucket at a time, to this rank's receivers."""

    def __init__(
        self,
        trainer: Trainer,
        sync: SyncSection,
        addresses: Sequence[str],
        *,
        store: tuple[str, int] | None = None,
    ) -> None:
        """`addresses`: of every engine rank. `store`: the trainers' torch.distributed store (distributed
        transport)."""
        self._trainer, self._sync = trainer, sync
        manifests = _manifests_of(trainer)
        self.plan = gather_plan.build(
            trainer.family.checkpoint_tensors(trainer.hf_config),
            [m.tensors for m in manifests],
            sync.bucket_bytes,
        )
        self._num_receivers = len(addresses)
        self._endpoints = _endpoints(trainer, sync, addresses, store)
        self._start = Start(trainer, sync, {"plan": self.plan.digest, "engine ranks": len(addresses)})

    @property
    def digest(self) -> str:
        """What a session must carry; equal on all ranks."""
        return self.plan.digest

    def redial(self, addresses: Mapping[int, str]) -> None:
        """Other processes have taken the places of these engine ranks."""
        self._endpoints.redial(addresses)

    def send(self, session: Session, absent: Sequence[int] = ()) -> dict[str, float]:
        """Sends one session, not to the `absent` engine ranks; all trainer ranks call it together. Seconds are this
        rank's, bytes this slot's."""
        ranks = Ranks(_group(self._trainer), self._sync.deadline_seconds, self._trainer.device)
        self._start.check(session, ranks, lambda: gather.proof_of(self.plan, ranks.rank, 1), absent)
        _keep(self._endpoints, self._num_receivers, absent)
        stats = gather.send(
            [self._endpoints.senders[n] for n in self._endpoints.present(absent)],
            session,
            self.plan,
            [tensor for _, tensor, _, _ in self._trainer.local_tensors()],
            group=_group(self._trainer),
            device=self._trainer.device,
            deadline_seconds=self._sync.deadline_seconds,
            mesh=self._endpoints.mesh,
        )
        return report(stats)

    def close(self) -> None:
        """Frees the buffers; the receivers must have released them."""
        self._endpoints.close()


class PlannedSync:
    """Follows the static plan: nobody gathers; what the slot holds is read by its engine rank from leased
    memory."""

    def __init__(
        self,
        trainer: Trainer,
        sync: SyncSection,
        addresses: Sequence[str],
        engines: Sequence[RankManifest],
        *,
        topology: Topology,
        store: tuple[str, int] | None = None,
    ) -> None:
        """`addresses`, `engines`: of every engine rank in order (`RolloutEngine.engine_manifests` of each
        engine). `topology`: where all of them are. `store`: the trainers' torch.distributed store (distributed
        transport)."""
        self._trainer, self._sync = trainer, sync
        self._rank = dist.get_rank() if trainer.layout.world_size > 1 else 0
        self._endpoints = _endpoints(trainer, sync, addresses, store)
        located = trainer.local_tensors()
        trainers = self._trainers([tensor for tensor, _, _, _ in located])
        self.plan = build_plan(
            trainers,
            [dataclasses.replace(d, rank=rank) for rank, d in enumerate(engines)],
            topology,
            PlanOptions(bucket_bytes=sync.bucket_bytes, interleave_stages=trainer.device.type == "cuda"),
        )
        self.part = self.plan.part(self.plan.topology.trainer_slots[self._rank])
        self._fallback = self._whole_tensors(trainers)
        self._proof = self._proved([tensor for tensor, _, _, _ in located])
        digests = [manifest.digest[:12] for manifest in engines]
        facts = {"nodes": list(topology.nodes), "engine ranks' manifests": digests}
        facts |= {"trainer ranks' manifests": [manifest.digest[:12] for manifest in trainers]}
        self._start = Start(trainer, sync, facts | {"plan": self.plan.digest})
        self.feeds = self._feeds_of(leased_tensors(located))
        self._near: Neighbours | None = None
        self._lane: Lane | None = None
        self._absent: tuple[int, ...] = ()
        """Engine ranks that the lane has nothing for."""

    def _whole_tensors(self, trainers: Sequence[RankManifest]) -> gather_plan.GatherPlan | None:
        """How what no plan can place is gathered; None where the plan has everything."""
        if not self.plan.fallback:
            return None
        trainer, names = self._trainer, set(unquantised(self.plan.fallback))
        tensors = [t for t in trainer.family.checkpoint_tensors(trainer.hf_config) if t.name in names]
        if unknown := names - {t.name for t in tensors}:
            raise WeightSyncError(
                f"engines need tensors whole that the checkpoint does not have: {sorted(unknown)[:20]}"
            )
        return gather_plan.build(tensors, [m.tensors for m in trainers], self._sync.bucket_bytes)

    def _proved(self, own: Sequence[LocalTensor]) -> TrainerProof:
        """Of the plan's cells, and of those that come whole."""
        listings: list[Listing] = [PlanCells(self.plan)]
        if self._fallback is not None:
            listings.append(self._fallback.cells.taken_by([unquantised(w) for w in self.plan.whole]))
        return TrainerProof(listings, self._rank, own, self._endpoints.receivers)

    def _tables(self, part: SlotPart, leased: Sequence[LeasedTensor], receiver: int) -> Tables:
        fallback = () if self._fallback is None else self._fallback.tensors
        cells, *whole_cells = (list(cells.values()) for cells in self._proof.needed[receiver])
        whole = unquantised(self.plan.whole[receiver])
        return of_part(part, leased, fallback, whole, cells, whole_cells[0] if whole_cells else ())

    def _feeds_of(self, leased: Sequence[LeasedTensor]) -> list[Feed]:
        topology, meshed = self.plan.topology, self._endpoints.mesh is not None
        rank_of_slot = {slot: rank for rank, slot in enumerate(topology.trainer_slots)}
        feeds = []
        for receiver, sender in zip(self._endpoints.receivers, self._endpoints.senders, strict=True):
            part = self.plan.part(topology.engine_slots[receiver])
            tables = self._tables(part, leased if part.slot == self.part.slot else (), receiver)
            parcels = parcels_of(part, rank_of_slot) if meshed else None
            feeds.append(Feed(sender, tables, parcels, receiver))
        return feeds

    def _trainers(self, own: Sequence[LocalTensor]) -> list[RankManifest]:
        """Every rank's manifest from the layout; this rank's must be what it really holds."""
        trainer = self._trainer
        manifests = _manifests_of(trainer)
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
        ranks = Ranks(_group(trainer), self._sync.deadline_seconds, trainer.device)
        self._start.check(session, ranks, lambda: self._proof, absent)
        self._leave_out(absent)
        trainer.memory.lease()
        try:
            own = [tensor.detach() for _, tensor, _, _ in trainer.local_tensors()]
            near = self._neighbours(ranks)
            part = self.part if near is None else near.rest
            lane = self._far(ranks, part)
            if near is not None:
                lane = NodeLane(near, lane, ranks, [tensor.reshape(-1) for tensor in own])
            stats = planned.send(
                [self.feeds[n] for n in self._endpoints.present(absent)],
                session,
                part,
                own,
                lane,
                ranks,
                self._proof,
                fallback=self._fallback,
                lease=self._describe(),
                mesh=self._endpoints.mesh,
            )
        except BaseException:
            self._lane = None  # messages of the failed session may still be under way in its buckets
            raise
        finally:
            trainer.memory.release()
        whole = 0 if self._fallback is None else self._fallback.num_bytes * len(self.feeds)
        return report(stats) | {
            "cross_slot_bytes": float(self.received_bytes),
            "fallback_bytes": float(whole),
        }

    def _leave_out(self, absent: Sequence[int]) -> None:
        if tuple(absent) != self._absent:
            self._absent, self._lane = tuple(absent), None
        _keep(self._endpoints, len(self.plan.topology.engine_slots), absent)

    @property
    def received_bytes(self) -> int:
        """What reaches this rank's receivers from other slots in one session, messages' alignment
        included."""
        contents = (feed.content for feed in self.feeds)
        return sum(
            w.bucket_bytes for tables in contents if isinstance(tables, Tables) for w in tables.windows
        )

    def _neighbours(self, ranks: Ranks) -> Neighbours | None:
        """The buckets of this machine's other slots, in shared memory; the ranks meet in the first
        session."""
        nodes = self.plan.topology.nodes
        if self._endpoints.mesh is not None or ranks.device.type != "cpu" or len(set(nodes)) == len(nodes):
            return None
        if self._near is None:
            self._near = ranks.together(self._meet)
        return self._near

    def _meet(self) -> Neighbours:
        links = zip(self._receiving_slots, self._endpoints.links, strict=True)
        offers = self._told({slot: Offer.of(self.plan.part(slot), link.export()) for slot, link in links})
        nodes, own = self.plan.topology.nodes, self.part.slot
        return Neighbours(self.part, {s: o for s, o in offers.items() if nodes[s] == nodes[own] and s != own})

    @property
    def _receiving_slots(self) -> list[int]:
        """The slots of this rank's receivers."""
        return [self.plan.topology.engine_slots[receiver] for receiver in self._endpoints.receivers]

    def _told(self, own: dict[int, Any]) -> dict[int, Any]:
        """What all ranks say of their receivers' slots; a collective."""
        said: list[Any] = [own] * len(self.plan.topology.trainer_slots)
        if len(said) > 1:
            dist.all_gather_object(said, own)
        return {slot: word for words in said for slot, word in words.items()}

    def _far(self, ranks: Ranks, part: SlotPart) -> Lane:
        """The lane beyond this machine's memory, with its buckets, made in the first session."""
        if self._lane is None:
            topology, mesh = self.plan.topology, self._endpoints.mesh
            if mesh is None:
                self._lane = PeerLane(ranks, part, {s: r for r, s in enumerate(topology.trainer_slots)})
            else:
                slots = enumerate(topology.engine_slots)
                receivers = {s: r for r, s in slots if r not in self._absent}
                self._lane = MeshLane(mesh, part, receivers, ranks.together(self._places))
        return self._lane

    def _places(self) -> list[dict[int, int]]:
        """By window, slot -> where this rank's message begins in its receive bucket: what the ranks that feed the
        slots tell all others."""
        told = {slot: Offer.of(self.plan.part(slot), ()).places for slot in self._receiving_slots}
        own, places = self.part.slot, [{} for _ in self.part.windows]
        for slot, of_slot in self._told(told).items():
            for window, senders in zip(places, of_slot, strict=True):
                if own in senders:
                    window[slot] = senders[own]
        return places

    def _describe(self) -> list[dict[str, Any]]:
        if self.part.slot not in self.plan.topology.engine_slots:
            return []
        if self._trainer.device.type == "cuda":
            return describe_device([buffer.param_data for buffer in self._trainer.memory.buffers])
        return describe_files(self._trainer.memory.export())

    def close(self) -> None:
        """Frees the buffers; the receivers must have released them."""
        if self._near is not None:
            self._near.close()
        self._endpoints.close()


def _keep(endpoints: Endpoints, num_receivers: int, absent: Sequence[int]) -> None:
    """The mesh of a session without these engine ranks."""
    if endpoints.mesh is not None:
        endpoints.mesh.keep([r for r in range(num_receivers) if r not in absent])


def _group(trainer: Trainer) -> dist.ProcessGroup | None:
    return dist.group.WORLD if trainer.layout.world_size > 1 else None


def _endpoints(
    trainer: Trainer, sync: SyncSection, addresses: Sequence[str], store: tuple[str, int] | None
) -> Endpoints:
    world = trainer.layout.world_size
    rank = dist.get_rank() if world > 1 else 0
    return open_endpoints(sync, addresses, rank=rank, num_trainers=world, device=trainer.device, store=store)


def report(stats: SendStats) -> dict[str, float]:
    """A weight sync's figures by metric name: seconds of this rank, bytes of this slot."""
    seconds = {f"{name}_seconds": value for name, value in stats.receiver_seconds.items()}
    return seconds | {
        "bytes": float(stats.moved.num_bytes),
        "gather_seconds": stats.moved.seconds,
        "pack_seconds": stats.moved.pack_seconds,
        "commit_seconds": stats.commit_seconds,
        "prove_seconds": stats.prove_seconds,
        "sender_wait_seconds": stats.wait_seconds,
    }
