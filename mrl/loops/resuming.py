"""Whether a run may go on from a checkpoint's state, and with which other settings: those that decide what its groups are, and how many are
on their way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.config.root import Config
from mrl.config.sections.agent import AgentSection
from mrl.errors import ConfigError

FIXED = ("loop.schedule", "agent")
"""Groups on their way are of another form where one of these is another."""


def kept_settings(config: Config) -> dict[str, Any]:
    """What a checkpoint keeps of them, by name."""
    return {
        "loop.schedule": config.loop.schedule,
        "agent": _episodes(config.agent),
        "loop.prompts_per_step": config.loop.prompts_per_step,
        "loop.samples_per_prompt": config.loop.samples_per_prompt,
        "stream.max_age": config.stream.max_age,
        "stream.sync_every": config.stream.sync_every,
    }


def _episodes(section: AgentSection | None) -> str:
    """Which samples are episodes."""
    if section is None:
        return "no section"
    domains = {name: own.environment is not None for name, own in sorted(section.domains.items())}
    named = [name for name, acts in domains.items() if acts is (section.environment is None)]
    if not named:
        return "a section"
    return f"a section {'for' if section.environment is None else 'not for'} {', '.join(named)}"


def require_resumable(state: Mapping[str, Any], config: Config) -> None:
    """ConfigError, with what can be done, for a state that these settings cannot go on from."""
    for name, before, now in _changed(state, config):
        if name in FIXED:
            raise ConfigError(
                f"{name}: the run in {config.run_folder} was saved with {before}, this is {now}, and what is on its way cannot become the "
                f"other. Go on with {before}, or start a new run (run.name) from its weights: mrl export {config.run_folder}, model.path"
            )


def changed_settings(state: Mapping[str, Any], config: Config) -> str:
    """The settings that are others than the state's, as a sentence; empty where none is."""
    changed = [f"{name} = {now} ({before} before)" for name, before, now in _changed(state, config)]
    return f"resumed with other settings: {', '.join(changed)}" if changed else ""


def _changed(state: Mapping[str, Any], config: Config) -> list[tuple[str, Any, Any]]:
    """(name, before, now) of each setting that is another one."""
    before, now = state["settings"], kept_settings(config)
    return [(name, before[name], now[name]) for name in now if name in before and before[name] != now[name]]
