"""Estimate weights, gradients and optimizer state of each pipeline stage, as in Megatron's buffers.

Every model chunk has one buffer for dense parameters and one for experts, which have other replicas
(models/megatron/build.py, mark_expert_parameters). Parameters start at multiples of 64 elements; a buffer
ends at a multiple of 128 and of its data-parallel size (with the distributed optimizer;
megatron.core.distributed.param_and_grad_buffer), and so does each bucket that is reduced during the backward
pass, in place. Gradients are float32 and whole; the optimizer state (float32 master weights if parameters are
not float32, two moments) is split over the data-parallel ranks; off-loaded state arrives in pieces of
PIECE_BYTES or one parameter. With bfloat16 moments, master weights are the 2 bytes that bfloat16 parameters
lack.

With adapters (training.lora), only those have gradients and optimizer state; frozen weights have separate
buffers without that padding. One weight's gradient at a time, in its type, exists while it is turned into its
adapter's.
"""

from __future__ import annotations

import dataclasses
import math

from mrl.capacity.activations import Activations
from mrl.capacity.step_time import Work
from mrl.config.root import Config
from mrl.config.sections.training import PIECE_BYTES, TrainingSection
from mrl.models.adapters import adapters
from mrl.models.facts import ModelSize
from mrl.models.layout import Layout, RankCoordinates
from mrl.models.tensors import LocalTensor
from mrl.resharding.planner.manifest import DTYPE_BYTES

GRADIENT_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one model on one rank of one pipeline stage."""

    parameters: int
    """Elements of this rank, without padding."""
    trained: int
    """Elements that have gradients and optimizer state."""
    weights: int
    gradients: int
    optimizer: int
    """Optimizer state on the device: what stays there, and one off-loaded piece at a time."""
    offloaded: int
    """Optimizer state in host memory (optimizer.offload_fraction)."""

    @property
    def total(self) -> int:
        """Bytes of weights, gradients and optimizer state on the device."""
        return self.weights + self.gradients + self.optimizer


@dataclasses.dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one trainer rank of a stage during an update."""

    policy: StageMemory
    critic: StageMemory
    activations: Activations

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return self.policy.total + self.critic.total + self.activations.kept + self.activations.working


def stage_memory(
    facts: ModelSize, training: TrainingSection, *, value_head: bool = False
) -> list[StageMemory]:
    """Return the memory of the first rank of each stage; others of a stage differ only by padding.

    `value_head`: the model is a critic, with one number per hidden state, whole on every rank, instead of the
    output layer.
    """
    layout = training.layout.sizes()
    per_stage = layout.tp * layout.cp * layout.dp
    return [
        _rank_memory(facts, training, layout, stage * per_stage, value_head=value_head)
        for stage in range(layout.pp)
    ]


def _rank_memory(
    facts: ModelSize, training: TrainingSection, layout: Layout, rank: int, *, value_head: bool
) -> StageMemory:
    place, lora = layout.coordinates(rank), None if value_head else training.lora
    drafts = training.drafts == "trained" and not value_head
    table = facts.family.local_tensors(facts.hf, layout, place, dtype=training.dtype, drafts=drafts)
    if lora is not None:
        return _adapted_memory(facts, training, layout, place, table)
    sizes: dict[tuple[int, bool], list[int]] = {}
    correction = 0
    if value_head and place.pp == layout.pp - 1:
        sizes[layout.vpp - 1, False] = [facts.hidden]
    for tensor in table:
        if value_head and tensor.name == "output_layer.weight":
            continue
        if tensor.name.endswith("expert_bias"):
            correction += math.prod(tensor.shape)  # a buffer: neither gradient nor optimizer state
            continue
        expert = ".experts." in tensor.name
        sizes.setdefault((tensor.chunk, expert), []).append(math.prod(tensor.shape))
    trained = _trained_memory(sizes, training, place)
    return dataclasses.replace(trained, weights=trained.weights + 4 * correction)


