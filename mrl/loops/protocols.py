"""Engines, reward workers and environments as a schedule needs them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from mrl.agents.answer import EnvironmentAnswer
from mrl.agents.tool_calls import ToolCall
from mrl.rollout.request import GenerationRequest, Response, Round
from mrl.samples import Prompt, Sample, Verdict


class Rollout(Protocol):
    """The engines as a schedule needs them. Those whose calls cannot last (mrl/rollout/stint.py) inherit the last one."""

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
