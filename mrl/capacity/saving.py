"""Checkpoints and exports: their bytes, their time, and the host memory that a node needs while it saves.

A checkpoint has the weights in training.dtype and the optimizer state (float32 master weights where parameters
are not float32, two moments). It is gathered buffer by buffer into the host memory of the first data-parallel
rank, which writes it (Megatron's "fully_reshardable" form with memory-efficient gathering,
megatron.core.optimizer.distrib_optimizer, get_parameter_state_dp_zero): three float32 tensors of the whole
buffer, every rank's share of three, and one gathered twice, in parts and joined.
"""

from __future__ import annotations

import dataclasses

from mrl.capacity.hardware import Hardware
from mrl.capacity.training_memory import StageMemory
from mrl.config.root import Config
from mrl.models.facts import Facts
from mrl.resharding.planner.manifest import DTYPE_BYTES

GATHERED = 3 * 4
"""Bytes of host memory for each parameter: a master weight and two moments in float32."""
JOINED = 2 * 4
"""Bytes for each parameter of the tensor that is being gathered, in parts and joined."""


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
    """The largest of its files."""
    seconds: float
    """As many bytes are read as written, one after the other."""


def saving(config: Config, hardware: Hardware, models: list[tuple[Facts, list[StageMemory]]]) -> Saving:
    """The checkpoint of the trained models, each with its stages: the policy, and PPO's critic."""
    layout, each = config.training.layout.sizes(), file_bytes(config)
    held = sum(max(stage.parameters for stage in stages) for _, stages in models)
    ranks = min(hardware.gpus_per_node, layout.world_size)
    replicas = layout.edp if layout.ep > 1 else layout.dp * layout.cp
    num_bytes = sum(facts.parameters_total for facts, _ in models) * each
    node_bytes = min(num_bytes, ranks * held * each)
    return Saving(
        num_bytes=num_bytes,
        node_bytes=node_bytes,
        host_bytes=ranks * (held * (GATHERED + JOINED) + held * GATHERED // replicas),
        seconds=node_bytes / hardware.storage_bytes_per_second,
    )


def exporting(config: Config, hardware: Hardware, facts: Facts) -> Exporting:
    """A folder of the policy's weights in training.dtype."""
    size = facts.parameters_total * DTYPE_BYTES[config.training.dtype]
    return Exporting(
        num_bytes=size,
        host_bytes=min(size, config.export.max_shard_bytes),
        seconds=2 * size / hardware.storage_bytes_per_second,
    )


def saves(config: Config) -> bool:
    """Whether the run saves checkpoints at all."""
    return config.loop.checkpoint.every_steps > 0 or config.loop.checkpoint.at_end


def file_bytes(config: Config) -> int:
    """Bytes of a checkpoint for each parameter."""
    element = DTYPE_BYTES[config.training.dtype]
    return element + (8 if config.training.dtype == "float32" else 12)