def _adapted_memory(
    facts: ModelSize,
    training: TrainingSection,
    layout: Layout,
    place: RankCoordinates,
    table: list[LocalTensor],
) -> StageMemory:
    """Return the memory of frozen weights in separate buffers and adapters trained like weights."""
    assert training.lora is not None
    element, frozen, largest = DTYPE_BYTES[training.dtype], 0, 0
    sizes: dict[tuple[int, bool], list[int]] = {}
    by_name = {(tensor.chunk, tensor.name): math.prod(tensor.shape) for tensor in table}
    for tensor in table:
        frozen += -(-math.prod(tensor.shape) // 64) * 64 * DTYPE_BYTES[tensor.dtype]
    for adapter in adapters(facts.family, facts.hf, layout, place, training.lora, dtype=training.dtype):
        halves = [math.prod(half.tensor.shape) for half in (adapter.a, adapter.b)]
        sizes.setdefault((adapter.chunk, adapter.is_routed), []).extend(halves)
        largest = max(largest, by_name[adapter.chunk, adapter.parameter])
    trained = _trained_memory(sizes, training, place)
    return StageMemory(
        parameters=sum(by_name.values()) + trained.parameters,
        trained=trained.trained,
        weights=frozen + trained.weights,
        gradients=trained.gradients + largest * element,
        optimizer=trained.optimizer,
        offloaded=trained.offloaded,
    )


def _trained_memory(
    sizes: dict[tuple[int, bool], list[int]], training: TrainingSection, place: RankCoordinates
) -> StageMemory:
    """Return the memory of trained parameters, given by (model chunk, in the experts' buffer or not)."""
    layout = training.layout.sizes()
    element = DTYPE_BYTES[training.dtype]
    state = {"bfloat16": 6, "float32": 8 if training.dtype == "float32" else 12}[
        training.optimizer.moments_dtype
    ]
    weights, gradients, optimizer, largest = 0, 0, 0, PIECE_BYTES
    for (chunk, expert), group in sizes.items():
        replicas = layout.edp if expert else layout.dp * layout.cp
        bucket = training.summed_bucket() if place.pp == chunk == 0 else None
        padded = buffer_elements(group, replicas, bucket)
        weights += padded * element
        gradients += padded * GRADIENT_BYTES
        optimizer += min(padded // replicas, sum(group)) * state
        largest = max(largest, min(padded // replicas, max(group, default=0)) * state)
    count = sum(map(sum, sizes.values()))
    resting = int(optimizer * training.optimizer.offload_fraction)
    on_device = optimizer - resting + min(resting, largest)
    return StageMemory(count, count, weights, gradients, on_device, resting)


def teacher_target_bytes(config: Config, facts: ModelSize, work: Work) -> int:
    """Return the bytes of teacher targets on a rank of the last stage: a hidden state per token of an update,
    and each teacher's share of the output layer."""
    if config.algorithm.distillation is None:
        return 0
    layout = config.training.layout.sizes()
    tokens = work.samples * work.response_tokens / layout.dp / layout.cp / config.algorithm.minibatches
    heads = config.algorithm.num_teachers * facts.vocab / layout.tp
    return int((tokens + heads) * facts.hidden * DTYPE_BYTES[config.training.dtype])


def buffer_elements(sizes: list[int], replicas: int, bucket: int | None = None) -> int:
    """Return the elements of a parameter buffer (last parameter first) with Megatron's padding; `bucket`:
    elements after which a bucket ends, None for one bucket.

    >>> [buffer_elements([1, 1], 1), buffer_elements([1, 1], 1, 1)]
    [128, 256]
    """
    multiple = math.lcm(replicas, 128)
    start = end = 0
    for size in reversed(sizes):
        end = -(-end // 64) * 64 + size
        if bucket is not None and end - start >= bucket:
            start = end = -(-end // multiple) * multiple
    return -(-end // multiple) * multiple
