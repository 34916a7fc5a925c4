"""Engines of a stream over a table are lost at random, some or all of them: every prompt is trained once, every token keeps its
version and age, and a resume knows nothing of it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from mrl.report.audit import audit, audit_text
from mrl.rollout.request import GenerationRequest, Response, Round, sample_of
from mrl.samples import Status
from tests.mrl.loops.table_policy import TableRun, config_of

FILTER = {"filter": {"min_reward_range": 0.0, "max_rounds": 4}}
OWN = ("loop.schedule=stream", "launch.engine_slots=1", "rollout.tp=1", "rollout.replace=99")


class Mortal:
    """Loses engines of a run where its dice say so, as `RolloutGroup` tells it: what they had comes back PARKED and empty; where none
    is left, requests wait until a weight sync brings one in."""

    def __init__(self, run: TableRun, dice: random.Random) -> None:
        self._engines, self._loop, self._dice = run.engines, run.loop, dice
        self._busy = lambda: run.train._pump is not None
        self._submit, self._take, self._park, self._sync = (
            getattr(run.engines, name) for name in ("submit", "take", "park", "sync")
        )
        self._homeless: list[Round | GenerationRequest] = []
        self.none_left, self.num_lost = False, 0
        for name in ("submit", "take", "park", "sync", "at_work"):
            setattr(run.engines, name, getattr(self, name))

    def submit(self, requested: Iterable[Round | GenerationRequest]) -> None:
        if self.none_left:
            self._homeless += requested
        else:
            self._submit(requested)

    def at_work(self) -> Sequence[int]:
        return [0] if self._engines.open else []

    def take(self, engines: Sequence[int]) -> list[Response]:
        if self.none_left and not self._busy() and self._loop.version == self._engines.version:
            self._come_back()
        return self._lost() + self._take([] if self.none_left else engines)

    def park(self) -> list[Response]:
        return self._lost() + self._park()

    def sync(self, version: int) -> dict[str, float]:
        told = self._sync(version)
        self._come_back()
        self._engines._waiting |= self._engines.open
        self._engines.open = {}
        return told

    def _come_back(self) -> None:
        self.none_left, homeless, self._homeless = False, self._homeless, []
        self._submit(homeless)

    def _lost(self) -> list[Response]:
        opened = self._engines.open
        if not opened or self._dice.random() > 0.2:
            return []
        self.none_left = self._dice.random() < 0.3
        engine = [name for name in opened if self.none_left or sample_of(name)[0] % 2]
        self.num_lost += bool(engine)
        for name in engine:
            del opened[name]
        return [Response.empty(name, Status.PARKED) for name in engine]


@pytest.mark.parametrize(
    "words",
    [
        ("stream={max_age: 2, sync_every: 2}",),
        ("stream={max_age: 1, sync_every: 3}",),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(2))
def test_each_prompt_once_whatever_engines_are_lost(
    words: tuple[str, ...], seed: int, tmp_path: Path
) -> None:
    config = config_of(tmp_path, FILTER, "loop.steps=15", *OWN, *words)
    dice = random.Random(seed)
    run = TableRun(config)
    run.engines.tokens_per_poll, run.engines.at_once = 1, 12
    mortal = Mortal(run, dice)
    assert run.finished() == "done"
    assert mortal.num_lost > 3
    found = audit(tmp_path / "run")
    assert found.holds, audit_text(found)
    assert run.bounded_samples()
