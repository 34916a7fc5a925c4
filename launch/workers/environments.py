"""Check the environments of a run's episodes before anything starts."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from mrl.agents.episode import Limits
from mrl.agents.pool import EnvironmentWorkers
from mrl.agents.render import TurnRenderer
from mrl.agents.tool_calls import tools_prompt
from mrl.config.root import Config
from mrl.config.sections.agent import AgentSection
from mrl.errors import ConfigError
from mrl.gateway.templates import Templates
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.trajectories.environment_rollout import EpisodeRules
from mrl.trajectories.program_rollout import ProgramRules

_log = logging.getLogger(__name__)

Tools = list[dict[str, Any]] | str
"""Tools for chat templates, or as the text of a system message."""

MAX_BAD_CALLS = 2
"""Turns with an invalid call that the policy gets an error for; one more ends the episode."""


@dataclasses.dataclass(frozen=True, slots=True)
class EnvironmentRules:
    """Rules and tools of a run's environments, with its chat template."""

    section: AgentSection
    rules: Mapping[str, tuple[EpisodeRules | ProgramRules, Tools]]
    """Rules and tools by environment key."""

    def rules_of(self, domain: str) -> EpisodeRules | ProgramRules | None:
        """Return the rules of the domain's episodes or programs; None if it has single responses."""
        key = self.section.key_of(domain)
        return None if key is None else self.rules[key][0]

    def for_rollouts(self) -> dict[str, Any]:
        """Return the arguments of a RolloutThread for episodes."""
        return {"rules_of": self.rules_of, "max_environments": self.section.max_environments}

    def tools_of(self, domain: str) -> Tools | None:
        """Return the tools of the domain's rows."""
        key = self.section.key_of(domain)
        return None if key is None else self.rules[key][1]


def check_environments(config: Config, tokenizer: Any) -> EnvironmentRules | None:
    """Check the environments and return them; None without episodes. Raises ConfigError if one cannot be
    made, or if the chat template changes earlier turns."""
    section = config.agent
    if section is None:
        return None
    with EnvironmentWorkers.of(section) as pool:
        rules = {key: _rules_of(pool, key, config, section, tokenizer) for key in section.environments()}
    return EnvironmentRules(section, rules)


def _program_rules(key: str, config: Config, section: AgentSection, tokenizer: Any) -> ProgramRules:
    templates = Templates(
        tokenizer,
        tool_calls=section.tool_calls,
        show_tools=section.show_tools,
        chat_template_kwargs=config.data.chat_template_kwargs,
    )
    longest = config.model.max_length
    turn = min(section.max_turn_tokens or config.rollout.max_response_tokens, longest)
    limits = Limits(section.max_turns, max_context=longest, max_tokens=longest, max_turn_tokens=turn)
    return ProgramRules(key, templates, limits, section.retries)


def require_known_domains(acting: EnvironmentRules, reward: RewardSection, domains: Iterable[str]) -> None:
    """Raise ConfigError for a domain without rows, or an environment reward without an environment."""
    known = set(domains)
    if unknown := sorted(acting.section.domains.keys() - known):
        raise ConfigError(
            f"agent.domains names {', '.join(unknown)}, which have no rows; the rows have "
            f"{', '.join(sorted(known))}"
        )
    for domain in sorted(known):
        kinds = {part.kind for part in reward.for_domain(domain).verifiers()}
        if "environment" in kinds and acting.rules_of(domain) is None:
            raise ConfigError(
                f"reward.kind = environment, but rows of the domain {domain!r} have no environment; set one "
                "in agent.domains, or another kind in reward.domains"
            )


def _rules_of(
    pool: EnvironmentWorkers, key: str, config: Config, section: AgentSection, tokenizer: Any
) -> tuple[EpisodeRules | ProgramRules, Tools]:
    description = pool.describe(key)
    if description.about:
        _log.info("agent.%s: %s", key, description.about)
    if description.runs:
        return _program_rules(key, config, section, tokenizer), []
    tools = [dict(tool) for tool in description.tools]
    shown: Tools = tools
    if section.show_tools != "template":
        shown = tools_prompt(tools, section.tool_calls) if section.show_tools == "system" else ""
    renderer = TurnRenderer(
        tokenizer,
        tools=tools,
        system=shown if isinstance(shown, str) else None,
        roles=("tool",) if tools else ("user",),
        chat_template_kwargs=config.data.chat_template_kwargs,
    )
    if hidden := renderer.hidden_tools():
        raise ConfigError(
            f"agent.show_tools = template, but the chat template does not show the tools of {key!r} "
            f"({', '.join(hidden)}), so the policy would not see them; set agent.show_tools=system to put "
            "them into the system message, =none if prompts describe them, or use a chat template that shows "
            "tools"
        )
    response = config.rollout.max_response_tokens
    limits = Limits(
        max_turns=section.max_turns,
        max_context=config.model.max_length,
        max_tokens=response,
        max_turn_tokens=section.max_turn_tokens or response,
        max_bad_calls=MAX_BAD_CALLS,
    )
    rules = EpisodeRules(
        key,
        renderer,
        limits,
        section.retries,
        section.tool_calls,
        description.schemas(),
        description.replayable,
    )
    return rules, shown
