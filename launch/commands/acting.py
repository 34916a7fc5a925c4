"""The environment of a run's episodes: looked at before anything starts, its processes beside the run's."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from mrl.agents.deadlines import Deadlines
from mrl.agents.episode import Limits
from mrl.agents.pool import Description, EnvironmentPool
from mrl.agents.registry import EnvironmentSpec
from mrl.agents.render import TurnRenderer
from mrl.config.root import Config
from mrl.config.sections.agent import AgentSection
from mrl.loops.episodes import Episodes, Rules


@dataclasses.dataclass(frozen=True, slots=True)
class Acting:
    """What was found out of the environment and the chat template."""

    renderer: TurnRenderer
    rules: Rules
    tools: list[dict[str, Any]]
    """As chat templates take them."""


def look_at(config: Config, tokenizer: Any) -> Acting | None:
    """None where responses are no episodes. ConfigError for an environment that cannot be made, and for a chat template that
    rewrites what stood before; the place is named."""
    if config.agent is None:
        return None
    with _pool(config.agent) as pool:
        description = pool.describe(config.agent.environment)
    tools = [dict(tool) for tool in description.tools]
    renderer = TurnRenderer(
        tokenizer,
        tools=tools,
        roles=("tool",) if tools else ("user",),
        chat_template_kwargs=config.data.chat_template_kwargs,
    )
    return Acting(renderer, _rules(config, config.agent, description), tools)


@contextlib.contextmanager
def opened(acting: Acting, config: Config) -> Iterator[Episodes]:
    """The run's episodes over the processes of their environments, which end with it."""
    assert config.agent is not None, "acting needs the section"
    with _pool(config.agent) as pool:
        yield Episodes(pool, acting.renderer, acting.rules, run_seed=config.run.seed)


def _pool(section: AgentSection) -> EnvironmentPool:
    deadlines = Deadlines(
        reset_seconds=section.reset_seconds,
        step_seconds=section.step_seconds,
        close_seconds=section.close_seconds,
        answer_kib=section.answer_kib,
        memory_mib=section.memory_mib,
    )
    return EnvironmentPool(
        {section.environment: EnvironmentSpec(section.environment, section.options)}, deadlines
    )


def _rules(config: Config, section: AgentSection, description: Description) -> Rules:
    response = config.rollout.max_response_tokens
    limits = Limits(
        max_turns=section.max_turns,
        max_context=section.max_context or config.model.max_length,
        max_tokens=response,
        max_turn_tokens=section.max_turn_tokens or response,
        max_bad_calls=section.max_bad_calls,
    )
    return Rules(
        section.environment,
        limits,
        section.retries,
        section.tool_calls,
        description.schemas(),
        description.replayable,
    )
