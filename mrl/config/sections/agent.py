"""Episodes: what the policy acts in, and when an episode ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from mrl.section import Section


class EnvironmentSection(Section):
    """What answers the policy's turns on some rows."""

    environment: str | None = None
    """A shipped environment by its name, the entry point of one in the group mrl.environments, or package.module:Class; none
    where a response is all there is."""
    options: dict[str, Any] = {}
    """Keywords of its class."""


class AgentSection(EnvironmentSection):
    """The environments that answer the policy's turns; a sample of a row that has one is an episode."""

    domains: dict[str, EnvironmentSection] = {}
    """What answers on the rows of some domains, instead of the environment above."""
    tool_calls: Literal["hermes", "json"] = "hermes"
    """How the policy writes calls: each between <tool_call> and </tool_call>, or all of a turn that is seen as JSON."""
    show_tools: Literal["template", "system", "none"] = "template"
    """What shows the policy an environment's tools: the chat template (one that does not is refused), the system message, or nothing,
    where prompts or a supervised start have them."""
    max_turns: int = Field(default=8, ge=1)
    """Turns of the policy in an episode."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one turn; what the response has left when absent. A turn that is cut ends the episode: half a call is never
    carried out."""
    retries: int = Field(default=2, ge=0)
    """Times that an episode begins anew after a fault that the policy cannot have caused; after them it has no reward."""
    step_seconds: float = Field(default=30.0, gt=0)
    """Longest work of an environment on one turn."""
    reset_seconds: float = Field(default=60.0, gt=0)
    """Longest work of an environment before the first turn."""
    max_open: int | None = Field(default=None, ge=1)
    """Most environments that are open at once, of training and of a validation each; other samples wait in line, in the order of
    their prompts."""
    memory_mib: int = Field(default=2048, ge=64)
    """Private memory of the process of one episode's environment, and of each that it starts."""

    def faults(self) -> Iterator[str]:
        if all(each.environment is None for each in (self, *self.domains.values())):
            yield (
                "the section agent names no environment; give it one (agent.environment, agent.domains) or remove the section"
            )

    def of_domain(self, domain: str) -> EnvironmentSection:
        """What answers on a domain's rows."""
        return self.domains.get(domain, self)

    def key_of(self, domain: str) -> str | None:
        """What the environment of a domain's rows is called; None where there is none."""
        own = self.of_domain(domain)
        if own.environment is None:
            return None
        return own.environment if own is self else f"{own.environment} of {domain}"

    def environments(self) -> dict[str, EnvironmentSection]:
        """Every environment, by what it is called."""
        found: dict[str, EnvironmentSection] = {}
        if self.environment is not None:
            found[self.environment] = self
        return found | {
            key: own for domain, own in self.domains.items() if (key := self.key_of(domain)) is not None
        }
