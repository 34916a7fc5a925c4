"""What the driver takes next of that which engines, environments and reward workers bring, and when: the only place where time enters a stream.

All else that a driver does follows from what it has taken. So whoever decides this decides the run: the clock on the wall
(`Arrivals`), engine steps (engine_time.py), or a record of another run (replaying.py). recording.py writes such a record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from mrl.agents.answer import EnvironmentAnswer
from mrl.agents.tool_calls import ToolCall
from mrl.rollout.request import GenerationRequest, Response, Round
from mrl.rollout.stint import Beats
from mrl.samples import Prompt, Sample, Verdict

Digests = Callable[[], Sequence[int]]
"""Asks the trainer ranks for the digests of their weights."""


class Rollout(Protocol):
    """The engines as a schedule needs them. Those whose calls cannot last (mrl/rollout/stint.py) inherit the last three."""

    def submit(self, requested: Iterable[Round | GenerationRequest]) -> None: ...

    def at_work(self) -> Sequence[int]:
        """The engines that have calls under way."""
        ...

    def ended(self, timeout_seconds: float) -> Sequence[int]:
        """Those of them whose next calls ended; waits for the first at most so long."""
        ...

    def take(self, engines: Sequence[int]) -> list[Response]:
        """What the next calls of these engines bring; waits for their end."""
        ...

    def park(self) -> list[Response]:
        """Those that ended, and PARKED those that were begun; the others wait for `go_on`."""
        ...

    def go_on(self) -> None:
        """What waits may be begun, beside what is submitted next."""
        ...

    def under_way(self) -> Sequence[Any]:
        """Calls of the engines, for whoever waits for their end."""
        ...

    def where(self, prompt: int) -> str:
        """The engine that has a prompt's requests, by name."""
        ...

    def be_patient(self, seconds: float, awaited: int = -1) -> None:
        """How long a call may last from here on, or until it has ended what its engine had of prompts up to the index `awaited`; with 0
        those under way end soon."""

    def take_beats(self) -> Beats:
        """Of the calls that brought what was taken or parked since this was asked."""
        return ()

    def repeat(self, beats: Mapping[int, Sequence[int]]) -> None:
        """The next calls of each engine are to make so many."""


class RewardWorkers(Protocol):
    """The reward pool as a schedule needs it."""

    def submit_all(self, pairs: Iterable[tuple[Sample, Prompt]]) -> None: ...

    def collect(self, timeout_seconds: float) -> list[tuple[str, Verdict]]: ...

    def flush_groups(self, prompts: Collection[int]) -> None: ...


class Environments(Protocol):
    """The processes of the environments (mrl/agents/pool.py), an episode by its key; only `poll` waits."""

    def open(self, key: str, environment: str, task: Mapping[str, Any], seed: int) -> None: ...

    def step(self, key: str, text: str, calls: Sequence[ToolCall] = ()) -> None: ...

    def close(self, key: str) -> None: ...

    def poll(self, timeout_seconds: float) -> list[EnvironmentAnswer]: ...


class Arrivals:
    """Who decides; here the clock on the wall: whatever is there is taken."""

    def pumps(self, rollout: Rollout, *, room: int, beside: bool, timeout_seconds: float) -> bool:
        """Whether the producer pumps now, and admits `room` prompts first; `beside` a trainer, which is at work where the pump
        may not wait."""
        return True

    def owes_pumps(self) -> bool:
        """Whether pumps beside the trainer, which is done by now, are still to come."""
        return False

    @property
    def beats(self) -> Mapping[int, Sequence[int]]:
        """What the next calls of each engine are to make."""
        return {}

    def patience(self, seconds: float) -> float:
        """How long calls of the engines may last, where a schedule would let them last so long."""
        return seconds

    def engines(self, rollout: Rollout, timeout_seconds: float) -> Sequence[int]:
        """Those whose next calls are taken."""
        return rollout.ended(timeout_seconds)

    def brought(self, engines: Sequence[int], responses: Sequence[Response], beats: Beats) -> None:
        """What these calls brought."""

    @property
    def awaits_environments(self) -> bool:
        """Whether a look goes on until no environment owes an answer."""
        return False

    def answers(self, environments: Environments, timeout_seconds: float) -> list[EnvironmentAnswer]:
        """Those that the driver sees now; at least one environment owes one."""
        return environments.poll(timeout_seconds)

    def said(self, answers: Sequence[EnvironmentAnswer]) -> None:
        """What environments said in this look."""

    def answered(self, names: Sequence[str], *, rests: bool) -> None:
        """The reward workers have all samples of a group; `rests`: one that is at rest until the engines go on after a weight sync."""

    def verdicts(self, workers: RewardWorkers, timeout_seconds: float) -> list[tuple[str, Verdict]]:
        """Those that the driver sees now."""
        return workers.collect(timeout_seconds)

    def parked(self, responses: Sequence[Response], beats: Beats) -> None:
        """What the engines brought when they were stopped."""

    def goes_on(self) -> None:
        """The engines go on after a weight sync."""

    def starts(self, version: int, weights: Digests) -> None:
        """The trainer has the weights that the run begins with."""

    def validates_first(self, owes: bool) -> bool:
        """Whether a validation comes before the first step; `owes`: a run that resumes lacks the one behind its checkpoint."""
        return owes

    def trained(self, step: int, indices: Sequence[int], weights: Digests) -> None:
        """A step made new weights of the groups of these prompts."""

    def ends(self, step: int) -> None:
        """A step is over, its weight sync and validation included where they were due."""
