"""Compute the bytes that one weight sync moves over each kind of link, by closed formulas over the name
tables.

Engine rank r shares the slot of trainer rank r. Every byte that an engine rank needs comes once from the
nearest rank that has it: its own slot, its node, its rail (the same place in another node), anywhere. The
formulas equal the resharding planner's bytes (tested) in a fraction of its time. The planner itself is used
if engines have their own slots (after the trainer's), or if query groups are cut (layout.tp above the number
of key and value heads).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from mrl.capacity.hardware import Hardware
from mrl.capacity.model_facts import row_bytes
from mrl.config.sections.rollout import RolloutSection
from mrl.models.facts import ModelSize
from mrl.models.layout import Layout, chunk_layers
from mrl.models.tensors import ParameterRows
from mrl.resharding.planner import engine_manifests, quantised, trainer_manifests
from mrl.resharding.planner.manifest import DTYPE_BYTES
from mrl.resharding.planner.plan import Plan, PlanOptions, build_plan
from mrl.resharding.planner.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one weight sync; lists have one entry per slot."""

    need: list[int]
    """Bytes that an engine rank must receive."""
    local: list[int]
    node_in: list[int]
    network_in: list[int]
    node_out: list[int]
    network_out: list[int]
    off_rail: int
    """Bytes of network_in whose sender is at another place in its node."""

    def bound_seconds(self, hardware: Hardware) -> dict[str, float]:
        """Return each kind of link's shortest time at full bandwidth; memory is read and written once."""
        return {
            "memory": 2 * max(self.need) / hardware.memory_bytes_per_second,
            "node": max(self.node_in + self.node_out) / hardware.node_bytes_per_second,
            "network": max(self.network_in + self.network_out) / hardware.network_bytes_per_second,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """Bytes that one engine rank takes from the ranks with one shard."""

    stage: int
    kind: str
    index: int
    num_bytes: int


class _Holders:
    """Trainer ranks that have a shard, by distance to a slot."""

    def __init__(self, layout: Layout, gpus_per_node: int) -> None:
        self.layout, self.gpus_per_node = layout, gpus_per_node
        self.size = layout.tp * layout.cp * layout.dp

    @functools.cache  # noqa: B019 - lives as long as one estimate
    def ranks(self, stage: int, kind: str, index: int) -> tuple[frozenset[int], dict[int, list[int]]]:
        """Return (all holders, those per node) of a stage's shard `index` of kind "all", "tp" or "expert"."""
        layout = self.layout
        inner = range(self.size)
        if kind == "tp":
            inner = [n for n in inner if n % layout.tp == index]
        if kind == "expert":  # index = ep x etp_size + etp
            inner = [n for n in inner if n % (layout.ep * layout.etp) == index]
        ranks = [stage * self.size + n for n in inner]
        nodes: dict[int, list[int]] = {}
        for rank in ranks:
            nodes.setdefault(rank // self.gpus_per_node, []).append(rank)
        return frozenset(ranks), nodes

    def nearest(self, slot: int, demand: Demand, *, turn: int) -> int:
        """Return the holder that a slot takes from; equally near ones take turns."""
        ranks, nodes = self.ranks(demand.stage, demand.kind, demand.index)
        if slot in ranks:
            return slot
        near = nodes.get(slot // self.gpus_per_node)
        if near:
            return near[turn % len(near)]
        place = slot % self.gpus_per_node
        rail = [rank for holders in nodes.values() for rank in holders if rank % self.gpus_per_node == place]
        choice = rail or sorted(ranks)
        return choice[turn % len(choice)]


def traffic(
    facts: ModelSize,
    rollout: RolloutSection,
    layout: Layout,
    *,
    gpus_per_node: int,
    own_slots: int = 0,
    read_buckets: bool = False,
) -> Traffic:
    """Return the bytes of one full weight sync in the engine's dtype.

    Args:
        own_slots: slots for engines only; 0 if they share the trainer's.
        read_buckets: see `PlanOptions`.
    """
    if own_slots or (not facts.latent_attention and layout.tp > facts.kv_heads):
        return planned_traffic(
            facts,
            rollout,
            layout,
            gpus_per_node=gpus_per_node,
            own_slots=own_slots,
            read_buckets=read_buckets,
        )
    last = layout.world_size
    holders = _Holders(layout, gpus_per_node)
    columns = {
        name: [0] * last for name in ("need", "local", "node_in", "network_in", "node_out", "network_out")
    }
    off_rail = 0
    stages = [_stage_bytes(facts, rollout, layout, stage) for stage in range(layout.pp)]
    demands = [list(_demands(facts, rollout, layout, stages, index)) for index in range(rollout.ranks)]
    for slot in range(last):
        for demand in demands[slot % rollout.ranks]:
            source = holders.nearest(slot, demand, turn=slot // rollout.ranks)
            columns["need"][slot] += demand.num_bytes
            if source == slot:
                columns["local"][slot] += demand.num_bytes
                continue
            link = "node" if source // gpus_per_node == slot // gpus_per_node else "network"
            columns[f"{link}_in"][slot] += demand.num_bytes
            columns[f"{link}_out"][source] += demand.num_bytes
            if link == "network" and source % gpus_per_node != slot % gpus_per_node:
                off_rail += demand.num_bytes
    return Traffic(**columns, off_rail=off_rail)


def planned_traffic(
    facts: ModelSize,
    rollout: RolloutSection,
    layout: Layout,
    *,
    gpus_per_node: int,
    own_slots: int = 0,
    read_buckets: bool = False,
) -> Traffic:
    """Return the same bytes from the plan itself: exact for every layout, slow for hundreds of slots."""
    world = layout.world_size
    engine = Layout(tp=rollout.tp, ep=rollout.ep, dp=(own_slots or world) // rollout.tp)
    shared = Topology.shared(world, slots_per_node=gpus_per_node)
    nodes = [slot // gpus_per_node for slot in range(world + own_slots)]
    apart = Topology.separate_pools(nodes, num_trainers=world)
    wide = engine_manifests.engine_rank_manifests(facts.hf, engine, dtype=rollout.dtype)
    plan = build_plan(
        trainer_manifests.trainer_rank_manifests(facts.hf, layout, dtype=rollout.dtype),
        quantised.manifests(wide, rollout.quantization),
        apart if own_slots else shared,
        PlanOptions(read_buckets=read_buckets),
    )
    local, node_in, network_in, node_out, network_out = (list(map(int, row)) for row in plan.traffic)
    return Traffic(
        need=[sum(column) for column in zip(local, node_in, network_in, strict=True)],
        local=local,
        node_in=node_in,
        network_in=network_in,
        node_out=node_out,
        network_out=network_out,
        off_rail=_off_rail(plan),
    )


def _off_rail(plan: Plan) -> int:
    patterns = {id(item.pattern): item.pattern for item in plan.items}
    num_bytes = {key: int(p.sizes[p.distance == 3].sum()) for key, p in patterns.items()}
    return sum(num_bytes[id(item.pattern)] for item in plan.items)


def _demands(
    facts: ModelSize, rollout: RolloutSection, layout: Layout, stages: list[dict[str, int]], index: int
) -> Iterator[Demand]:
    """Yield what rank `index` of an engine takes, stage by stage; sizes are exact: every split divides."""
    tp, rank = rollout.tp, index % rollout.tp
    for stage, sizes in enumerate(stages):
        yield Demand(stage, "all", 0, sizes["all"])
        for shard in range(layout.tp):
            size = sizes["gathered"] // layout.tp
            size += _overlap(sizes["split"], rank, tp, shard, layout.tp)
            shards = min(tp, facts.kv_heads)
            size += _overlap(sizes["keys"], rank * shards // tp, shards, shard, layout.tp)
            yield Demand(stage, "tp", shard, size)
        yield from _expert_demands(rollout, layout, stage, index, sizes["experts"])


def _expert_demands(
    rollout: RolloutSection, layout: Layout, stage: int, index: int, total: int
) -> Iterator[Demand]:
    if not total:
        return
    for shard in range(layout.ep):
        for part in range(layout.etp):
            if rollout.expert_parallel:
                size = _overlap(total, index, rollout.ep, shard, layout.ep) // layout.etp
            else:
                size = _overlap(total // layout.ep, index, rollout.tp, part, layout.etp)
            if size:
                yield Demand(stage, "expert", shard * layout.etp + part, size)


def _overlap(total: int, index: int, parts: int, other: int, others: int) -> int:
    """Return the size of the overlap of part index/parts with part other/others of `total`.

    >>> _overlap(12, 0, 2, 1, 3)
    2
    """
    low = max(index * others, other * parts)
    high = min((index + 1) * others, (other + 1) * parts)
    return total * max(0, high - low) // (parts * others)


def _stage_bytes(facts: ModelSize, rollout: RolloutSection, layout: Layout, stage: int) -> dict[str, int]:
    """Return the bytes of a stage by how both sides split them.

    all: replicated on both; gathered: split in the trainer, whole in the engine; split: over tp on both;
    keys: by key and value head in the engine; experts: routed experts.
    """
    sizes: dict[str, int] = {"all": 0, "gathered": 0, "split": 0, "keys": 0, "experts": 0}
    element = DTYPE_BYTES[rollout.dtype]
    chunks = chunk_layers(facts.num_layers, layout, stage)
    for row in (row for chunk in chunks for n in chunk for row in facts.layers[n]):
        size = row_bytes(row, 4 if row.role == "correction" else element, rollout)
        _add_row(sizes, row, facts, size * facts.copies(row))
    table = facts.vocab * facts.hidden * element
    if stage == 0:
        sizes["split"] += table
    if stage == layout.pp - 1:
        sizes["all"] += facts.hidden * element
        sizes["split"] += 0 if facts.hf.get("tie_word_embeddings") else table
    return sizes


def _add_row(sizes: dict[str, int], row: ParameterRows, facts: ModelSize, size: int) -> None:
    if ".experts." in row.name:
        sizes["experts"] += size
    elif row.name.endswith("_down_proj.weight"):
        sizes["gathered"] += size
    elif row.split == "none":
        sizes["all"] += size
    elif row.name.endswith("linear_qkv.weight"):
        queries = facts.num_heads * (1 + facts.family.output_gate)
        keys = size * 2 * facts.kv_heads // (queries + 2 * facts.kv_heads)
        sizes["keys"] += keys
        sizes["split"] += size - keys
    else:
        sizes["split"] += size
