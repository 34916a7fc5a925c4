"""Does again what a record says (schedule_file.py), and compares all that comes with it."""

from __future__ import annotations

import collections
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from mrl.agents.answer import EnvironmentAnswer
from mrl.agents.tool_calls import ToolCall
from mrl.errors import ReplayError, RewardError
from mrl.loops.arrivals.as_they_come import Arrivals, Digests, Environments, RewardWorkers, Rollout
from mrl.loops.arrivals.schedule_file import (
    Event,
    ScheduleRecord,
    answer_told,
    describe_difference,
    told_response,
    told_verdict,
    verdict_told,
)
from mrl.rollout.request import Response
from mrl.rollout.stint import Beats
from mrl.samples import Prompt, Sample, Verdict


class NoRewardWorkers(RewardWorkers):
    """Where all verdicts are in the record nobody is asked."""

    def submit_all(self, pairs: Iterable[tuple[Sample, Prompt]]) -> None:
        pass

    def collect(self, timeout_seconds: float) -> list[tuple[str, Verdict]]:
        return []

    def flush_groups(self, prompts: Collection[int]) -> None:
        pass


class NoEnvironments(Environments):
    """Where all of their answers are in the record none is asked."""

    def open(self, key: str, environment: str, task: Mapping[str, Any], seed: int) -> None:
        pass

    def step(self, key: str, text: str, calls: Sequence[ToolCall] = ()) -> None:
        pass

    def close(self, key: str) -> None:
        pass

    def poll(self, timeout_seconds: float) -> list[EnvironmentAnswer]:
        return []


