"""One conversation between the policy and an environment, as tokens that only grow.

| state | what comes next | by |
|---|---|---|
| WANTS_TOKENS | the policy's turn, on `context` | an engine |
| WANTS_STEP | what the environment says to the turn | an environment |
| ENDED | nothing; `ended_by` says why | |

A response to a plain prompt is the episode of one turn. Pure: asks nobody, waits for nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence

import numpy as np

from mrl.errors import RolloutError


class State(enum.Enum):
    """What an episode waits for."""

    WANTS_TOKENS = "wants_tokens"
    WANTS_STEP = "wants_step"
    ENDED = "ended"


class EndedBy(enum.Enum):
    """Why an episode ended. The policy's ends are scored; ours never are, because the policy cannot have caused them."""

    ANSWERED = "answered"
    ENV_DONE = "env_done"
    TURN_LIMIT = "turn_limit"
    CONTEXT_LIMIT = "context_limit"
    TOKEN_LIMIT = "token_limit"
    """A turn was cut: half a call is never carried out."""
    BAD_CALL = "bad_call"
    TOOL_ERROR = "tool_error"
    TOOL_TIMEOUT = "tool_timeout"
    ENV_CRASHED = "env_crashed"
    ENV_UNREACHABLE = "env_unreachable"
    ENV_DEADLINE = "env_deadline"
    SANDBOX_LOST = "sandbox_lost"
    ENGINE_LOST = "engine_lost"

    @property
    def is_ours(self) -> bool:
        """Whether it says nothing of the policy."""
        return self in _OURS


_OURS = {
    EndedBy.ENV_CRASHED,
    EndedBy.ENV_UNREACHABLE,
    EndedBy.ENV_DEADLINE,
    EndedBy.SANDBOX_LOST,
    EndedBy.ENGINE_LOST,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """When an episode ends whatever the environment says."""

    max_turns: int
    """Turns of the policy."""
    max_context: int
    """Tokens, the prompt's included, beyond which no further turn begins."""


@dataclasses.dataclass(slots=True)
class Turn:
    """One turn of the policy: the tokens `start` to `end` of the response, and what the environment gave for it."""

    start: int
    end: int
    reward: float | None = None


class Episode:
    """The tokens of one sample so far. Every array is aligned with the response: all tokens behind the prompt."""

    def __init__(self, prompt_tokens: np.ndarray, limits: Limits) -> None:
        """`prompt_tokens`: [T] int32, not empty."""
        self._prompt, self._limits = np.asarray(prompt_tokens, np.int32), limits
        self._tokens: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._versions: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        self._length = 0
        self.turns: list[Turn] = []
        self.state = State.WANTS_TOKENS
        self.ended_by: EndedBy | None = None

    @property
    def num_tokens(self) -> int:
        """Of the response."""
        return self._length

    def context(self) -> np.ndarray:
        """[T_prompt + T] int32: what an engine goes on from."""
        return np.concatenate([self._prompt, *self._tokens])

    def add_turn(
        self, tokens: np.ndarray, logprobs: np.ndarray, versions: np.ndarray, *, is_cut: bool = False
    ) -> None:
        """What the policy wrote: [n] ids, their log-probs and the weights' versions. `is_cut`: it reached the limit of its tokens
        before its end. RolloutError for an empty turn, or out of turn."""
        self._require(State.WANTS_TOKENS, "a turn of the policy")
        if not len(tokens):
            raise RolloutError("an engine returned a turn without tokens")
        self.turns.append(Turn(self._length, self._length + len(tokens)))
        self._grow(tokens, logprobs, versions, trains=True)
        self.state = State.WANTS_STEP
        if is_cut:
            self.end(EndedBy.TOKEN_LIMIT)

    def observe(self, tokens: np.ndarray, *, reward: float | None = None) -> None:
        """What the environment says, as the renderer made it: [n] ids that are read and never trained on.

        `reward` is that of the turn before. The limits may end the episode here, with nothing appended. RolloutError for a
        reward that is not finite, or out of turn.
        """
        self.reward(reward)
        if len(self.turns) >= self._limits.max_turns:
            self.end(EndedBy.TURN_LIMIT)
        elif len(self._prompt) + self._length + len(tokens) >= self._limits.max_context:
            self.end(EndedBy.CONTEXT_LIMIT)
        else:
            count = len(tokens)
            self._grow(tokens, np.zeros(count), np.full(count, -1), trains=False)
            self.state = State.WANTS_TOKENS

    def reward(self, reward: float | None) -> None:
        """Notes the reward of the last turn; None where it has none."""
        self._require(State.WANTS_STEP, "an answer of the environment")
        if reward is not None and not math.isfinite(reward):
            raise RolloutError(f"an environment gave the reward {reward} to turn {len(self.turns)}")
        self.turns[-1].reward = reward

    def end(self, by: EndedBy) -> None:
        """Ends it; an episode that has ended keeps its first reason."""
        if self.state is not State.ENDED:
            self.state, self.ended_by = State.ENDED, by

    # -- the sample it makes -------------------------------------------------------------------------------------

    def response(self) -> np.ndarray:
        """[T] int32."""
        return _joined(self._tokens, np.int32)

    def loss_mask(self) -> np.ndarray:
        """[T] bool: True where the policy produced the token."""
        return _joined(self._masks, np.bool_)

    def logprobs(self) -> np.ndarray:
        """[T] float32, 0 on observations."""
        return _joined(self._logprobs, np.float32)

    def versions(self) -> np.ndarray:
        """[T] int32, -1 on observations."""
        return _joined(self._versions, np.int32)

    def turn_rewards(self) -> np.ndarray | None:
        """[T] float32: each turn's reward on its last token, which is the policy's; None where no turn has one."""
        if all(turn.reward is None for turn in self.turns):
            return None
        values = np.zeros(self._length, np.float32)
        for turn in self.turns:
            values[turn.end - 1] = turn.reward or 0.0
        return values

    def _grow(self, tokens: np.ndarray, logprobs: np.ndarray, versions: np.ndarray, *, trains: bool) -> None:
        assert len(tokens) == len(logprobs) == len(versions), "one log-prob and one version a token"
        self._tokens.append(np.asarray(tokens, np.int32))
        self._logprobs.append(np.asarray(logprobs, np.float32))
        self._versions.append(np.asarray(versions, np.int32))
        self._masks.append(np.full(len(tokens), trains))
        self._length += len(tokens)

    def _require(self, state: State, what: str) -> None:
        if self.state is not state:
            raise RolloutError(f"{what} came for an episode that is {self.state.value}")


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
