"""Writes down what another one decides, and digests of what came (schedule_file.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mrl.agents.answer import EnvironmentAnswer
from mrl.loops.arrivals.as_they_come import (
    Arrivals,
    Digests,
    Environments,
    RewardWorkers,
    Rollout,
)
from mrl.loops.arrivals.schedule_file import ScheduleFile, told_answer, told_response, told_verdict
from mrl.rollout.request import Response
from mrl.rollout.stint import Beats
from mrl.samples import Verdict


class Recording(Arrivals):
    """Decides as `inner` does. A pump that admitted nothing and took nothing leaves no trace: it changed nothing."""

    def __init__(self, inner: Arrivals, file: ScheduleFile, num_lost: Callable[[], int] = lambda: 0) -> None:
        """`num_lost`: engines that the run has lost so far."""
        self._inner, self._file, self._num_lost = inner, file, num_lost
        self._pump: str | None = None
        """The pump that nothing was written of yet."""

    def pumps(self, rollout: Rollout, *, room: int, beside: bool, timeout_seconds: float) -> bool:
        goes = self._inner.pumps(rollout, room=room, beside=beside, timeout_seconds=timeout_seconds)
        self._pump = ("beside" if beside else "pump") if goes else None
        if goes and room:
            self._begin(room)
        return goes

    def owes_pumps(self) -> bool:
        return self._inner.owes_pumps()

    @property
    def beats(self) -> Mapping[int, Sequence[int]]:
        return self._inner.beats

    def patience(self, seconds: float) -> float:
        return self._inner.patience(seconds)

    def engines(self, rollout: Rollout, timeout_seconds: float) -> Sequence[int]:
        return self._inner.engines(rollout, timeout_seconds)

    def brought(self, engines: Sequence[int], responses: Sequence[Response], beats: Beats) -> None:
        self._inner.brought(engines, responses, beats)
        if engines:
            told = [told_response(response) for response in responses]
            self._add("took", list(engines), told, beats)

    @property
    def awaits_environments(self) -> bool:
        return self._inner.awaits_environments

    def answers(self, environments: Environments, timeout_seconds: float) -> list[EnvironmentAnswer]:
        return self._inner.answers(environments, timeout_seconds)

    def said(self, answers: Sequence[EnvironmentAnswer]) -> None:
        self._inner.said(answers)
        if answers:
            self._add("answers", [told_answer(answer) for answer in answers])

    def answered(self, names: Sequence[str], *, rests: bool) -> None:
        self._inner.answered(names, rests=rests)

    def verdicts(self, workers: RewardWorkers, timeout_seconds: float) -> list[tuple[str, Verdict]]:
        verdicts = self._inner.verdicts(workers, timeout_seconds)
        if verdicts:
            self._add("verdicts", [told_verdict(*verdict) for verdict in verdicts])
        self._pump = None
        return verdicts

    def parked(self, responses: Sequence[Response], beats: Beats) -> None:
        self._inner.parked(responses, beats)
        self._add("park", [told_response(response) for response in responses], beats)

    def goes_on(self) -> None:
        self._inner.goes_on()

    def starts(self, version: int, weights: Digests) -> None:
        self._inner.starts(version, weights)
        self._file.add("start", version, list(weights()))

    def validates_first(self, owes: bool) -> bool:
        validates = self._inner.validates_first(owes)
        if validates:
            self._file.add("validates")
        return validates

    def trained(self, step: int, indices: Sequence[int], weights: Digests) -> None:
        self._inner.trained(step, indices, weights)
        self._file.add("trained", step, list(indices), list(weights()))

    def ends(self, step: int) -> None:
        self._inner.ends(step)
        if self._num_lost():
            self._file.add("lost")
        self._file.add("end", step)
        self._file.flush()

    def _add(self, name: str, *values: object) -> None:
        if self._pump:
            self._begin(0)
        self._file.add(name, *values)

    def _begin(self, room: int) -> None:
        self._file.add(self._pump, room)
        self._pump = None
