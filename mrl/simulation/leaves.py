"""What a simulated run takes for given: the times of its parts, each a fact of the machines and not of the schedule."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSpeed:
    """One engine, or one dp rank of an engine: a decode step of b sequences with `context` tokens in all takes
    step_seconds[b] + seconds_per_context * context."""

    step_seconds: tuple[float, ...]
    """By the number of sequences that are decoded together, from none to as many as fit."""
    seconds_per_context: float = 0.0
    """Of a decode step, for each token that its sequences have so far."""
    prefill_seconds: float = 0.0
    """For each token of a prompt, and of a parked response that goes on; nothing is decoded meanwhile."""

    @classmethod
    def linear(
        cls,
        capacity: int,
        fixed: float,
        per_sequence: float = 0.0,
        per_context: float = 0.0,
        prefill: float = 0.0,
    ) -> EngineSpeed:
        """Steps of `fixed` + `per_sequence` * b + `per_context` * context seconds."""
        return cls(tuple(fixed + per_sequence * b for b in range(capacity + 1)), per_context, prefill)

    def with_capacity(self, capacity: int) -> EngineSpeed:
        """The straight line through its first two steps, for so many sequences."""
        first, second, *_ = self.step_seconds
        linear = EngineSpeed.linear(capacity, first, second - first)
        return dataclasses.replace(self, step_seconds=linear.step_seconds)

    @property
    def capacity(self) -> int:
        """Sequences that are decoded together at most."""
        return len(self.step_seconds) - 1

    def step(self, sequences: int, context: float) -> float:
        """Seconds of one decode step."""
        return self.step_seconds[sequences] + self.seconds_per_context * context

    def rate(self, sequences: int, context: float) -> float:
        """Tokens per second of so many sequences of `context` tokens each."""
        return sequences / self.step(sequences, sequences * context)


@dataclasses.dataclass(frozen=True, slots=True)
class Leaves:
    """The times of one placement of trainer and engines."""

    engine: EngineSpeed
    num_engines: int
    shares_slots: bool
    """Engines rest while the trainer works."""
    train_fixed_seconds: float = 0.0
    """Of a step, whatever its tokens."""
    train_seconds_per_token: float = 0.0
    """Of log-probs and update, prompts counted."""
    sync_seconds: float = 0.0
    park_seconds: float = 0.0
    """Between the driver's word and the last engine's stop; the engines work on."""
    turn_seconds: float = 0.0
    """On shared slots, for each step: the trainer's memory goes and comes back."""
    verdict_seconds: float = 0.0
    """From a group's last response to its last verdict."""

    def train_seconds(self, tokens: float) -> float:
        """Of a step that trains so many tokens."""
        return self.train_fixed_seconds + self.train_seconds_per_token * tokens
