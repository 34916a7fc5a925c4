"""Estimate the waits of a run that have a deadline, with the setting that limits each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from mrl.capacity.saving import Exporting, Saving, saves
from mrl.capacity.step_time import Work
from mrl.config.root import Config
from mrl.config.sections.shaping import MOST_PROMPTS

NEAR = 0.5
"""Share of its deadline above which a wait is called close to it, because the times are estimates."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """One wait with its own deadline."""

    name: str
    seconds: float
    deadline: float
    setting: str

    @property
    def share(self) -> float:
        """Share of its deadline; above 1 the run ends there."""
        return self.seconds / self.deadline


def waits(
    config: Config, work: Work, seconds: Mapping[str, float], saving: Saving, exporting: Exporting
) -> Iterator[Wait]:
    """Yield every wait of a step in order; `seconds` are the step's phases.

    Each round of dynamic sampling, each pass and each update has the phase's deadline for itself
    (mrl/loops/collect.py, launch/workers/actor_group.py): rounds lengthen a step but no wait.
    """
    phase, name = config.loop.phase_deadline_seconds, "loop.phase_deadline_seconds"
    yield Wait("one round of generate", seconds["generate"], phase, name)
    one_pass = seconds["log_probs"] / max(1, work.forward_passes)
    if work.passes_before:
        yield Wait("one pass for log-probs", one_pass * (1 + (work.reference == "pass")), phase, name)
    update = (seconds["update"] + seconds["gradient_exchange"]) / work.updates
    update += one_pass * work.passes_in_updates / (config.algorithm.epochs * config.algorithm.minibatches)
    yield Wait("one update", update, phase, name)
    if saves(config):
        yield Wait("one checkpoint", saving.seconds, phase, name)
    twice = 2 * config.sync.deadline_seconds
    yield Wait("one weight sync", seconds["sync"], twice, "twice sync.deadline_seconds")
    if config.export.every_steps:
        deadline = config.export.deadline_seconds
        yield Wait("one export", exporting.seconds, deadline, "export.deadline_seconds")


def most_rounds(config: Config) -> int:
    """Return the most rounds of generation in one step."""
    section = config.algorithm.filter
    if section is None:
        return 1
    return min(section.max_rounds, -(-MOST_PROMPTS // config.loop.prompts_per_step))
