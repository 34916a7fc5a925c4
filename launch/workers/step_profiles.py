"""Which steps and trainer ranks are profiled (launch.profile): a listener of the clock tells the ranks when to record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mrl.config.sections.launch import ProfileSection
from mrl.launch.workers.train_actor import TrainActor
from mrl.launch.workers.train_group import TrainGroup
from mrl.observe.phases import Event, PhaseClock


class StepProfiles:
    """Records each wanted step from its first phase to the end of its weight sync; without any it asks nobody anything."""

    def __init__(self, section: ProfileSection, ranks: TrainGroup, clock: PhaseClock) -> None:
        self._section, self._ranks, self._clock = section, ranks, clock
        self._left = set(section.steps)
        self._records = False

    def __call__(self, event: Event) -> None:
        if event == "enter" and not self._records and self._clock.step in self._left:
            self._left.remove(self._clock.step)
            self._records = True
            self._tell(TrainActor.start_profile, self._clock.step)
        if not self._records:
            return
        if event == "enter":
            self._tell(TrainActor.enter_phase, self._clock.current)
        elif event == "leave":
            self._tell(TrainActor.leave_phase)
            if self._clock.current == "sync":
                self._records = False
                self._tell(TrainActor.stop_profile)

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        self._ranks.on_some(self._section.ranks, function, *arguments)
