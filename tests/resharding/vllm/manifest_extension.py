"""A worker extension for engines that are only asked where their loaders put a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mrl.models.tensors import CheckpointTensor, LocalTensor, Piece
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.vllm.cpu_routing import allow_sigmoid_without_groups
from mrl.resharding.vllm.trace import manifest, quantised_block

allow_sigmoid_without_groups()


class ManifestExtension:
    """`collective_rpc("engine_manifest", ...)` answers in plain values, since vLLM's own calls carry no classes."""

    model_runner: Any
    rank: int

    def engine_manifest(self, checkpoint: Sequence[tuple[str, Sequence[int], str, int]]) -> dict[str, Any]:
        tensors = [CheckpointTensor(name, tuple(shape), *more) for name, shape, *more in checkpoint]
        block = quantised_block(self.model_runner.model_config)
        return dataclasses.asdict(manifest(self.model_runner.model, tensors, rank=self.rank, block=block))


def from_plain(fields: dict[str, Any]) -> RankManifest:
    """The manifest of an extension's answer; the digest is computed again."""
    tensors = [
        LocalTensor(
            t["name"],
            t["chunk"],
            tuple(t["shape"]),
            t["dtype"],
            tuple(
                Piece(p["tensor"], tuple(p["start"]), tuple(p["shape"]), tuple(p["local_start"]))
                for p in t["pieces"]
            ),
        )
        for t in fields["tensors"]
    ]
    return RankManifest.of(fields["rank"], tensors, fields["unplanned"])
