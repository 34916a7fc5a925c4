"""Which ranks are told what in profiled steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mrl.config.load import load
from mrl.config.sections.launch import ProfileSection
from mrl.errors import ConfigError
from mrl.files import CONFIGS
from mrl.launch.workers.step_profiles import StepProfiles
from mrl.observe.phases import PhaseClock


class Ranks:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_some(self, numbers: Any, function: Callable[..., None], *arguments: Any) -> None:
        self.told.append(" ".join([function.__name__, *map(str, arguments), "on", *map(str, numbers)]))


def run(section: ProfileSection, steps: int) -> list[str]:
    """Steps of two phases, and one more after each, which is no step's."""
    clock, ranks = PhaseClock(), Ranks()
    clock.listeners.append(StepProfiles(section, ranks, clock))
    for number in range(1, steps + 1):
        clock.step = number
        for phase in ("generate", "sync", "generate"):
            with clock.phase(phase), clock.waiting():
                pass
    return ranks.told


def test_a_wanted_step_is_recorded_from_its_first_phase_to_its_weight_sync() -> None:
    told = run(ProfileSection(steps=(2,), ranks=(0, 5)), 3)
    assert told == [
        "start_profile 2 on 0 5",
        "enter_phase generate on 0 5",
        "leave_phase on 0 5",
        "enter_phase sync on 0 5",
        "leave_phase on 0 5",
        "stop_profile on 0 5",
    ]


def test_nobody_is_asked_where_no_step_is_wanted() -> None:
    assert run(ProfileSection(), 3) == []


def test_a_rank_that_there_is_not_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"profile\.ranks names \[8\]; trainer ranks are 0 to 7"):
        load([CONFIGS / "qwen3_30b_a3b.yaml"], ["launch.profile={steps: [1], ranks: [0, 8]}"])
