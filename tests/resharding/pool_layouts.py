"""Random layouts of two resource pools with real widths, and bounds on what their links must carry."""

import dataclasses
import math
import random
from collections import Counter

import numpy as np

from mrl.errors import ConfigError, WeightSyncError
from mrl.models.layout import Layout
from mrl.resharding.planner import engine_manifests, trainer_manifests
from mrl.resharding.planner.boxes import cells, contains, intersection
from mrl.resharding.planner.items import places_of
from mrl.resharding.planner.manifest import DTYPE_BYTES, RankManifest, replicas
from mrl.resharding.planner.plan import Plan
from mrl.resharding.planner.topology import Topology

DENSE = {"hidden_size": 2048, "head_dim": 128, "vocab_size": 65536, "intermediate_size": 6144}
LATENT = {
    "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 16,
    "n_routed_experts": 16, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MODELS = (
    DENSE | {"model_type": "qwen3", "num_attention_heads": 16, "num_key_value_heads": 8},
    DENSE | {"model_type": "qwen2", "num_attention_heads": 16, "num_key_value_heads": 4},
    DENSE | {"model_type": "qwen3_moe", "num_attention_heads": 16, "num_key_value_heads": 4,
             "num_experts": 16},
    DENSE | {"model_type": "glm4_moe", "num_attention_heads": 16, "num_key_value_heads": 8,
             "n_routed_experts": 16, "n_shared_experts": 1, "first_k_dense_replace": 1},
    DENSE | {"model_type": "deepseek_v3"} | LATENT,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Pools:
    hf: dict
    train: Layout
    rollout: Layout
    trainers: list[RankManifest]
    engines: list[RankManifest]
    topology: Topology


def random_pools(seed: int) -> Pools:
    """Return pools that both engines accept, on nodes that belong to one pool or (rarely) to both."""
    rng = random.Random(seed)
    while True:
        hf = rng.choice(MODELS) | {"moe_intermediate_size": 768, "num_hidden_layers": rng.randint(4, 9)}
        moe = "qwen3" != hf["model_type"] != "qwen2"
        try:
            return _pools(rng, hf, moe)
        except (ConfigError, WeightSyncError):
            continue


def _pools(rng: random.Random, hf: dict, moe: bool) -> Pools:
    train = Layout(
        tp=rng.choice([1, 2, 4]), pp=rng.choice([1, 2, 4]), dp=rng.choice([1, 2, 3, 4, 8]),
        ep=rng.choice([1, 2, 4, 8]) if moe else 1,
    )  # fmt: skip
    tp, dp = rng.choice([1, 2, 4, 8]), rng.choice([1, 1, 2, 8]) if moe else 1
    engines = rng.choice([1, 2, 3, 4])
    whole_experts = moe and (dp > 1 or rng.random() < 0.5)
    rollout = Layout(tp=tp, dp=dp * engines, ep=tp * dp if whole_experts else 1)
    held = trainer_manifests.trainer_rank_manifests(hf, train)
    needed = engine_manifests.engine_rank_manifests(hf, rollout)
    per_node = rng.choice([2, 4, 8])
    nodes = [rank // per_node for rank in range(len(held))]
    start = nodes[-1] + (rng.random() < 0.8)
    nodes += [start + rank // per_node for rank in range(len(needed))]
    topology = Topology.separate_pools(nodes, num_trainers=len(held))
    return Pools(hf, train, rollout, held, needed, topology)


@dataclasses.dataclass(frozen=True)
class Loads:
    """Bytes that some ranks must carry together, by the ranks among which they may be split."""

    sent: Counter[tuple[int, ...]]
    taken: Counter[tuple[int, ...]]


def necessary(pools: Pools, *, once_per_node: bool) -> Loads:
    """Return the bytes that cross the network, from the manifests alone."""
    topology = pools.topology
    nodes = topology.nodes
    sent: Counter[tuple[int, ...]] = Counter()
    taken: Counter[tuple[int, ...]] = Counter()
    held, needed = replicas(pools.trainers), replicas(pools.engines)
    holds_of, known = places_of(held), {}
    for tensor, needs in places_of(needed).items():
        holds = holds_of[tensor]
        key = tuple((p.group, p.piece.start, p.piece.shape) for p in (*holds, *needs)), len(holds)
        if key not in known:
            known[key] = _loads_of(holds, needs, held, needed, topology.trainer_slots, topology.engine_slots,
                                   nodes, once_per_node)  # fmt: skip
        for part, total in zip(known[key], (sent, taken), strict=True):
            total.update(part)
    return Loads(sent, taken)


def _loads_of(holds, needs, held, needed, trainer_slots, engine_slots, nodes, once_per_node):
    sent, taken, ranks_of = Counter(), Counter(), {}
    for need in needs:
        sides = ((held, holds[0]), (needed, need))
        size = min(DTYPE_BYTES[groups[p.group].tensors[p.index].dtype] for groups, p in sides)
        for cell in cells(need.box, [h.box for h in holds if intersection(h.box, need.box)]):
            ranks_of.setdefault((cell, size), []).extend(needed[need.group].ranks)
    for (cell, size), ranks in ranks_of.items():
        holders = sorted({r for h in holds if contains(h.box, cell) for r in held[h.group].ranks})
        at_home = {nodes[trainer_slots[rank]] for rank in holders}
        away = sorted(r for r in ranks if nodes[engine_slots[r]] not in at_home)
        groups: dict[int, list[int]] = {}
        for rank in away:
            groups.setdefault(nodes[engine_slots[rank]] if once_per_node else rank, []).append(rank)
        num_bytes = math.prod(cell[1]) * size
        for group in groups.values():
            sent[tuple(holders)] += num_bytes
            taken[tuple(group)] += num_bytes
    return sent, taken


def least_busiest(loads: Counter[tuple[int, ...]]) -> float:
    """Return a lower bound on the busiest rank's load: what must go to a set of ranks, over its size.

    Any set gives a bound. The sets tried are those of the busiest ranks of a nearly fair split, among which
    the tightest is: a fractional one, by repeatedly moving load towards the less loaded."""
    groups = [(np.array(ranks), float(load)) for ranks, load in sorted(loads.items())]
    if not groups:
        return 0.0
    total = np.zeros(1 + max(ranks[-1] for ranks, _ in groups))
    shares = [np.full(len(ranks), load / len(ranks)) for ranks, load in groups]
    for (ranks, _), share in zip(groups, shares, strict=True):
        total[ranks] += share
    for _ in range(400):
        before = total.copy()
        for (ranks, load), share in zip(groups, shares, strict=True):
            if len(ranks) > 1:
                others = total[ranks] - share
                level = _level(others, load)
                total[ranks] = np.maximum(others, level)
                share[:] = total[ranks] - others
        if np.abs(total - before).max() < 1e-5 * total.max():
            break
    best = 0.0
    for level in np.unique(np.round(total / total.max(), 3)):
        inside = set(np.flatnonzero(total >= (level - 0.001) * total.max()).tolist())
        must = sum(load for ranks, load in groups if inside.issuperset(ranks.tolist()))
        best = max(best, must / len(inside))
    return best


def _level(others: np.ndarray, load: float) -> float:
    """Return the height to which `load` fills the lowest of `others`."""
    ordered = np.sort(others)
    heights = (load + np.cumsum(ordered)) / np.arange(1, len(ordered) + 1)
    return float(heights[np.flatnonzero(heights > ordered)[-1]])


def ratios(plan: Plan, pools: Pools, *, once_per_node: bool) -> tuple[float, float]:
    """Return (busiest sender, busiest receiver) on the network, as a multiple of the least possible."""
    loads = necessary(pools, once_per_node=once_per_node)
    if not loads.sent:
        return 1.0, 1.0
    return (
        plan.traffic[4].max() / least_busiest(loads.sent),
        plan.traffic[2].max() / least_busiest(loads.taken),
    )
