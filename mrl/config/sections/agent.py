"""Episodes: what the policy acts in, and when an episode ends."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mrl.section import Section


class AgentSection(Section):
    """The environment that answers the policy's turns. Where this section is present, every sample is an episode."""

    environment: str
    """A shipped environment by its name, the entry point of one in the group mrl.environments, or package.module:Class."""
    options: dict[str, Any] = {}
    """Keywords of its class."""
    tool_calls: Literal["hermes", "json"] = "hermes"
    """How the policy writes calls: each between <tool_call> and </tool_call>, or all of a turn that is seen as JSON."""
    max_turns: int = Field(default=8, ge=1)
    """Turns of the policy in an episode."""
    max_context: int | None = Field(default=None, ge=2)
    """Tokens of an episode with its prompt; model.max_length when absent. All behind the prompt, observations included, are the
    response, which rollout.max_response_tokens bounds."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one turn; what the response has left when absent. A turn that is cut ends the episode: half a call is never
    carried out."""
    max_bad_calls: int = Field(default=2, ge=0)
    """Turns with a call that cannot be carried out, of which the policy is told; one more ends the episode."""
    retries: int = Field(default=2, ge=0)
    """Times that an episode begins anew after a fault that the policy cannot have caused; after them it has no reward."""
    step_seconds: float = Field(default=30.0, gt=0)
    """Longest work of an environment on one turn."""
    reset_seconds: float = Field(default=60.0, gt=0)
    """Longest work of an environment before the first turn."""
    close_seconds: float = Field(default=5.0, gt=0)
    """Longest work of an environment after the last one."""
    answer_kib: int = Field(default=256, ge=1)
    """Longest answer of an environment; a longer one is a fault of ours."""
    memory_mib: int = Field(default=2048, ge=64)
    """Private memory of the process of one episode's environment, and of each that it starts."""
