"""Worlds of a few slots, their plans, and a consumer that stores what it gets."""

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.resharding.storage import Storage, StorageConsumer
from mrl.config.sections.sync import SyncSection
from mrl.models.layout import Layout
from mrl.resharding.planner import engine_manifests, trainer_manifests
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import Plan, PlanOptions, build_plan
from mrl.resharding.planner.topology import Topology
from tests.resharding.worlds import World, checkpoint, loaded, same_bits

HF: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 16,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "tie_word_embeddings": False, "num_experts": 4, "moe_intermediate_size": 8, "mlp_only_layers": [],
}  # fmt: skip
SYNC = SyncSection(bucket_bytes=2048, deadline_seconds=90.0)


ONE = Layout()


def world_of(train: Layout = ONE, rollout: Layout = ONE) -> World:
    held = trainer_manifests.trainer_rank_manifests(HF, train)
    needed = engine_manifests.engine_rank_manifests(HF, rollout, dtype="bfloat16")
    options = PlanOptions(bucket_bytes=SYNC.bucket_bytes)
    return World(HF, train, rollout, held, needed, Topology.shared(len(held)), options)


def plan_of(world: World) -> Plan:
    return build_plan(world.trainers, world.engines, world.topology, world.options)


class Parameters(StorageConsumer):
    """Parameters of a slot; one window may fail."""

    def __init__(self, manifest: RankManifest, fail_at: int | None = None) -> None:
        super().__init__(Storage(manifest, torch.device("cpu")))
        self.aborts, self._fail_at = 0, fail_at

    def apply(self, index: int, sources: Sequence[torch.Tensor], bucket: torch.Tensor) -> None:
        if index == self._fail_at:
            raise ValueError(f"window {index} broke on purpose")
        super().apply(index, sources, bucket)

    def abort(self) -> None:
        self.aborts += 1


def equal(consumer: Parameters, world: World, rank: int) -> bool:
    flat, expected = consumer._storage.flat, loaded(world.engines[rank], checkpoint(world))
    return all(same_bits(flat[t.name], e) for t, e in zip(world.engines[rank].tensors, expected, strict=True))
