"""The environments of a run's episodes: looked at before anything starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from mrl.agents.episode import Limits
from mrl.agents.pool import EnvironmentPool
from mrl.agents.render import TurnRenderer
from mrl.agents.tool_calls import described
from mrl.config.root import Config
from mrl.config.sections.agent import AgentSection
from mrl.errors import ConfigError
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.trajectories.environment_rollout import Rules

Tools = list[dict[str, Any]] | str
"""As chat templates take them, or as a system message shows them."""

MAX_BAD_CALLS = 2
"""Turns with a call that cannot be carried out, of which the policy is told; one more ends the episode."""


@dataclasses.dataclass(frozen=True, slots=True)
class Acting:
    """What was found out of the environments and the chat template."""

    section: AgentSection
    rules: Mapping[str, tuple[Rules, Tools]]
    """By the environment's key."""

    def rules_of(self, domain: str) -> Rules | None:
        """Of the domain's episodes; None where a response is all there is."""
        key = self.section.key_of(domain)
        return None if key is None else self.rules[key][0]

    def for_rollouts(self) -> dict[str, Any]:
        """Return what a RolloutThread is told of the episodes."""
        return {"rules_of": self.rules_of, "max_open": self.section.max_open}

    def tools_of(self, domain: str) -> Tools | None:
        """What a row of the domain can call."""
        key = self.section.key_of(domain)
        return None if key is None else self.rules[key][1]


def look_at(config: Config, tokenizer: Any) -> Acting | None:
    """None where responses are no episodes. ConfigError for an environment that cannot be made, and for a chat template that
    rewrites what stood before; the place is named."""
    section = config.agent
    if section is None:
        return None
    with EnvironmentPool.of(section) as pool:
        rules = {key: _looked_at(pool, key, config, section, tokenizer) for key in section.environments()}
    return Acting(section, rules)


def require_known_domains(acting: Acting, reward: RewardSection, domains: Iterable[str]) -> None:
    """ConfigError for a domain of agent.domains that no row has, and for one whose reward is an environment's and that has none."""
    known = set(domains)
    if unknown := sorted(acting.section.domains.keys() - known):
        raise ConfigError(
            f"agent.domains names {', '.join(unknown)}; the rows are of {', '.join(sorted(known))}"
        )
    for domain in sorted(known):
        kinds = {part.kind for part in reward.for_domain(domain).verifiers()}
        if "environment" in kinds and acting.rules_of(domain) is None:
            raise ConfigError(
                f"reward.kind = environment for rows of the domain {domain!r}, which have no environment; name one in agent.domains, "
                "or another kind in reward.domains"
            )


def _looked_at(
    pool: EnvironmentPool, key: str, config: Config, section: AgentSection, tokenizer: Any
) -> tuple[Rules, Tools]:
    description = pool.describe(key)
    tools = [dict(tool) for tool in description.tools]
    shown: Tools = tools
    if section.show_tools != "template":
        shown = described(tools, section.tool_calls) if section.show_tools == "system" else ""
    renderer = TurnRenderer(
        tokenizer,
        tools=tools,
        system=shown if isinstance(shown, str) else None,
        roles=("tool",) if tools else ("user",),
        chat_template_kwargs=config.data.chat_template_kwargs,
    )
    if hidden := renderer.hidden_tools():
        raise ConfigError(
            f"agent.show_tools = template, and the chat template does not show the tools of {key!r} ({', '.join(hidden)}), so that the "
            "policy would never see them; set agent.show_tools=system to put them into the system message, =none if prompts describe "
            "them, or use a chat template that shows tools"
        )
    response = config.rollout.max_response_tokens
    limits = Limits(
        max_turns=section.max_turns,
        max_context=config.model.max_length,
        max_tokens=response,
        max_turn_tokens=section.max_turn_tokens or response,
        max_bad_calls=MAX_BAD_CALLS,
    )
    rules = Rules(
        key,
        renderer,
        limits,
        section.retries,
        section.tool_calls,
        description.schemas(),
        description.replayable,
    )
    return rules, shown
