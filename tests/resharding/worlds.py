"""Random small models and layouts with a shared checkpoint, for the planner's tests."""

import dataclasses
import random
import zlib

import numpy as np
import torch

from mrl.errors import ConfigError, WeightSyncError
from mrl.models.families import family_of
from mrl.models.layout import Layout
from mrl.models.tensors import LOCAL, TRAINER, TRANSFORMER_ENGINE, LocalTensor
from mrl.resharding.planner import engine_manifests, quantised, trainer_manifests
from mrl.resharding.planner.manifest import RankManifest, tensor_bytes
from mrl.resharding.planner.plan import PlanOptions
from mrl.resharding.planner.topology import Topology
from mrl.resharding.transfer import fp8
from mrl.resharding.transfer.copies import DTYPES

QWEN3_MOE = {
    "model_type": "qwen3_moe", "vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4, "num_experts": 8,
    "moe_intermediate_size": 8, "intermediate_size": 16,
}  # fmt: skip
"""A fixed small model, in which every layer has experts."""
FAMILIES = (
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "mixtral", "deepseek_v3", "glm4_moe"),
    *("qwen3_5", "qwen3_5_moe"),
    *("olmoe", "minimax_m2", "gpt_oss", "phi3"),
)


@dataclasses.dataclass(frozen=True)
class World:
    hf: dict
    train: Layout
    rollout: Layout
    trainers: list[RankManifest]
    engines: list[RankManifest]
    topology: Topology
    options: PlanOptions
    quantised: bool = False


def random_world(seed: int, *, family: str | None = None, quantise: bool = False) -> World:
    """Return a world that both engines accept; redraw refused ones. `quantise`: 2 x 2 or 4 x 4 blocks."""
    rng = random.Random(seed)
    while True:
        hf = random_config(rng, family or rng.choice(FAMILIES))
        try:
            world = _world(rng, hf)
            return _quantised(world, rng.choice([2, 4])) if quantise else world
        except (ConfigError, WeightSyncError):
            continue


def _quantised(world: World, block: int) -> World:
    return dataclasses.replace(
        world,
        engines=[quantised.quantised_manifest(m, block) for m in world.engines],
        options=dataclasses.replace(world.options, quantise_block=block),
        quantised=True,
    )


def random_config(rng: random.Random, family: str) -> dict:
    heads = rng.choice([4, 8])
    hf = {
        "model_type": family,
        "vocab_size": rng.choice([61, 96, 130]),
        "hidden_size": rng.choice([16, 24]),
        "intermediate_size": rng.choice([8, 16, 24]),
        "num_hidden_layers": rng.choice([2, 3, 4, 6]),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([1, 2, heads]),
        "head_dim": rng.choice([2, 4]),
        "tie_word_embeddings": rng.random() < 0.3,
    }
    if family in ("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe"):
        hf |= {"num_experts": rng.choice([4, 6, 8]), "moe_intermediate_size": rng.choice([8, 16])}
        hf |= {"mlp_only_layers": rng.choice([[], [1]])}
    if family in ("qwen2_moe", "qwen3_next", "qwen3_5_moe"):
        hf |= {"shared_expert_intermediate_size": rng.choice([0, 8, 16])}
    if family in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        keys = rng.choice([2, 4])
        hf |= {"linear_num_key_heads": keys, "linear_num_value_heads": keys * rng.choice([1, 2])}
        hf |= {
            "linear_key_head_dim": 4,
            "linear_value_head_dim": rng.choice([2, 4]),
            "linear_conv_kernel_dim": 4,
        }
        hf |= {"full_attention_interval": rng.choice([2, 4])}
    if family == "gpt_oss":
        hf |= {"attention_bias": True, "tie_word_embeddings": False}
    if family == "olmoe":
        hf |= {"num_experts": rng.choice([4, 8])}
    if family in ("mixtral", "minimax_m2", "gpt_oss"):
        hf |= {"num_local_experts": rng.choice([2, 4])}
    if family in ("deepseek_v3", "glm4_moe"):
        hf |= {"n_routed_experts": rng.choice([4, 8]), "moe_intermediate_size": rng.choice([8, 16])}
        hf |= {"n_shared_experts": rng.choice([0, 1, 2]), "first_k_dense_replace": rng.choice([0, 1])}
    if family == "glm4_moe":
        hf |= {"attention_bias": rng.random() < 0.7, "use_qk_norm": rng.random() < 0.5}
    if family == "deepseek_v3":
        hf |= {"q_lora_rank": rng.choice([None, 8]), "kv_lora_rank": 12, "num_key_value_heads": heads}
        hf |= {"qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": rng.choice([2, 4])}
    return hf


