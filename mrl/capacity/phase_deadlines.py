"""The waits of a run that have a deadline: what each is estimated to take, and the setting that bounds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from mrl.capacity.saving import Exporting, Saving, saves
from mrl.capacity.step_time import Work
from mrl.config.root import Config
from mrl.config.sections.shaping import MOST_PROMPTS

NEAR = 0.5
"""Share of its deadline above which a wait is called near it: the times are estimates."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """One wait with a deadline of its own."""

    name: str
    seconds: float
    deadline: float
    setting: str

    @property
    def share(self) -> float:
        """Of its deadline; above 1 the run ends there."""
        return self.seconds / self.deadline


def waits(
    config: Config, work: Work, seconds: Mapping[str, float], saving: Saving, exporting: Exporting
) -> Iterator[Wait]:
    """Every wait of a step, in its order; `seconds` are the step's phases.

    Each round of dynamic sampling, each pass and each update has the phase's deadline for itself
    (mrl/loops/collect.py, launch/workers/actor_group.py): rounds lengthen a step and no wait.
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
    """Rounds of generation that one step takes at most."""
    section = config.algorithm.filter
    if section is None:
        return 1
    return min(section.max_rounds, -(-MOST_PROMPTS // config.loop.prompts_per_step))
