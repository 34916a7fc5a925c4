"""Conversation between the policy and an environment, as tokens that only grow.

| state | what comes next | by |
|---|---|---|
| WANTS_TOKENS | the policy's turn, on `context` | an engine |
| WANTS_STEP | the environment's answer to the turn | an environment |
| ENDED | nothing; `ended_by` says why | |

A response to a plain prompt is an episode of one turn. Pure: no input or output, no waiting.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence

import numpy as np

from mrl.errors import RolloutError
from mrl.samples import Prompt, ResponseSegment, Sample, Status, Transcript, Turn
from mrl.sampling_masks import SamplingMasks, join_masks


class EpisodeState(enum.Enum):
    """State of an episode: what it waits for, or that it ended."""

    WANTS_TOKENS = "wants_tokens"
    WANTS_STEP = "wants_step"
    ENDED = "ended"


class EndedBy(enum.Enum):
    """Why an episode ended. Infrastructure failures are never scored: the policy cannot have caused them."""

    ANSWERED = "answered"
    ENV_DONE = "env_done"
    TURN_LIMIT = "turn_limit"
    CONTEXT_LIMIT = "context_limit"
    TOKEN_LIMIT = "token_limit"
    """A turn was cut: an incomplete call is never run."""
    BAD_CALL = "bad_call"
    TOOL_ERROR = "tool_error"
    TOOL_TIMEOUT = "tool_timeout"
    ENV_CRASHED = "env_crashed"
    ENV_UNREACHABLE = "env_unreachable"
    ENV_DEADLINE = "env_deadline"
    SANDBOX_LOST = "sandbox_lost"
    ENGINE_LOST = "engine_lost"

    @property
    def is_infrastructure_failure(self) -> bool:
        """True for an infrastructure failure, which says nothing about the policy."""
        return self in _OURS

    @property
    def status(self) -> Status:
        """Status of the sample: truncated if a limit ended it, as for a single response."""
        if self.is_infrastructure_failure:
            return Status.FAILED
        return Status.TRUNCATED if self in _CUT else Status.FINISHED


_OURS = {
    EndedBy.ENV_CRASHED,
    EndedBy.ENV_UNREACHABLE,
    EndedBy.ENV_DEADLINE,
    EndedBy.SANDBOX_LOST,
    EndedBy.ENGINE_LOST,
}
_CUT = {EndedBy.TURN_LIMIT, EndedBy.CONTEXT_LIMIT, EndedBy.TOKEN_LIMIT}


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Limits that end an episode regardless of the environment."""

    max_turns: int
    """Turns of the policy."""
    max_context: int
    """Tokens, including the prompt."""
    max_tokens: int
    """Tokens after the prompt, including observations."""
    max_turn_tokens: int
    """Tokens of one turn."""
    max_bad_calls: int = 0
    """Turns with a call that cannot be run; one more ends the episode."""


