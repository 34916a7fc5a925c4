"""Checkpoints and exports: their bytes, their time, and the host memory that a node needs while it saves.

A checkpoint has the weights in training.dtype and the optimizer state in float32 (master weights, two moments).
Each rank writes what it holds (mrl/training/checkpoint/shards.py): saved at once it needs the memory of one tensor,
which is not counted here; saved beside training it copies its part first. Moments that are kept in bfloat16 are
copied as float32 either way.
"""

from __future__ import annotations

import dataclasses
import math

from mrl.capacity.hardware import Hardware
from mrl.capacity.training_memory import StageMemory
from mrl.config.root import Config
from mrl.config.sections.export import MAX_SHARD_BYTES
from mrl.models.facts import Facts
from mrl.resharding.planner.manifest import DTYPE_BYTES

STATES = 3 * 4
"""Bytes for each parameter of the optimizer state: a master weight and two moments in float32."""


@dataclasses.dataclass(frozen=True, slots=True)
class Saving:
    """One checkpoint."""

    num_bytes: int
    """All of its files."""
    node_bytes: int
    """Files of the node that writes most, at most."""
    host_bytes: int
    """Host memory of that node beside what its trainers keep there anyway, at most."""
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Exporting:
    """One Hugging Face folder, made of a checkpoint by one process without a GPU."""

    num_bytes: int
    host_bytes: int
    """The largest of its files, and once more the largest tensor that the folder has turned (gpt-oss)."""
    seconds: float
    """As many bytes are read as written, one after the other."""


def saving(config: Config, hardware: Hardware, models: list[tuple[int, list[StageMemory]]]) -> Saving:
    """The checkpoint of the trained models, each with its trained parameters and its stages: the policy (its adapters
    where it has some), and PPO's critic."""
    layout, element = config.training.layout.sizes(), DTYPE_BYTES[config.training.dtype]
    held = sum(max(stage.trained for stage in stages) for _, stages in models)
    ranks = min(hardware.gpus_per_node, layout.world_size)
    replicas = layout.edp if layout.ep > 1 else layout.dp * layout.cp
    num_bytes = sum(count for count, _ in models) * file_bytes(config)
    states = held * STATES // replicas
    node_bytes = min(num_bytes, ranks * (held * element + states))
    narrow = config.training.optimizer.moments_dtype != "float32"
    copied = node_bytes if config.loop.checkpoint.beside_training else ranks * states * narrow
    return Saving(
        num_bytes=num_bytes,
        node_bytes=node_bytes,
        host_bytes=copied,
        seconds=node_bytes / hardware.storage_bytes_per_second,
    )


def exporting(config: Config, hardware: Hardware, facts: Facts) -> Exporting:
    """A folder of the policy's weights in training.dtype."""
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
    """Whether the run saves checkpoints at all."""
    return config.loop.checkpoint.every_steps > 0 or config.loop.checkpoint.at_end


def file_bytes(config: Config) -> int:
    """Bytes of a checkpoint for each parameter."""
    return DTYPE_BYTES[config.training.dtype] + STATES
