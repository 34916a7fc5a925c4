"""What an environment is: the task's side of an episode, in plain Python.

    class Guess:
        def reset(self, task, seed):
            self.secret = random.Random(seed).randint(1, task["highest"])
            return "Guess my number."

        def step(self, text, calls):
            ...
            return Step("higher")

        def close(self):
            ...

Each episode has an object of its own, in a process of its own, made as `Class(**options)`; the methods may be coroutines. All
values are JSON's: text, numbers, lists, objects. A class method `prepare(**options)`, where there is one, is called once before
all episodes: what it leaves behind (imports, an index) is there in every episode's process. It must leave no thread running.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from mrl.agents.episode import EndedBy
from mrl.agents.tool_calls import ToolCall
from mrl.errors import MrlError

Said = str | Sequence[Mapping[str, str]]
"""What the policy is told: a text, which is one message of the user, or messages of a role and a content each."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What an environment makes of a turn."""

    observation: Said = ""
    """Messages of the roles user or tool, all of one role. Not shown where `done`."""
    reward: float | None = None
    """Of this turn, finite; None where turns have none. The episode's value is the sum."""
    done: bool = False
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """For people and metrics, never for the policy."""


class Environment(Protocol):
    """What a user writes; `tools` and `replayable` may be left out."""

    tools: Sequence[Mapping[str, Any]]
    """JSON schemas as chat templates take them: {"type": "function", "function": {"name", "description", "parameters"}}."""
    replayable: bool
    """Whether the same task, seed and turns give the same observations (True where left out). An episode of one that is not
    starts over after a restart of the run."""

    def reset(self, task: dict[str, Any], seed: int) -> Said:
        """What stands before the first turn: messages of the roles system, user and assistant, or one text of the user. Where it is
        empty, the row's own prompt stands."""
        ...

    def step(self, text: str, calls: Sequence[ToolCall]) -> Step:
        """What becomes of a turn: its text, and its tool calls, which have been read and checked against the schemas."""
        ...

    def close(self) -> None:
        """The episode is over; called once, with a deadline."""
        ...


class EpisodeEnded(MrlError, RuntimeError):
    """What `reset` or `step` raises to end an episode for a reason of a name. Whatever else it raises is a crash of ours."""

    ended_by: ClassVar[EndedBy] = EndedBy.ENV_CRASHED


class Unreachable(EpisodeEnded):
    """Ours: a service that the environment needs does not answer."""

    ended_by = EndedBy.ENV_UNREACHABLE


class SandboxLost(EpisodeEnded):
    """Ours: the sandbox of the policy's programs could not be had, or ended through no fault of theirs."""

    ended_by = EndedBy.SANDBOX_LOST


class ToolFailed(EpisodeEnded):
    """The policy's: what it asked of a tool ended the episode. It is scored by the rewards before this turn."""

    ended_by = EndedBy.TOOL_ERROR


class ToolTimedOut(EpisodeEnded):
    """The policy's, as `ToolFailed`: what it asked used up a tool's time."""

    ended_by = EndedBy.TOOL_TIMEOUT