class Replaying(Arrivals):
    """The n-th thing that is taken is the record's n-th. ReplayError at the first that differs, with its step."""

    def __init__(self, record: ScheduleRecord, *, judge_again: bool, deadline_seconds: float) -> None:
        """`judge_again`: reward workers are asked too; their verdicts are compared, and those of the record are taken."""
        self._events, self._at = record.events, 0
        self.devices = record.header.devices
        self._is_logical = record.header.config.get("stream", {}).get("clock") == "logical"
        self._judge_again, self._deadline_seconds = judge_again, deadline_seconds
        self._step = record.header.first_step
        self._moved = False
        """Whether something was done since verdicts were looked for last."""
        self._came: dict[str, Verdict] = {}
        """Verdicts of reward workers that the record takes later."""
        self.compared = {"responses": 0, "tokens": 0, "weights": 0, "verdicts": 0}
        """What was equal so far."""
        self.other_verdicts: list[str] = []
        """Samples whose reward is another one than in the record, as words."""

    # -- the order -----------------------------------------------------------------------------------------------

    def pumps(self, rollout: Rollout, *, room: int, beside: bool, timeout_seconds: float) -> bool:
        if beside and not self.owes_pumps():
            return False
        (recorded,) = self._next("beside" if beside else "pump", f"to admit {room} prompts, or to wait")
        if recorded != room:
            raise self._parted(f"{room} prompts may be admitted where the record admits {recorded}")
        self._moved = True
        return True

    def owes_pumps(self) -> bool:
        return self._peek() == "beside"

    @property
    def beats(self) -> Mapping[int, Sequence[int]]:
        """Of all calls of the record."""
        found: collections.defaultdict[int, list[int]] = collections.defaultdict(list)
        for name, *values in self._events:
            for engine, beats in values[-1] if name in ("took", "park") else ():
                found[engine].append(beats)
        return found

    def patience(self, seconds: float) -> float:
        return 0.0

    def engines(self, rollout: Rollout, timeout_seconds: float) -> Sequence[int]:
        if self._peek() != "took":
            return []
        engines = self._events[self._at][1]
        if idle := sorted(set(engines) - set(rollout.at_work())):
            raise self._parted(f"engines {idle} have nothing to do where the record takes what they bring")
        self._moved = True
        return engines

    def brought(self, engines: Sequence[int], responses: Sequence[Response], beats: Beats) -> None:
        if engines:
            _, recorded, _ = self._next("took", "responses")
            self._compare(recorded, responses)

    @property
    def awaits_environments(self) -> bool:
        """As the run that was recorded."""
        return self._is_logical

    def answers(self, environments: Environments, timeout_seconds: float) -> list[EnvironmentAnswer]:
        if self._peek() != "answers":
            return []
        (told,) = self._next("answers", "answers of environments")
        self._moved = True
        return [answer_told(each) for each in told]

    def parked(self, responses: Sequence[Response], beats: Beats) -> None:
        recorded, _ = self._next("park", "to park")
        self._compare(recorded, responses)

    def verdicts(self, workers: RewardWorkers, timeout_seconds: float) -> list[tuple[str, Verdict]]:
        moved, self._moved = self._moved, False
        if self._peek() != "verdicts" and moved:
            return []
        (told,) = self._next("verdicts", "responses or verdicts")
        if self._judge_again:
            self._ask_again(workers, told)
        return [verdict_told(each) for each in told]

    # -- what is compared ----------------------------------------------------------------------------------------

    def starts(self, version: int, weights: Digests) -> None:
        _, recorded = self._next("start", "the run's start")
        self._compare_weights(recorded, weights, "the run begins with other weights than the record")

    def validates_first(self, owes: bool) -> bool:
        """As the run that was recorded: whether that owed one is not to be seen in this one's folder."""
        validates = self._peek() == "validates"
        if validates:
            self._next("validates", "a validation")
        return validates

    def trained(self, step: int, indices: Sequence[int], weights: Digests) -> None:
        _, prompts, recorded = self._next("trained", f"step {step} to be trained")
        if prompts != list(indices):
            raise self._parted(f"groups {list(indices)} are trained, in the record {prompts}")
        self._compare_weights(recorded, weights, "all tokens so far are equal, the new weights are not")

    def ends(self, step: int) -> None:
        self._next("end", f"the end of step {step}")
        self._step = step + 1

    def _compare(self, recorded: Sequence[Event], responses: Sequence[Response]) -> None:
        for theirs, response in zip(recorded, responses, strict=False):
            if said := describe_difference(theirs, told_response(response)):
                raise self._parted(said)
            self.compared["responses"] += 1
            self.compared["tokens"] += len(response.tokens)
        if len(recorded) != len(responses):
            raise self._parted(f"{len(responses)} responses came, in the record {len(recorded)}")

    def _compare_weights(self, recorded: Sequence[int], weights: Digests, said: str) -> None:
        digests = list(weights())
        if digests != list(recorded):
            ranks = [n for n, pair in enumerate(zip(recorded, digests, strict=False)) if pair[0] != pair[1]]
            raise self._parted(f"{said} (trainer ranks {ranks})")
        self.compared["weights"] += 1

    def _ask_again(self, workers: RewardWorkers, told: Sequence[Event]) -> None:
        deadline = time.monotonic() + self._deadline_seconds
        while missing := [each[0] for each in told if each[0] not in self._came]:
            self._came |= dict(workers.collect(1.0))
            if time.monotonic() > deadline:
                raise RewardError(
                    f"--judge-again: no verdict on sample {missing[0]} within {self._deadline_seconds:g} s"
                )
        for each in told:
            again = told_verdict(each[0], self._came.pop(each[0]))
            self.compared["verdicts"] += 1
            if again != each:
                self.other_verdicts.append(f"{each[0]}: {_short(each)}, asked again {_short(again)}")

    # -- the record ----------------------------------------------------------------------------------------------

    def _peek(self) -> str:
        return self._events[self._at][0] if self._at < len(self._events) else "nothing more"

    def _next(self, name: str, wanted: str) -> list[Any]:
        """The values of the next event, which is to be of this name."""
        if self._peek() != name:
            raise self._parted(f"the run comes to {wanted} where the record has {self._peek()!r}")
        values = self._events[self._at][1:]
        self._at += 1
        return values

    def _parted(self, said: str) -> ReplayError:
        same = f"{self.compared['responses']} responses and {self.compared['tokens']} tokens before are equal"
        return ReplayError(f"step {self._step} parts from the record: {said}; {same}")


def _short(told: Event) -> str:
    return f"{told[2]} {told[1]}" + (f" {told[3]}" if told[3] else "")