def _world(rng: random.Random, hf: dict) -> World:
    moe = bool(family_of(hf).expert_count_keys)
    tp, pp, dp = rng.choice([1, 2, 4]), rng.choice([1, 1, 2, 3]), rng.choice([1, 2, 3])
    ep = rng.choice([1, 2, 4]) if moe else 1
    etp = rng.choice([1, 1, 2]) if moe else 1
    cp = rng.choice([1, 1, 2])
    train = Layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, etp=etp, vpp=rng.choice([1, 2]) if pp > 1 else 1)
    roll_tp = rng.choice([1, 2, 4])
    rollout = Layout(
        tp=roll_tp, dp=rng.choice([1, 2, 3]), ep=roll_tp * rng.choice([0, 1, 1, 2]) or 1 if moe else 1
    )
    dtype = rng.choice(["bfloat16", "bfloat16", "float32"])
    held = trainer_manifests.trainer_rank_manifests(
        hf, train, dtype=dtype, spec=rng.choice([TRAINER, LOCAL, TRANSFORMER_ENGINE])
    )
    needed = engine_manifests.engine_rank_manifests(hf, rollout, dtype=rng.choice([dtype, "bfloat16"]))
    options = PlanOptions(
        bucket_bytes=rng.choice([1500, 8192, 1 << 20]), interleave_stages=rng.random() < 0.5
    )
    topology = random_topology(rng, len(held), len(needed))
    options = dataclasses.replace(
        options,
        read_neighbours=rng.random() < 0.5,
        read_buckets=rng.random() < 0.5,
        cut_bytes=rng.choice([0, 64, 1 << 20]),
    )
    return World(hf, train, rollout, held, needed, topology, options)


def random_topology(rng: random.Random, num_trainers: int, num_engine_ranks: int) -> Topology:
    """Return shared slots, separate resource pools, or anything between, with ranks in any order."""
    kind = rng.choice(["shared", "separate", "any"])
    if kind == "shared" and num_trainers <= num_engine_ranks:
        return Topology.shared(
            num_engine_ranks, slots_per_node=rng.choice([2, 4, 8]), num_trainers=num_trainers
        )
    if kind == "separate":
        on_one = rng.choice([2, 4, 8])
        nodes = [slot // on_one for slot in range(num_trainers + num_engine_ranks)]
        return Topology.separate_pools(nodes, num_trainers=num_trainers)
    slots = max(num_trainers, num_engine_ranks) + rng.choice([0, 1, 3])
    return Topology(
        nodes=tuple(rng.randrange(3) for _ in range(slots)),
        rails=tuple(rng.randrange(4) for _ in range(slots)),
        trainer_slots=tuple(rng.sample(range(slots), num_trainers)),
        engine_slots=tuple(rng.sample(range(slots), num_engine_ranks)),
    )


def box(start, shape):
    return tuple(slice(low, low + size) for low, size in zip(start, shape, strict=True))


def checkpoint(world: World) -> dict[str, torch.Tensor]:
    """Return full tensors of random bits in the trainer's dtypes."""
    dtypes = {piece.tensor: t.dtype for m in world.trainers for t in m.tensors for piece in t.pieces}
    full = {}
    for spec in family_of(world.hf).checkpoint_tensors(world.hf):
        dtype, rng = DTYPES[dtypes[spec.name]], np.random.default_rng(zlib.crc32(spec.name.encode()))
        if dtype is torch.bfloat16 and not world.quantised:
            bits = rng.integers(0, 1 << 16, spec.shape, dtype=np.uint16)
            full[spec.name] = torch.from_numpy(bits.view(np.int16)).view(dtype)
        else:  # numbers: those that are quantised must have a largest
            scale = rng.choice([0, 1e-30, 1.0, 1e30]) if dtype is torch.bfloat16 else 1.0
            full[spec.name] = torch.from_numpy(np.asarray(rng.standard_normal(spec.shape) * scale)).to(dtype)
    return full


def poisoned(tensor: LocalTensor) -> torch.Tensor:
    """Return a manifest's tensor with every byte 0xFF, which is NaN in bfloat16 and float32."""
    return (
        torch.full((tensor_bytes(tensor),), 0xFF, dtype=torch.uint8)
        .view(DTYPES[tensor.dtype])
        .view(tensor.shape)
    )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (one, other)))


def loaded(manifest: RankManifest, full: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return a rank's tensors filled from checkpoint tensors; uncovered elements stay poisoned."""
    tensors = []
    for local in manifest.tensors:
        tensors.append(poisoned(local))
        for piece in local.pieces:
            extra = len(local.shape) - len(piece.shape)
            target = tensors[-1][piece.local_start[:extra]][box(piece.local_start[extra:], piece.shape)]
            target.copy_(full[piece.tensor][box(piece.start, piece.shape)])
    return tensors


def gathered(world: World, storages: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Gather whole tensors from the trainer ranks (the oracle's first half)."""
    shapes = {tensor.name: tensor.shape for tensor in family_of(world.hf).checkpoint_tensors(world.hf)}
    full: dict[str, torch.Tensor] = {}
    for manifest, tensors in zip(world.trainers, storages, strict=True):
        for local, tensor in zip(manifest.tensors, tensors, strict=True):
            for part in local.pieces:
                if part.tensor not in full:
                    full[part.tensor] = torch.zeros(shapes[part.tensor], dtype=tensor.dtype)
                full[part.tensor][box(part.start, part.shape)] = tensor[box(part.local_start, part.shape)]
    return full


def as_engines_want(world: World, full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return whole tensors as engines load them, quantised if the engines are (second half)."""
    return dict(fp8.whole_tensors(full.items(), world.options.quantise_block if world.quantised else 0))
