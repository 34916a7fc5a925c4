"""Engines of a stream are lost at random: each prompt is trained once, every token keeps its version."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mrl.report.audit import audit, audit_text
from mrl.rollout.engine_client import EngineLost
from mrl.rollout.request import Completion, GenerationRequest
from tests.mrl.loops.table_policy import TableEngines, TableRun, config_of

FILTER = {"filter": {"min_reward_range": 0.0, "max_rounds": 4}}
OWN = ("loop.schedule=stream", "launch.engine_slots=1", "rollout.tp=1", "rollout.max_replacements=99")


class Mortal:
    """Loses a run's engine requests at random; they restart from the last pause's snapshot."""

    def __init__(self, engines: TableEngines, dice: random.Random) -> None:
        self._engines, self._dice, self.num_lost = engines, dice, 0
        self._generate, self._step = engines.generate, engines._step
        engines.generate, engines._step = self.generate, self.step  # type: ignore[method-assign]

    async def generate(self, request: GenerationRequest, so_far: Completion | None = None) -> Completion:
        while True:
            try:
                return await self._generate(request, so_far)
            except EngineLost as lost:
                (so_far,) = lost.args

    def step(self) -> None:
        self._step()
        if self._dice.random() < 0.1:
            self.num_lost += 1
            for entry in self._engines.open.values():
                if not entry.done.done() and self._dice.random() < 0.5:
                    entry.done.set_exception(EngineLost(entry.so_far))


@pytest.mark.parametrize(
    "words",
    [("stream={max_staleness: 2, sync_every: 2}",), ("stream={max_staleness: 1, sync_every: 3}",)],
    ids=str,
)
def test_each_prompt_once_whatever_engines_are_lost(words: tuple[str, ...], tmp_path: Path) -> None:
    run = TableRun(config_of(tmp_path, FILTER, "loop.steps=15", *OWN, *words))
    run.engines.tokens_per_step, run.engines.at_once, run.engines.step_seconds = 1, 12, 0.001
    mortal = Mortal(run.engines, random.Random(1))
    assert run.finished() == "done"
    assert mortal.num_lost > 3
    report = audit(tmp_path / "run")
    assert report.passes, audit_text(report)
    assert run.bounded_samples()