class Episode:
    """Tokens of one sample so far. Arrays are aligned with the response: all tokens after the prompt."""

    def __init__(self, prompt_tokens: np.ndarray, limits: Limits, *, opening: str = "") -> None:
        """`prompt_tokens`: [T] int32, not empty. `opening`: the environment's text in them."""
        self.prompt_tokens, self._limits, self._opening = np.asarray(prompt_tokens, np.int32), limits, opening
        self._tokens: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._versions: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        self._sampling_masks: list[tuple[SamplingMasks | None, int]] = []
        """Of each span of tokens, with its length."""
        self._segments: list[ResponseSegment] = []
        self._length = self._bad_calls = 0
        self.turns: list[Turn] = []
        self.state = EpisodeState.WANTS_TOKENS
        self.ended_by: EndedBy | None = None
        self.reason = ""
        """The environment's reason for the end, if it gave one."""

    @property
    def num_tokens(self) -> int:
        """Number of response tokens."""
        return self._length

    @property
    def last_token(self) -> int:
        """Last token, of the policy or of an observation."""
        return int(self._tokens[-1][-1])

    @property
    def budget(self) -> int:
        """Tokens that the next turn may have; below 1, none may begin."""
        return min(self._limits.max_turn_tokens, self._left)

    @property
    def _left(self) -> int:
        limits = self._limits
        return min(limits.max_tokens, limits.max_context - len(self.prompt_tokens)) - self._length

    def context(self) -> np.ndarray:
        """Return the tokens that an engine continues: [T_prompt + T] int32."""
        return np.concatenate([self.prompt_tokens, *self._tokens])

    def add_turn(
        self,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        segments: Sequence[ResponseSegment],
        *,
        text: str = "",
        is_cut: bool = False,
        sampling_masks: SamplingMasks | None = None,
    ) -> None:
        """Add a turn of the policy.

        Args:
            tokens, logprobs: [n] ids and their log-probs.
            segments: Segments of these tokens, counted from the turn's start.
            is_cut: The turn reached its token limit.
            sampling_masks: [n] tokens that each one was drawn from.

        Raises:
            RolloutError: The turn is empty, or it is not the policy's turn.
        """
        self._require(EpisodeState.WANTS_TOKENS, "a turn of the policy")
        if not len(tokens):
            raise RolloutError("an engine returned a turn without tokens")
        start = self._length
        self.turns.append(Turn(start, start + len(tokens), text))
        versions = np.repeat([s.version for s in segments], [s.end - s.start for s in segments])
        self._grow(tokens, logprobs, versions, trains=True, sampling_masks=sampling_masks)
        self._segments += [
            dataclasses.replace(s, start=s.start + start, end=s.end + start) if start else s for s in segments
        ]
        self.state = EpisodeState.WANTS_STEP
        if is_cut:
            self.end(EndedBy.TOKEN_LIMIT)

    def record_answer(self, observation: str, *, reward: float | None = None, seconds: float = 0.0) -> None:
        """Record the answer to the last turn. Raise RolloutError if the reward is not finite."""
        self._require(EpisodeState.WANTS_STEP, "an answer of the environment")
        if reward is not None and not math.isfinite(reward):
            raise RolloutError(f"turn {len(self.turns)} got the reward {reward}, which is not finite")
        self.turns[-1] = dataclasses.replace(
            self.turns[-1], observation=observation, reward=reward, seconds=seconds
        )

    def observe(self, tokens: np.ndarray) -> None:
        """Add a rendered observation: [n] ids that are read and never trained on. A limit may end the episode
        instead, with nothing added. Raise RolloutError if it is out of turn."""
        self._require(EpisodeState.WANTS_STEP, "an answer of the environment")
        if len(self.turns) >= self._limits.max_turns:
            self.end(EndedBy.TURN_LIMIT)
        elif self._left <= len(tokens):
            self.end(EndedBy.CONTEXT_LIMIT)
        else:
            count = len(tokens)
            self._grow(tokens, np.zeros(count), np.full(count, -1), trains=False)
            self.state = EpisodeState.WANTS_TOKENS

    def bad_call(self) -> None:
        """Count a turn with a call that cannot be run; one too many ends the episode."""
        self._bad_calls += 1
        if self._bad_calls > self._limits.max_bad_calls:
            self.end(EndedBy.BAD_CALL)

    def end(self, by: EndedBy, reason: str = "") -> None:
        """End the episode; if it has ended already, its first reason stays."""
        if self.state is not EpisodeState.ENDED:
            self.state, self.ended_by, self.reason = EpisodeState.ENDED, by, reason

    # -- the episode's sample --------------------------------------------------------------------------------

    def response(self) -> np.ndarray:
        """Return the response tokens: [T] int32."""
        return _joined(self._tokens, np.int32)

    def sample(self, prompt: Prompt, number: int, *, status: Status, text: str) -> Sample:
        """Return the sample as it is now."""
        return Sample(
            prompt_index=prompt.index,
            sample_index=number,
            prompt_tokens=self.prompt_tokens,
            response_tokens=self.response(),
            loss_mask=_joined(self._masks, np.bool_),
            rollout_logprobs=_joined(self._logprobs, np.float32),
            policy_versions=_joined(self._versions, np.int32),
            status=status,
            response_text=text,
            domain=prompt.domain,
            tag=prompt.tag,
            segments=tuple(self._segments),
            sampling_masks=join_masks(self._sampling_masks),
        )

    def transcript(self, *, faults: int = 0, restarts: int = 0) -> Transcript:
        """Return the turns, with the numbers of restarts."""
        ended_by = self.ended_by.value if self.ended_by else ""
        return Transcript(tuple(self.turns), self._opening, ended_by, self.reason, faults, restarts)

    def _grow(
        self,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        versions: np.ndarray,
        *,
        trains: bool,
        sampling_masks: SamplingMasks | None = None,
    ) -> None:
        assert len(tokens) == len(logprobs) == len(versions), "one log-prob and one version per token"
        self._tokens.append(np.asarray(tokens, np.int32))
        self._logprobs.append(np.asarray(logprobs, np.float32))
        self._versions.append(np.asarray(versions, np.int32))
        self._sampling_masks.append((sampling_masks, len(tokens)))
        self._masks.append(np.full(len(tokens), trains))
        self._length += len(tokens)

    def _require(self, state: EpisodeState, event: str) -> None:
        if self.state is not state:
            raise RolloutError(f"{event} came for an episode that is {self.state.value}")


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
