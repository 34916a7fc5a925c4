"""Estimate the memory of one slot over a step: trainer and engine on the same GPU.

In the order of a step: the engine serves and falls asleep, the trainer returns for log-probs and update, a
checkpoint is saved, gradients, optimizer and critic leave, rollout weights wake, a weight sync fills them,
trainer weights leave, the KV cache wakes. Both processes keep their own overhead throughout.

With separate slots both sides keep everything: the fullest trainer slot's events, then the engine slot's.
"""

from __future__ import annotations

import dataclasses

from mrl.capacity.hardware import Hardware


@dataclasses.dataclass(frozen=True, slots=True)
class SlotMemory:
    """Bytes of every part of the fullest slot."""

    weights: int
    gradients: int
    optimizer: int
    critic: int
    """Weights, gradients and optimizer state of PPO's critic; 0 without one."""
    activations: int
    working: int
    teacher_targets: int
    """Teacher targets of an update: hidden states and output layers."""
    log_prob_working: int
    """Bytes of passes without gradient, which keep no activations."""
    engine_weights: int
    engine_working: int
    kv_cache: int
    buckets: int
    staging: int
    """Largest module that is materialised while its windows arrive."""
    new_weights: int = 0
    """Weights that an engine takes while it generates (sync.overlap); 0 if they wait on the host."""
    judges: int = 0
    """Bytes of reward.engines that share slots, on the fullest GPU."""


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Use of a memory after one event of a step: a device here, a node's host in host_memory.py."""

    name: str
    parts: dict[str, int]
    """Bytes by part."""
    free: int
    """Free bytes; negative if the parts do not fit."""

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


def timeline(memory: SlotMemory, hardware: Hardware, *, sleeps: bool, offloads: bool) -> list[Event]:
    """Return all events of a step in order.

    Args:
        sleeps: The engine frees its memory while the trainer runs.
        offloads: The trainer frees its memory while the engine serves.
    """
    always = {
        "trainer process": hardware.trainer_process_bytes,
        "engine process": hardware.engine_process_bytes,
        "buckets": memory.buckets,
        "judges": memory.judges,
    }
    trainer = {"trainer weights": memory.weights}
    state = {"gradients": memory.gradients, "optimizer": memory.optimizer, "critic": memory.critic}
    stays = {} if offloads else trainer | state
    peak = {"activations": memory.activations, "working": memory.working, "teachers": memory.teacher_targets}
    engine = {"rollout weights": memory.engine_weights}
    serving = {"KV cache": memory.kv_cache, "engine working": memory.engine_working}
    resident = {} if sleeps else engine | {"KV cache": memory.kv_cache}
    staging = {"staging": memory.staging}
    events = [
        ("generate", engine | serving | stays),
        ("engine sleep", resident | stays),
        ("trainer onload", trainer | state | resident),
        ("log-probs", trainer | state | {"working": memory.log_prob_working} | resident),
        ("update", trainer | state | peak | resident),
        ("save", trainer | state | resident),
        ("optimizer offload", trainer | resident | stays),
        ("rollout weights wake", trainer | engine | resident | stays),
        ("weight sync", trainer | engine | staging | resident | stays),
        ("trainer weights offload", engine | resident | stays),
    ]
    return [_event(name, always | parts, hardware) for name, parts in events]


def timeline_of_pools(memory: SlotMemory, hardware: Hardware) -> list[Event]:
    """Return the events of a trainer slot, then of an engine slot; each has its half of the buckets."""
    buckets = {"buckets": memory.buckets // 2, "judges": memory.judges}
    trainer = {"trainer process": hardware.trainer_process_bytes, "trainer weights": memory.weights} | buckets
    trainer |= {"gradients": memory.gradients, "optimizer": memory.optimizer, "critic": memory.critic}
    engine = {"engine process": hardware.engine_process_bytes, "rollout weights": memory.engine_weights}
    engine |= buckets | {"KV cache": memory.kv_cache, "new weights": memory.new_weights}
    events = [
        ("trainer slot, log-probs", trainer | {"working": memory.log_prob_working}),
        (
            "trainer slot, update",
            trainer
            | {
                "activations": memory.activations,
                "working": memory.working,
                "teachers": memory.teacher_targets,
            },
        ),
        ("trainer slot, weight sync", trainer),
        ("engine slot, generate", engine | {"engine working": memory.engine_working}),
        ("engine slot, weight sync", engine | {"staging": memory.staging}),
    ]
    return [_event(name, parts, hardware) for name, parts in events]


def _event(name: str, parts: dict[str, int], hardware: Hardware) -> Event:
    filled = {part: size for part, size in parts.items() if size}
    return Event(name, filled, hardware.memory_bytes - sum(filled.values()))
