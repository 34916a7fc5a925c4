"""Profile the steps and trainer ranks of launch.profile, as a listener of the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mrl.config.sections.launch import ProfileSection
from mrl.launch.workers.train_actor import TrainActor
from mrl.launch.workers.train_group import TrainGroup
from mrl.observe.phases import Event, PhaseClock


class StepProfiles:
    """Records each selected step from its first phase to the end of its weight sync."""

    def __init__(self, section: ProfileSection, ranks: TrainGroup, clock: PhaseClock) -> None:
        self._section, self._ranks, self._clock = section, ranks, clock
        self._steps = set(section.steps)
        self._is_recording = False

    def __call__(self, event: Event) -> None:
        if event == "enter" and not self._is_recording and self._clock.step in self._steps:
            self._steps.remove(self._clock.step)
            self._is_recording = True
            self._call(TrainActor.start_profile, self._clock.step)
        if not self._is_recording:
            return
        if event == "enter":
            self._call(TrainActor.enter_phase, self._clock.current)
        elif event == "leave":
            self._call(TrainActor.leave_phase)
            if self._clock.current == "sync":
                self._is_recording = False
                self._call(TrainActor.stop_profile)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        self._ranks.on_some(self._section.ranks, function, *arguments)
