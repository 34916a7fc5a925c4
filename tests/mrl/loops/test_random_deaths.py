"""Twenty deaths of a stream, in any call of engines, trainer or rewards: each prompt is trained once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import WorkerLost
from mrl.report.audit import audit, audit_text
from tests.mrl.loops.table_policy import TableRun, config_of

FILTER = {"filter": {"min_reward_range": 0.0, "max_rounds": 4}}
STREAM = "loop.schedule=stream"
OWN = ("launch.engine_slots=1", "rollout.tp=1")
SETTINGS = {
    "shared": (STREAM, "stream.max_staleness=2", "loop.checkpoint={every_steps: 2, keep: 99}"),
    "own, beside": (
        *(STREAM, *OWN, "stream={max_staleness: 1, sync_every: 2}"),
        "loop.checkpoint={every_steps: 2, keep: 99, async_save: true}",
    ),
    "on policy": ("loop.checkpoint={every_steps: 2, keep: 99}",),
}


class Death:
    """Ends a run in the n-th call that a worker answers."""

    def __init__(self, run: TableRun, at: int) -> None:
        self._left = at
        for owner, names in (
            (run.engines, ("sync", "generate", "pause", "resume")),
            (run.train, ("accumulate", "step", "save_checkpoint", "commit_checkpoint")),
            (run.rewards, ("submit_all",)),
        ):
            for name in names:
                setattr(owner, name, self._mortal(name, getattr(owner, name)))

    def _mortal(self, name: str, call: Any) -> Any:
        def answer(*arguments: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                raise WorkerLost(f"a worker died in {name}")
            return call(*arguments, **options)

        return answer


@pytest.mark.parametrize("name", ["shared", "own, beside", pytest.param("on policy", marks=pytest.mark.slow)])
def test_each_prompt_once_over_twenty_random_deaths(name: str, tmp_path: Path) -> None:
    dice, deaths = random.Random(19), 0
    config = config_of(tmp_path, FILTER, "loop.steps=30", *SETTINGS[name])
    run = TableRun(config)
    while deaths < 20:
        run.engines.tokens_per_step, run.engines.at_once = 2, 20
        Death(run, dice.randint(1, 120))
        try:
            run.loop.start()
            assert run.loop.run() == "done"
            break
        except WorkerLost:
            deaths += 1
        run = again(run, config)
    run.engines.tokens_per_step, run.engines.at_once = 2, 20
    if deaths == 20:
        run.loop.start()
        assert run.loop.run() == "done"
    report = audit(tmp_path / "run")
    assert report.passes, audit_text(report)
    assert deaths > 5 and report.attempts > 5 and report.undone, audit_text(report)
    assert sum(not line.starts for line in report.lines) == 30


def again(run: TableRun, config: Any) -> TableRun:
    if not run.train.saved:
        run.close()
        return TableRun(config)
    resumed = run.resumed()
    resumed.train.saved |= run.train.saved
    return resumed
