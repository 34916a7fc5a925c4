"""What comes back of one call of an environment, and the names of its faults."""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
from collections.abc import Mapping
from typing import Any

from mrl.agents.episode import EndedBy

_OPENING_ROLES = {"system", "user", "assistant"}
_STEP_ROLES = {"user", "tool"}
_MAX_REASON = 600


class EnvironmentFault(enum.Enum):
    """Why a call has no answer: what is counted."""

    RAISED = "raised"
    EXITED = "exited"
    DEADLINE = "deadline"
    OVERSIZED = "oversized"
    REWARD = "reward"
    """A reward that is no finite number."""
    CONTRACT = "contract"
    """An answer of another shape, or of other values than JSON has."""
    HOST_LOST = "host_lost"
    UNREACHABLE = "unreachable"
    SANDBOX_LOST = "sandbox_lost"
    TOOL_ERROR = "tool_error"
    TOOL_TIMEOUT = "tool_timeout"

    @property
    def ended_by(self) -> EndedBy:
        """The end that it makes of an episode."""
        return _ENDS.get(self, EndedBy.ENV_CRASHED)


_ENDS = {
    EnvironmentFault.DEADLINE: EndedBy.ENV_DEADLINE,
    EnvironmentFault.UNREACHABLE: EndedBy.ENV_UNREACHABLE,
    EnvironmentFault.SANDBOX_LOST: EndedBy.SANDBOX_LOST,
    EnvironmentFault.TOOL_ERROR: EndedBy.TOOL_ERROR,
    EnvironmentFault.TOOL_TIMEOUT: EndedBy.TOOL_TIMEOUT,
}
NAMED = {ended_by: fault for fault, ended_by in _ENDS.items()}
"""The fault of an end that has one of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class EnvironmentAnswer:
    """Of one `open` or `step`, exactly one."""

    key: str
    turn: int
    """0 of `open`, then 1, 2, ..."""
    messages: tuple[dict[str, str], ...] = ()
    """A role and a content each: what stands before the first turn (turn 0), or what the policy is told next."""
    reward: float | None = None
    done: bool = False
    ended_by: EndedBy | None = None
    """ENV_DONE where `done`; the end that a fault makes; None where the episode goes on."""
    fault: EnvironmentFault | None = None
    reason: str = ""
    seconds: float = 0.0
    """From the call's start in the environment's host to its answer there."""
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def failed(
    key: str, turn: int, fault: EnvironmentFault, reason: str, seconds: float = 0.0
) -> EnvironmentAnswer:
    """The answer that a fault makes."""
    return EnvironmentAnswer(
        key, turn, ended_by=fault.ended_by, fault=fault, reason=reason[:_MAX_REASON], seconds=seconds
    )


def is_reward(value: Any) -> bool:
    """Whether it is a number (of the standard library or of NumPy) that a float holds and that is finite."""
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:
        return False


def decode_answer(reply: Mapping[str, Any]) -> EnvironmentAnswer:
    """A host's reply. What is none of an answer's makes the fault CONTRACT; nothing is raised."""
    key, turn, seconds = str(reply["key"]), int(reply["turn"]), float(reply["seconds"])
    if "fault" in reply:
        return failed(key, turn, EnvironmentFault(reply["fault"]), str(reply.get("reason")), seconds)
    messages: Any = reply.get("messages")
    done: Any = reply.get("done")
    info: Any = reply.get("info")
    reward = reply.get("reward")
    wrong = _wrong_messages(messages, _STEP_ROLES if turn else _OPENING_ROLES)
    if not turn and (done or reward is not None):
        wrong = "an answer to reset holds a reward or an end"
    if not isinstance(done, bool) or not isinstance(info, dict):
        wrong = "done is true or false, and info an object"
    if wrong:
        return failed(key, turn, EnvironmentFault.CONTRACT, wrong, seconds)
    if reward is not None and not is_reward(reward):
        return failed(
            key, turn, EnvironmentFault.REWARD, f"the reward {reward!r} is no finite number", seconds
        )
    return EnvironmentAnswer(
        key,
        turn,
        messages=tuple(messages),
        reward=None if reward is None else float(reward),
        done=done,
        ended_by=EndedBy.ENV_DONE if done else None,
        seconds=seconds,
        info=info,
    )


def _wrong_messages(messages: Any, roles: set[str]) -> str:
    """What is wrong with them; empty where nothing is."""
    if not isinstance(messages, list):
        return f"what the policy is told is a text or a list of messages, not {type(messages).__name__}"
    for message in messages:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            return f"a message has a role and a content, not {str(message)[:80]}"
        if message["role"] not in roles or not isinstance(message["content"], str):
            return f"a message is a text of one of {sorted(roles)}, not {str(message)[:80]}"
        try:
            message["content"].encode()
        except UnicodeEncodeError as error:
            return f"a message is a text without halves of characters: {error.reason} at {error.start}"
    if roles == _STEP_ROLES and len({message["role"] for message in messages}) > 1:
        return "the observations after a turn have one role"
    return ""
