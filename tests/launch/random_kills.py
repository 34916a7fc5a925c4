"""Faults by dice: random processes, at random moments of random phases, of runs of every kind that has other processes or phases."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mrl.observe.metrics_log import read
from mrl.report.audit import audit, audit_text
from tests.launch import acting_runs, tiny_runs
from tests.launch.killed_runs import LASTS, Chain, assert_outcome

STREAM = ("loop.schedule=stream", "stream={max_age: 2, pool: {memory_bytes: 0}}", "model.max_length=32")
STREAM += ("rollout={max_response_tokens: 24, max_num_seqs: 4}",)
ONE = "training.layout={tp: 1, pp: 1, ep: 1, dp: 1}"
TOOLED = f"agent.environment={Path(__file__).parent}/environments.py:Tooled"
PHASES = ("generate", "recompute", "estimate", "update", "park", "save", "sync")
LONGEST_SECONDS = 10.0
"""From a death to its line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A kind of run, and which of its processes there are to kill."""

    words: tuple[str, ...]
    ends: tuple[str, ...]
    """Targets whose death ends a run; the others are replaced."""
    replaced: tuple[str, ...] = ("reward",)
    acts: bool = False
    phases: tuple[str, ...] = PHASES
    per_step: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"park": 2, "save": 2})
    """How often a step has a phase, where that is not once."""


KINDS = {
    "on policy": Kind(
        ("training.layout={tp: 1, pp: 2, ep: 1, dp: 1}", "rollout.tp=2"),
        ("driver", "train-0", "train-1", "engine-0", "vllm-0"),
        phases=("generate", "reward", "filter", "recompute", "estimate", "update", "save", "sync"),
        per_step={},
    ),
    "shared": Kind(
        (*STREAM, "training.layout={tp: 1, pp: 2, ep: 1, dp: 1}", "rollout.tp=2"),
        ("driver", "train-0", "train-1", "engine-0", "vllm-0"),
    ),
    "own": Kind(
        (*STREAM, ONE, "rollout.tp=1", "launch.engine_slots=1"),
        ("driver", "train-0", "engine-0"),
        per_step={"save": 2},
    ),
    "own, tp": Kind(
        (*STREAM, ONE, "rollout.tp=2", "launch.engine_slots=2"),
        ("driver", "train-0", "engine-0", "vllm-0"),
        per_step={"save": 2},
    ),
    "own, dp": Kind(
        (*STREAM, ONE, "rollout={tp: 1, dp: 2, expert_parallel: true}", "launch.engine_slots=2"),
        ("driver", "train-0", "engine-0", "engine-1"),
        per_step={"save": 2},
    ),
    "episodes": Kind(
        (
            *STREAM[:2],
            TOOLED,
            "rollout.max_num_seqs=6",
            "loop.prompts_per_step=2",
            "loop.samples_per_prompt=2",
        ),
        ("driver", "train-0", "engine-0"),
        ("reward", "host", "guest", "tool"),
        acts=True,
    ),
}


class RandomKills:
    """A run of one kind under faults by dice, from a seed."""

    def __init__(self, kind: Kind, words: Callable[..., list[str]], folder: Path, seed: int) -> None:
        self.kind, self._dice = kind, random.Random(seed)
        self.chain = Chain(words, folder, *kind.words, *LASTS)
        self.told: list[str] = []
        """What was thrown, and the seconds from each death that ended a start to its line."""

    def ended(self, survived: int) -> None:
        """A start with so many faults that are survived, one a step from the second on, and then one that ends it."""
        dice, chain, kind = self._dice, self.chain, self.kind
        faults = [self._survived(number) for number in range(2, 2 + survived)]
        target, how = dice.choice(kind.ends), dice.choice(("kill", "kill", "kill", "term"))
        faults.append(self._fault(dice.choice(kind.phases), target, 2 + survived, how))
        before = chain.steps_saved()
        command, injected = chain.start("loop.steps=1000", fault=",".join(faults)), chain.num_injected()
        try:
            code = command.wait(seconds=900)
            records = chain.injected()[injected:]
            self._tell(faults, records)
            seconds = command.named_at - records[-1]["time"]
            self.told.append(f"exit {code}, named after {seconds:.1f} s")
            assert_outcome(command.output, code, records[-1])
            assert target == "driver" or seconds < LONGEST_SECONDS, self.told[-1]
            chain.assert_nothing_left(command)
        finally:
            command.end()
        found = audit(chain.run_folder)
        assert found.holds, audit_text(found)
        assert chain.steps_saved() >= before + survived, command.output[-3000:]
        assert (f"resuming at step {before + 1}" in command.output) == (before > 0)

    def finish(self, survived: int) -> list[Mapping[str, Any]]:
        """A start with so many faults that ends well; all rows of the run. `mrl audit` has looked at all."""
        faults = [self._survived(number) for number in range(2, 2 + survived)]
        last, injected = self.chain.steps_saved() + survived + 2, self.chain.num_injected()
        self.chain.finish(f"loop.steps={last}", fault=",".join(faults))
        self._tell(faults, self.chain.injected()[injected:])
        rows = read(self.chain.run_folder / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(1, last + 1))
        assert all(row["reward/no_reward_frac"] == 0 for row in rows)
        return rows

    def _tell(self, faults: Sequence[str], records: Sequence[Mapping[str, Any]]) -> None:
        self.told += faults
        assert len(records) == len(faults), f"{faults}: only {records}"

    def _survived(self, step: int) -> str:
        """Of a process that is replaced, or of any for a few seconds."""
        dice, kind = self._dice, self.kind
        if dice.random() < 0.3:
            return self._fault(dice.choice(kind.phases), dice.choice(kind.ends), step, "pause")
        target = dice.choice(kind.replaced)
        phase = "generate" if target in ("guest", "tool") else dice.choice(kind.phases)
        return self._fault(phase, target, step, dice.choice(("kill", "term")))

    def _fault(self, phase: str, target: str, step: int, how: str) -> str:
        """In a step of a start, from 1, which has the phase once or more often."""
        times = self.kind.per_step.get(phase, 1)
        count = times * (step - 1) + self._dice.randint(1, times)
        return f"{phase}:{target}:{count}:{how}@{self._dice.uniform(0, 0.6):.2f}"


def of_kind(name: str, task: Path, acting: Path, folder: Path, seed: int) -> RandomKills:
    """`task`, `acting`: the folders with rows and models."""
    kind = KINDS[name]
    words = (
        functools.partial(acting_runs.words, acting)
        if kind.acts
        else functools.partial(tiny_runs.words, task)
    )
    return RandomKills(kind, words, folder, seed)
