"""Elastic slots of a stream over a table, woken and given back as dice say: every prompt is trained once, every token keeps its age and
is of the version that its stamp names."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from torch import Tensor

from mrl.loops.stream import StreamLoop
from mrl.pool.waking import Waking
from mrl.report.audit import audit, text
from mrl.rollout.request import Request, Response, Round
from mrl.samples import Sample, Status
from tests.mrl.loops.table_policy import TableRun, config_of

FILTER = {"filter": {"min_reward_range": 0.0, "max_rounds": 4, "on_exhausted": "train_on_fewer"}}
OWN = ("loop.schedule=stream", "launch.engine_slots=1", "rollout.tp=1")


class Dice(Waking):
    """Wakes whenever it feels like it."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__(own=1, sleepers=2, at_once=1)
        self._dice = dice

    def pays(self, now: float, unfinished: int) -> bool:
        return self._dice.random() < 0.4


class Lent:
    """The trainer's slots of a run, with engines that have some of the requests while they are awake, as `RolloutGroup` tells it."""

    def __init__(self, run: TableRun, dice: random.Random) -> None:
        self._engines, self._loop, self._dice = run.engines, run.loop, dice
        self._submit, self._sync = run.engines.submit, run.engines.sync
        self._theirs: set[str] = set()
        self.awake, self.trainer_is_there = False, True
        self.tables: dict[int, Tensor] = {}
        """What was served, by version."""
        self.num_begun_moved = 0
        for name in ("submit", "sync", "wake", "join", "leave", "rest"):
            setattr(run.engines, name, getattr(self, name))

    def submit(self, requested: Iterable[Round | Request]) -> None:
        before = set(self._engines.open)
        self._submit(requested)
        if self.awake:
            new = self._engines.open.keys() - before
            self._theirs |= {name for name in sorted(new) if self._dice.random() < 0.5}

    def sync(self, version: int) -> dict[str, float]:
        assert self.trainer_is_there and not self.awake, "the others would miss this version"
        told = self._sync(version)
        self.tables[version] = self._engines._table
        return told

    def wake(self) -> None:
        assert self.trainer_is_there and not self.awake
        assert self._engines.version == self._loop.version, "the trainer has other weights than are served"
        self.trainer_is_there = False

    def join(self) -> list[Response]:
        assert not self.trainer_is_there, "engines serve on slots that the trainer has"
        self.awake = True
        waiting = [name for name, opened in self._engines.open.items() if not opened.tokens]
        return [self._out(name) for name in waiting]

    def leave(self) -> list[Response]:
        self.awake, theirs, self._theirs = False, self._theirs, set()
        return [self._out(name) for name in [name for name in self._engines.open if name in theirs]]

    def rest(self) -> None:
        assert not self.awake and not self.trainer_is_there
        self.trainer_is_there = True

    def _out(self, name: str) -> Response:
        opened = self._engines.open.pop(name)
        self.num_begun_moved += bool(opened.tokens)
        return (
            self._engines._response(opened, Status.PARKED)
            if opened.tokens
            else Response.empty(name, Status.PARKED)
        )


@pytest.mark.parametrize(
    "words",
    [("max_age: 2",), ("max_age: 2, sync_every: 2",), ("max_age: 2, sync_every: 3, window: 3",)],
    ids=str,
)
@pytest.mark.parametrize("seed", range(2))
def test_each_prompt_once_whenever_engines_wake(words: tuple[str], seed: int, tmp_path: Path) -> None:
    stream = f"stream={{{words[0]}, elastic_slots: true}}"
    config = config_of(tmp_path, FILTER, "loop.steps=15", *OWN, stream)
    dice = random.Random(seed)
    run = TableRun(config)
    run.engines.tokens_per_poll, run.engines.at_once = 1, 12
    lent = Lent(run, dice)
    assert isinstance(run.loop, StreamLoop) and run.loop.elastic is not None
    run.loop.elastic.rule = Dice(dice)
    assert run.finished() == "done"
    rows = [row for row in run.rows() if row["step"] > 0]
    assert sum(row["stream/elastic_wakes"] for row in rows) > 4 and lent.num_begun_moved > 4
    found = audit(tmp_path / "run")
    assert found.holds, text(found)
    for sample in run.bounded_samples():
        assert_of_its_versions(sample, lent.tables)


def assert_of_its_versions(sample: Sample, tables: dict[int, Tensor]) -> None:
    last = int(sample.prompt_tokens[-1])
    drawn = zip(sample.response_tokens, sample.policy_versions, sample.rollout_logprobs, strict=True)
    for token, version, logprob in drawn:
        known = tables[int(version)][last].log_softmax(-1).double()[int(token)]
        assert float(known) == pytest.approx(float(logprob), abs=1e-5)
        last = int(token)
