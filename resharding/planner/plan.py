"""The plan: a pure function of manifests, topology and options, built once and replayed at every sync.

Owns assembly, digest and totals. Transfers (who sends what), windows (in which order) and parts (one slot's
tables) have their own files. It moves no bytes, and depends on no hostname, time or hash order.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from mrl.errors import ConfigError
from mrl.models.tensors import BLOCK
from mrl.resharding.planner.agreement import require_agreement, require_slots, require_written_once
from mrl.resharding.planner.items import items
from mrl.resharding.planner.manifest import RankManifest, Replicas, replicas, tensor_bytes
from mrl.resharding.planner.quantised import without_cut_modules
from mrl.resharding.planner.schedule import SlotTraffic, Window, cut_counts, fill_windows, ordered_steps
from mrl.resharding.planner.slot_plan import PartBuilder, SlotPart
from mrl.resharding.planner.topology import Topology
from mrl.resharding.planner.transfers import Item
from mrl.resharding.planner.whole_tensors import whole_tensor_of, with_whole_tensors

PLANNER_VERSION = 4


@dataclasses.dataclass(frozen=True, slots=True)
class PlanOptions:
    """Choices of the planner; all are in the digest."""

    bucket_bytes: int = 256 << 20
    """Bytes that a slot may send, and may receive, in one window."""
    interleave_stages: bool = True
    """Mix modules of all pipeline stages in a window: all senders are busy at once, but as many engine
    modules are open as there are stages. Without it one module is open at a time, save at window edges."""

    read_neighbours: bool = False
    """Let an engine rank copy from the memory of every trainer rank of its node, not only of its own slot's:
    slots of one node then need no messages and buckets."""

    read_buckets: bool = False
    """Let an engine rank of a separate pool copy what several ranks of its node need from the receive bucket
    of one of them: one copy crosses the network into each node."""

    cut_bytes: int = 256 << 10
    """Between pools, cut a cell of at least this size, so that all ranks that hold it send a part."""

    quantise_block: int = BLOCK
    """Edge of the blocks of quantised tensors; the engine's manifests say which tensors are quantised."""

    @property
    def reach(self) -> int:
        """Distance up to which engine ranks read trainer memory (`Topology.distance`)."""
        return 1 if self.read_neighbours else 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """A whole plan. `part(slot)` expands one slot's tables; everything else is common to all ranks."""

    digest: str
    """sha256 over planner version, options, topology and manifest digests: equal digests mean equal plans."""
    options: PlanOptions
    topology: Topology
    trainers: tuple[Replicas, ...]
    engines: tuple[Replicas, ...]
    items: tuple[Item, ...]
    windows: tuple[Window, ...]
    """Global order; every trainer rank visits each window, even with nothing to do."""
    _parts: dict[int, SlotPart] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def part(self, slot: int) -> SlotPart:
        """Return one slot's tables, built once; raise ConfigError for a slot outside the topology."""
        if not 0 <= slot < self.topology.num_slots:
            raise ConfigError(f"slot {slot} is outside the plan's {self.topology.num_slots} slots")
        if slot not in self._parts:
            builder = PartBuilder(
                slot, self.items, self.trainers, self.engines, self.topology, reach=self.options.reach
            )
            self._parts[slot] = builder.build(self.windows)
        return self._parts[slot]

    @functools.cached_property
    def reads_buckets(self) -> bool:
        """True if an engine rank reads the receive bucket of another."""
        return any(bool((item.pattern.entry >= 0).any()) for item in self.items)

    @functools.cached_property
    def traffic(self) -> np.ndarray:
        """Bytes in wire dtype, [5, slots]: local, received in and across nodes, sent in and across nodes."""
        counts = Counter((id(item.pattern), item.ordinal) for item in self.items)
        patterns = {id(item.pattern): item.pattern for item in self.items}
        totals = np.zeros((5, self.topology.num_slots), dtype=np.int64)
        engines, trainers = np.array(self.topology.engine_slots), np.array(self.topology.trainer_slots)
        for (key, ordinal), times in counts.items():
            pattern = patterns[key]
            here, there = engines[pattern.engine_rank], trainers[pattern.senders(ordinal)]
            there = np.where(pattern.entry < 0, there, engines[pattern.entry])
            lane = np.minimum(pattern.distance, 2)
            num_bytes = times * pattern.sizes
            np.add.at(totals, (lane, here), num_bytes)
            np.add.at(totals, (2 + lane[lane > 0], there[lane > 0]), num_bytes[lane > 0])
        return totals

    def summary(self) -> dict[str, int]:
        """Return totals over all slots: bytes in wire dtype, and counts.

        `lower_bound_cross_slot_bytes` comes from the boxes alone, without the plan's choices.
        """
        local, intra, inter, *_ = (int(row.sum()) for row in self.traffic)
        return {
            "bytes_needed": local + intra + inter,
            "bytes_local": local,
            "bytes_intra_node": intra,
            "bytes_inter_node": inter,
            "lower_bound_cross_slot_bytes": sum(item.pattern.bytes_not_on_slot for item in self.items),
            "windows": len(self.windows),
            "whole_bytes": sum(self.whole_tensors.values()),
        }

    @functools.cached_property
    def whole_tensors(self) -> dict[str, int]:
        """Checkpoint tensors that come whole to some engine rank, with their bytes over all engine ranks."""
        sizes: dict[str, int] = {}
        for group in self.engines:
            for target in group.tensors:
                if name := whole_tensor_of(target.name):
                    sizes[name] = sizes.get(name, 0) + len(group.ranks) * tensor_bytes(target)
        return sizes


def build_plan(
    trainers: Sequence[RankManifest],
    engines: Sequence[RankManifest],
    topology: Topology,
    options: PlanOptions = PlanOptions(),
) -> Plan:
    """Plan every byte from the trainers' boxes to the engines'. Manifests are in rank order from 0.

    Raises:
        WeightSyncError: the sides have different tensors or shapes, or a manifest has an element twice or not
            at all.
        ConfigError: the topology does not fit.
    """
    require_slots("trainer", trainers, topology.trainer_slots)
    require_slots("engine", engines, topology.engine_slots)
    require_agreement(trainers, engines)
    engines = with_whole_tensors(trainers, without_cut_modules(trainers, engines, options.quantise_block))
    held, needed = replicas(trainers), replicas(engines)
    for group in needed:
        require_written_once(group)
    listed = items(
        held,
        needed,
        topology,
        block=options.quantise_block,
        read_buckets=options.read_buckets,
        cut_bytes=options.cut_bytes,
    )
    traffic = SlotTraffic(topology, reach=options.reach)
    parts = cut_counts(listed, traffic, bucket_bytes=options.bucket_bytes)
    order = ordered_steps(listed, parts, held, needed, interleave_stages=options.interleave_stages)
    return Plan(
        digest=_digest(trainers, engines, topology, options),
        options=options,
        topology=topology,
        trainers=tuple(held),
        engines=tuple(needed),
        items=tuple(listed),
        windows=tuple(fill_windows(listed, order, traffic, bucket_bytes=options.bucket_bytes)),
    )


def _digest(
    trainers: Sequence[RankManifest],
    engines: Sequence[RankManifest],
    topology: Topology,
    options: PlanOptions,
) -> str:
    state = hashlib.sha256(f"{PLANNER_VERSION} {options} {topology}\n".encode())
    for side, manifests in (("trainer", trainers), ("engine", engines)):
        for manifest in manifests:
            state.update(f"{side} {manifest.rank} {manifest.digest}\n".encode())
    return state.hexdigest()
