"""Answer to one environment call, and the names of its faults."""

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
    """Why a call has no answer. Faults are counted by it."""

    RAISED = "raised"
    EXITED = "exited"
    DEADLINE = "deadline"
    OVERSIZED = "oversized"
    REWARD = "reward"
    """The reward is not a finite number."""
    CONTRACT = "contract"
    """The answer has the wrong shape, or values that JSON does not have."""
    HOST_LOST = "host_lost"
    UNREACHABLE = "unreachable"
    SANDBOX_LOST = "sandbox_lost"
    TOOL_ERROR = "tool_error"
    TOOL_TIMEOUT = "tool_timeout"

    @property
    def ended_by(self) -> EndedBy:
        """End of the episode that the fault causes."""
        return _ENDS.get(self, EndedBy.ENV_CRASHED)


_ENDS = {
    EnvironmentFault.DEADLINE: EndedBy.ENV_DEADLINE,
    EnvironmentFault.UNREACHABLE: EndedBy.ENV_UNREACHABLE,
    EnvironmentFault.SANDBOX_LOST: EndedBy.SANDBOX_LOST,
    EnvironmentFault.TOOL_ERROR: EndedBy.TOOL_ERROR,
    EnvironmentFault.TOOL_TIMEOUT: EndedBy.TOOL_TIMEOUT,
}
NAMED = {ended_by: fault for fault, ended_by in _ENDS.items()}
"""The fault of each end that has one of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class EnvironmentResult:
    """Answer to an `open` or a `step`, exactly one per call."""

    key: str
    turn: int
    """0 for `open`, then 1, 2, ..."""
    messages: tuple[dict[str, str], ...] = ()
    """Role and content each: what precedes the first turn (turn 0), or what the policy sees next."""
    reward: float | None = None
    done: bool = False
    ended_by: EndedBy | None = None
    """ENV_DONE if `done`, or the end that a fault causes; None if the episode continues."""
    fault: EnvironmentFault | None = None
    reason: str = ""
    seconds: float = 0.0
    """Time from the call's start to its answer, in the environment's host."""
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def failed(
    key: str, turn: int, fault: EnvironmentFault, reason: str, seconds: float = 0.0
) -> EnvironmentResult:
    """Return the answer that reports a fault."""
    return EnvironmentResult(
        key, turn, ended_by=fault.ended_by, fault=fault, reason=reason[:_MAX_REASON], seconds=seconds
    )


def is_reward(value: Any) -> bool:
    """Return True for a finite number, of the standard library or NumPy, that fits a float."""
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:
        return False


def decode_answer(reply: Mapping[str, Any]) -> EnvironmentResult:
    """Decode a host's reply. An invalid answer becomes the fault CONTRACT; nothing is raised."""
    key, turn, seconds = str(reply["key"]), int(reply["turn"]), float(reply["seconds"])
    if "fault" in reply:
        return failed(key, turn, EnvironmentFault(reply["fault"]), str(reply.get("reason")), seconds)
    messages: Any = reply.get("messages")
    done: Any = reply.get("done")
    info: Any = reply.get("info")
    reward = reply.get("reward")
    wrong = _wrong_messages(messages, _STEP_ROLES if turn else _OPENING_ROLES)
    if not turn and (done or reward is not None):
        wrong = "the answer to reset contains a reward or an end"
    if not isinstance(done, bool) or not isinstance(info, dict):
        wrong = "done must be true or false, and info an object"
    if wrong:
        return failed(key, turn, EnvironmentFault.CONTRACT, wrong, seconds)
    if reward is not None and not is_reward(reward):
        return failed(
            key, turn, EnvironmentFault.REWARD, f"the reward {reward!r} is not a finite number", seconds
        )
    return EnvironmentResult(
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
    """Return what is wrong with the messages; empty if nothing is."""
    if not isinstance(messages, list):
        return f"an observation must be a text or a list of messages, not {type(messages).__name__}"
    for message in messages:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            return f"a message must have a role and a content, not {str(message)[:80]}"
        if message["role"] not in roles or not isinstance(message["content"], str):
            return f"a message must be a text of one of {sorted(roles)}, not {str(message)[:80]}"
        try:
            message["content"].encode()
        except UnicodeEncodeError as error:
            return f"a message must not contain lone surrogates: {error.reason} at {error.start}"
    if roles == _STEP_ROLES and len({message["role"] for message in messages}) > 1:
        return "the observations after a turn must have one role"
    return ""
