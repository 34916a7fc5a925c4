"""Weights, gradients and optimizer state of each pipeline stage, as Megatron's buffers lay them out.

Every model chunk has one buffer for its dense parameters and, with expert parallelism, one for its experts.
Parameters start at multiples of 64 elements; a buffer ends at a multiple of 128 and of its data-parallel size
(with the distributed optimizer; megatron.core.distributed.param_and_grad_buffer). Gradients are float32 and
whole; the optimizer state (float32 master weights where parameters are not float32, two moments) is split
over the data-parallel ranks. With bfloat16 moments the master weights are the 2 bytes that a bfloat16
parameter lacks of them.
"""

from __future__ import annotations

import dataclasses
import math

from mrl.capacity.activations import Activations
from mrl.config.sections.training import TrainingSection
from mrl.models.facts import Facts
from mrl.models.layout import Layout
from mrl.resharding.planner.manifest import DTYPE_BYTES

GRADIENT_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one model on one rank of one pipeline stage."""

    parameters: int
    """Elements this rank holds, without padding."""
    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes of weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer


@dataclasses.dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of one trainer rank of a stage during an update."""

    policy: StageMemory
    critic: StageMemory
    activations: Activations

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return self.policy.total + self.critic.total + self.activations.kept + self.activations.working


def stage_memory(facts: Facts, training: TrainingSection, *, value_head: bool = False) -> list[StageMemory]:
    """The memory of the first rank of each stage; the others of a stage differ by padding alone.

    `value_head`: the model is a critic, which has one number per hidden state, whole on every rank, in place
    of the output layer.
    """
    layout = training.layout.sizes()
    per_stage = layout.tp * layout.cp * layout.dp
    return [
        _rank_memory(facts, training, layout, stage * per_stage, value_head=value_head)
        for stage in range(layout.pp)
    ]


def _rank_memory(
    facts: Facts, training: TrainingSection, layout: Layout, rank: int, *, value_head: bool
) -> StageMemory:
    sizes: dict[tuple[int, bool], list[int]] = {}
    correction = 0
    place = layout.place(rank)
    if value_head and place.pp == layout.pp - 1:
        sizes[layout.vpp - 1, False] = [facts.hidden]
    for tensor in facts.family.local_tensors(facts.hf, layout, place, dtype=training.dtype):
        if value_head and tensor.name == "output_layer.weight":
            continue
        if tensor.name.endswith("expert_bias"):
            correction += math.prod(tensor.shape)  # a buffer: neither gradient nor optimizer state
            continue
        expert = ".experts." in tensor.name and layout.ep > 1
        sizes.setdefault((tensor.chunk, expert), []).append(math.prod(tensor.shape))
    element = DTYPE_BYTES[training.dtype]
    state = {"bfloat16": 6, "float32": 8 if training.dtype == "float32" else 12}[
        training.optimizer.moments_dtype
    ]
    weights, gradients, optimizer = 4 * correction, 0, 0
    for (_, expert), group in sizes.items():
        replicas = layout.edp if expert else layout.dp * layout.cp
        padded = buffer_elements(group, replicas)
        weights += padded * element
        gradients += padded * GRADIENT_BYTES
        optimizer += min(padded // replicas, sum(group)) * state
    held = sum(map(sum, sizes.values()))
    return StageMemory(parameters=held, weights=weights, gradients=gradients, optimizer=optimizer)


def buffer_elements(sizes: list[int], replicas: int) -> int:
    """Elements of a buffer of parameters of these sizes, in order, with Megatron's padding."""
    end = 0
    for size in sizes:
        end = -(-end // 64) * 64 + size
    multiple = math.lcm(replicas, 128)
    return -(-end // multiple) * multiple
