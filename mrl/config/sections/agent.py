"""Settings of episodes: environments, tools, turns and limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from mrl.config.sections.programs import ProgramSection
from mrl.section import Section

_COMMANDS = "mrl.agents.envs.command_program:CommandProgram"
"""Environment of programs that are commands."""
_LEAST_PROGRAM_MIB = 512


class EnvironmentSection(Section):
    """Environment of some rows."""

    environment: str | None = None
    """Choose a shipped environment, entry point of mrl.environments or package.module:Class; null: none."""
    options: dict[str, Any] = {}
    """Pass these keyword arguments to its class."""
    python: str | None = None
    """Run it by the Python of another virtual environment (path), whose packages come before mrl's, and which
    has the same minor version; null: by the Python of mrl."""
    program: ProgramSection | None = None
    """Run a command in a sandbox, with the policy as its model, instead of an environment's class."""

    def faults(self) -> Iterator[str]:
        if self.program is not None and (self.environment is not None or self.options or self.python):
            yield "agent.program replaces agent.environment, agent.options and agent.python; remove them"

    @property
    def name(self) -> str | None:
        """Name of the environment or program; None if there is none."""
        return self.environment if self.program is None else "program"


class AgentSection(EnvironmentSection):
    """Environments that reply to the policy's turns; a sample of a row that has one is an episode."""

    domains: dict[str, EnvironmentSection] = {}
    """Use another environment on the rows of these domains."""
    tool_calls: Literal["hermes", "json"] = "hermes"
    """Read tool calls from between <tool_call> and </tool_call> (hermes), or take a turn's whole visible text
    as JSON (json)."""
    show_tools: Literal["template", "system", "none"] = "template"
    """Show the policy an environment's tools by the chat template (refused if it shows none), the system
    message, or not at all (none: prompts or a supervised start cover them)."""
    max_turns: int = Field(default=8, ge=1)
    """End an episode after this many turns of the policy."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Cut a turn after this many tokens, which ends the episode without its tool call; null allows all that
    is left of the response."""
    retries: int = Field(default=2, ge=0)
    """Restart an episode this often after a fault the policy cannot have caused; then it has no reward."""
    step_seconds: float = Field(default=30.0, gt=0)
    """Limit an environment's work on one turn to this many seconds."""
    reset_seconds: float = Field(default=60.0, gt=0)
    """Limit an environment's work before the first turn to this many seconds."""
    run_seconds: float = Field(default=1800.0, gt=0)
    """Limit a program that calls the policy itself to this many seconds, with its waits for the policy."""
    max_environments: int | None = Field(default=None, ge=1)
    """Keep at most this many environments open for training, and as many per validation; other samples wait
    in prompt order. Null sets no limit."""
    memory_mib: int = Field(default=2048, ge=64)
    """Limit the private memory (MiB) of each environment process, and of each process that it starts; a
    cgroup, where there is one, limits all processes of a program's sandbox together."""

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        sections = (self, *self.domains.values())
        if all(section.name is None for section in sections):
            yield (
                "the section agent names no environment; set agent.environment, agent.program or "
                "agent.domains, or remove the section"
            )
        for program in (section.program for section in sections if section.program is not None):
            if self.memory_mib < _LEAST_PROGRAM_MIB:
                yield (
                    f"agent.memory_mib = {self.memory_mib} is too little for agent.program, whose files pass "
                    f"through a process with this limit; set at least {_LEAST_PROGRAM_MIB}"
                )
            if program.least_seconds > self.run_seconds:
                yield (
                    f"agent.run_seconds = {self.run_seconds:g} is less than a program's seconds, its grade's "
                    f"and their sandboxes' boot_seconds together ({program.least_seconds:g}); set it higher, "
                    "or those lower"
                )

    def environment_of(self, domain: str) -> EnvironmentSection:
        """Return the environment section of a domain's rows."""
        return self.domains.get(domain, self)

    def key_of(self, domain: str) -> str | None:
        """Return the name of the environment of a domain's rows; None if they have none."""
        section = self.environment_of(domain)
        if section.name is None:
            return None
        return section.name if section is self else f"{section.name} of {domain}"

    def environments(self) -> dict[str, EnvironmentSection]:
        """Return every environment section by its name."""
        by_name: dict[str, EnvironmentSection] = {}
        if self.name is not None:
            by_name[self.name] = self._as_class(self)
        return by_name | {
            key: self._as_class(section)
            for domain, section in self.domains.items()
            if (key := self.key_of(domain)) is not None
        }

    def _as_class(self, section: EnvironmentSection) -> EnvironmentSection:
        """Return a program's section with the class that runs it."""
        if section.program is None:
            return section
        options = section.program.model_dump(mode="json") | {"memory_mib": self.memory_mib}
        return EnvironmentSection(environment=_COMMANDS, options=options)
