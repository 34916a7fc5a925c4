"""Estimate checkpoints and exports: bytes, time, and the host memory that a node needs to save.

A checkpoint has the weights in training.dtype and the optimizer state in float32 (master weights, two
moments). Each rank writes its part (mrl/training/checkpoint/shards.py): saving at once needs the memory of
one tensor, not counted here; saving beside training first copies the part. bfloat16 moments are copied as
float32 either way.
"""

from __future__ import annotations

import dataclasses
import math

from mrl.capacity.hardware import Hardware
from mrl.capacity.training_memory import StageMemory
from mrl.config.root import Config
from mrl.config.sections.export import MAX_SHARD_BYTES
from mrl.models.facts import ModelSize
from mrl.resharding.planner.manifest import DTYPE_BYTES

STATES = 3 * 4
"""Bytes of optimizer state per parameter: a master weight and two moments in float32."""


@dataclasses.dataclass(frozen=True, slots=True)
class Saving:
    """One checkpoint."""

    num_bytes: int
    """Bytes of all files."""
    node_bytes: int
    """Most bytes of files written by one node."""
    host_bytes: int
    """Most additional host memory of that node, besides its trainers'."""
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Exporting:
    """One Hugging Face folder, made from a checkpoint by one process without a GPU."""

    num_bytes: int
    host_bytes: int
    """Bytes of the largest file, and of the largest tensor that the folder transposes (gpt-oss)."""
    seconds: float
    """Seconds to read and then write all bytes."""


def saving(config: Config, hardware: Hardware, models: list[tuple[int, list[StageMemory]]]) -> Saving:
    """Return the checkpoint of the trained models: the policy (its adapters, if any) and PPO's critic, each
    with its parameter count and stages."""
    layout, element = config.training.layout.sizes(), DTYPE_BYTES[config.training.dtype]
    trained = sum(max(stage.trained for stage in stages) for _, stages in models)
    ranks = min(hardware.gpus_per_node, layout.world_size)
    replicas = layout.edp if layout.ep > 1 else layout.dp * layout.cp
    num_bytes = sum(count for count, _ in models) * file_bytes(config)
    states = trained * STATES // replicas
    node_bytes = min(num_bytes, ranks * (trained * element + states))
    narrow = config.training.optimizer.moments_dtype != "float32"
    copied = node_bytes if config.loop.checkpoint.async_save else ranks * states * narrow
    return Saving(
        num_bytes=num_bytes,
        node_bytes=node_bytes,
        host_bytes=copied,
        seconds=node_bytes / hardware.storage_bytes_per_second,
    )


def exporting(config: Config, hardware: Hardware, facts: ModelSize) -> Exporting:
    """Return the export of the policy's weights in training.dtype."""
    element = DTYPE_BYTES[config.training.dtype]
    size = facts.parameters_total * element
    stacked = any(row.stack for layer in facts.layers for row in layer)
    tensors = facts.family.checkpoint_tensors(facts.hf) if stacked else []
    turned = max((math.prod(tensor.shape) for tensor in tensors if tensor.stack), default=0)
    return Exporting(
        num_bytes=size,
        host_bytes=min(size, MAX_SHARD_BYTES) + turned * element,
        seconds=2 * size / hardware.storage_bytes_per_second,
    )


def saves(config: Config) -> bool:
    """Return True if the run saves checkpoints at all."""
    return config.loop.checkpoint.every_steps > 0 or config.loop.checkpoint.at_end


def file_bytes(config: Config) -> int:
    """Return the bytes of a checkpoint per parameter."""
    return DTYPE_BYTES[config.training.dtype] + STATES
