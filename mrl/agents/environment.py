"""Interface of an environment: the task's side of an episode, in plain Python.

    class Guess:
        def reset(self, task, seed):
            self.secret = random.Random(seed).randint(1, task["highest"])
            return "Guess my number."

        def step(self, text, calls):
            ...
            return Step("higher")

        def close(self):
            ...

Each episode has its own object, made as `Class(**options)`, in its own process; the methods may be
coroutines. All values are JSON values: text, numbers, lists, objects. An optional class method
`prepare(**options)` is called once before all episodes: what it leaves behind (imports, an index) is there in
every episode's process. It must leave no thread running."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from mrl.agents.episode import EndedBy
from mrl.agents.tool_calls import ToolCall
from mrl.errors import MrlError

ObservationText = str | Sequence[Mapping[str, str]]
"""Text for the policy, as one message of the user, or messages with a role and a content each."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """An environment's result of a turn."""

    observation: ObservationText = ""
    """A text, or messages that all have the role user or all have the role tool. Not shown if `done`."""
    reward: float | None = None
    """Finite reward of this turn; None if turns have none. The episode's value is the sum."""
    done: bool = False
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """For people and metrics, never for the policy."""


class Environment(Protocol):
    """Interface that a user implements; `tools` and `replayable` are optional."""

    tools: Sequence[Mapping[str, Any]]
    """JSON schemas as in chat templates: {"type": "function", "function": {"name", "description", ...}}."""
    replayable: bool
    """True (the default) if the same task, seed and turns give the same observations. If False, a resumed run
    restarts the open episodes."""

    def reset(self, task: dict[str, Any], seed: int) -> ObservationText:
        """Return what precedes the first turn: messages of the roles system, user and assistant, or one user
        text; if empty, the row's own prompt is used."""
        ...

    def step(self, text: str, calls: Sequence[ToolCall]) -> Step:
        """Return the result of a turn, given its text and its tool calls, checked against the schemas."""
        ...

    def close(self) -> None:
        """End the episode; called once, with a deadline."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """Where a program finds the policy. The same values are in the variables OPENAI_BASE_URL, OPENAI_API_KEY,
    ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY of its process, for programs that it starts."""

    url: str
    """Base URL for Anthropic's clients; OpenAI's add /v1 (`openai_url`)."""
    key: str
    """Key of this trajectory alone; void when `run` has returned."""
    name: str = "policy"
    """Name of the model; requests may use any."""

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    def variables(self) -> dict[str, str]:
        """Return the environment variables that clients read."""
        openai = {"OPENAI_BASE_URL": self.openai_url, "OPENAI_API_BASE": self.openai_url}
        anthropic = {"ANTHROPIC_BASE_URL": self.url, "ANTHROPIC_API_KEY": self.key}
        return openai | anthropic | {"OPENAI_API_KEY": self.key}


class Program(Protocol):
    """Interface of a program that calls the policy itself, instead of an Environment."""

    def run(self, task: dict[str, Any], seed: int, model: Model) -> float | Step | None:
        """Work on a task with a model that has OpenAI's and Anthropic's APIs; return the reward (None if
        `reward` judges the conversations), or a Step with it."""
        ...


class EpisodeEnded(MrlError, RuntimeError):
    """Raised by `reset` or `step` to end an episode for a named reason. Any other exception is a crash."""

    ended_by: ClassVar[EndedBy] = EndedBy.ENV_CRASHED


class Unreachable(EpisodeEnded):
    """Infrastructure failure: a service that the environment needs does not respond."""

    ended_by = EndedBy.ENV_UNREACHABLE


class SandboxLost(EpisodeEnded):
    """Infrastructure failure: the sandbox was not available, or ended through no fault of the policy."""

    ended_by = EndedBy.SANDBOX_LOST


class ToolFailed(EpisodeEnded):
    """Mistake of the policy: a tool call ended the episode. Rewards before this turn score it."""

    ended_by = EndedBy.TOOL_ERROR


class ToolTimedOut(EpisodeEnded):
    """Mistake of the policy, scored as for `ToolFailed`: a call used up the tool's time."""

    ended_by = EndedBy.TOOL_TIMEOUT
