"""The ways to share a configuration's slots out between trainer and engines, and the times of each from the capacity estimate.

All slots of the configuration are given out again: the layout's dp follows from what the trainer keeps, tp, pp, cp and ep stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import pydantic

from mrl.capacity.advice import deadline_errors, memory_errors
from mrl.capacity.estimate import Estimate
from mrl.capacity.hardware import Hardware
from mrl.capacity.step_time import (
    decode_step,
    microbatches,
    most_concurrent,
    prefill_seconds,
    training_time,
    work_of,
)
from mrl.capacity.training_memory import GRADIENT_BYTES
from mrl.config.root import Config
from mrl.errors import ConfigError
from mrl.resharding.planner.manifest import DTYPE_BYTES
from mrl.simulation.leaves import EngineSpeed, Leaves

BEAT_STEPS = 4
"""Steps that an engine makes before it looks up (launch/workers/rollout_group.py), in each of the two calls under way."""


def with_engine_slots(config: Config, engine_slots: int) -> Config | None:
    """The configuration on the same slots, so many of them the engines' own; None where layout or engines cannot be cut so."""
    layout, ranks = config.training.layout, config.rollout.ranks
    sizes = layout.sizes()
    replica = sizes.world_size // sizes.dp
    trainer = config.num_slots - engine_slots
    if trainer < replica or trainer % replica or engine_slots % ranks or engine_slots < 0:
        return None
    values = config.model_dump()
    values["training"]["layout"] |= {"dp": trainer // replica}
    values["launch"] |= {"engine_slots": engine_slots}
    try:
        return Config.model_validate(values)
    except pydantic.ValidationError:
        return None


class Places:
    """The placements of one configuration on one kind of machine."""

    def __init__(self, config: Config, hardware: Hardware) -> None:
        """ConfigError where the model is unknown, or nothing can be cut."""
        self._hardware, self._work = hardware, work_of(config, hardware)
        ranks = config.rollout.ranks
        found = {n: with_engine_slots(config, n) for n in range(0, config.num_slots, ranks)}
        self.configs = {n: placed for n, placed in found.items() if placed is not None}
        """By the engines' own slots; 0 shares all slots."""
        if not self.configs:
            raise ConfigError(f"{config.num_slots} slots cannot be shared out between trainer and engines")
        self._estimates = {n: Estimate(placed, hardware) for n, placed in self.configs.items()}
        self._first = next(iter(self._estimates.values()))
        """Knows what all have in common: the model, one engine, one trainer rank's weights."""
        own = sorted(n for n in self.configs if n)
        self._typical = {True: 0, False: own[len(own) // 2] if own else 0}
        """The placement whose weight sync stands for that of all: shared, and the one in the middle."""
        self._known: dict[int, Leaves] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self.configs)

    def leaves(self, engine_slots: int) -> Leaves:
        """The times of a placement."""
        if engine_slots not in self._known:
            self._known[engine_slots] = self._leaves(engine_slots)
        return self._known[engine_slots]

    def problems(self, engine_slots: int) -> list[str]:
        """Why `mrl train` would not start there, or where it would run out of memory or time."""
        estimate = self._estimates[engine_slots]
        return estimate.unmet or [*memory_errors(estimate), *deadline_errors(estimate)]

    @cached_property
    def _speed(self) -> EngineSpeed:
        return engine_speed(self._first)

    def _leaves(self, engine_slots: int) -> Leaves:
        estimate, work, shares = self._estimates[engine_slots], self._work, engine_slots == 0
        config, first = self.configs[engine_slots], self._first
        typical, speed = self._estimates[self._typical[shares]], self._speed
        trained = first.stages[first.fullest_stage].policy.trained
        replicas, of_first = (e.layout.dp * e.layout.cp for e in (estimate, first))
        sent = trained * (GRADIENT_BYTES + DTYPE_BYTES[config.training.dtype]) * (replicas - 1) / replicas
        times = training_time(
            first.facts,
            self._hardware,
            work,
            estimate.layout,
            training=config.training,
            num_microbatches=microbatches(config, work)[1],
            exchanged_bytes=sent,
            resting_bytes=first.resting_bytes * of_first // replicas,
        )
        return Leaves(
            engine=speed,
            num_engines=config.num_engines * config.rollout.dp,
            shares_slots=shares,
            train_fixed_seconds=times.gradient_exchange,
            train_seconds_per_token=(times.log_probs + times.update) / work.tokens,
            sync_seconds=typical.sync_seconds,
            park_seconds=1.5 * BEAT_STEPS * speed.step(speed.capacity, 0.0),
            turn_seconds=estimate.offload_seconds if shares else 0.0,
        )


def engine_speed(estimate: Estimate) -> EngineSpeed:
    """The decode steps of one engine, or of a dp rank, as the estimate has them."""
    facts, hardware, work, engine = estimate.facts, estimate.hardware, estimate.work, estimate.engine
    rollout = estimate.config.rollout
    per_context = engine.kv_bytes_per_token / (hardware.memory_bytes_per_second * hardware.decode_efficiency)
    context = work.prompt_tokens + work.response_tokens / 2
    steps = [
        decode_step(facts, hardware, work, rollout, engine, b) - b * context * per_context
        for b in range(most_concurrent(rollout, work, engine) + 1)
    ]
    prompt = max(1.0, work.prompt_tokens)
    return EngineSpeed(tuple(steps), per_context, prefill_seconds(facts, hardware, rollout, prompt) / prompt)
