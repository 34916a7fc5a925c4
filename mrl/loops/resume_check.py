"""Check if a run can resume from a checkpoint's state, and report the settings that changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.config.root import Config
from mrl.config.sections.agent import AgentSection
from mrl.errors import ConfigError

FIXED = ("loop.schedule", "agent")
"""Settings that must not change, because they decide the form of groups in flight."""


def kept_settings(config: Config) -> dict[str, Any]:
    """Return the settings that a checkpoint keeps, by name."""
    return {
        "loop.schedule": config.loop.schedule,
        "agent": _episodes(config.agent),
        "loop.prompts_per_step": config.loop.prompts_per_step,
        "loop.samples_per_prompt": config.loop.samples_per_prompt,
        "stream.max_staleness": config.stream.max_staleness,
        "stream.sync_every": config.stream.sync_every,
    }


def _episodes(section: AgentSection | None) -> str:
    """Describe which samples are episodes."""
    if section is None:
        return "no section"
    domains = {name: domain.environment is not None for name, domain in sorted(section.domains.items())}
    named = [name for name, acts in domains.items() if acts is (section.environment is None)]
    if not named:
        return "a section"
    return f"a section {'for' if section.environment is None else 'not for'} {', '.join(named)}"


def require_resumable(state: Mapping[str, Any], config: Config) -> None:
    """Raise ConfigError, with the remedy, if a run with these settings cannot resume from the state."""
    for name, before, now in _changed(state, config):
        if name in FIXED:
            raise ConfigError(
                f"{name} = {now}, but the run in {config.run_folder} was saved with {before}, and its groups "
                f"in flight cannot be converted; resume with {before}, or start a new run (run.name) from "
                f"its weights: mrl export {config.run_folder}, model.path"
            )


def changed_settings(state: Mapping[str, Any], config: Config) -> str:
    """Return a sentence with the settings that differ from the state's; empty if none does."""
    changed = [f"{name} = {now} (was {before})" for name, before, now in _changed(state, config)]
    return f"resumed with changed settings: {', '.join(changed)}" if changed else ""


def _changed(state: Mapping[str, Any], config: Config) -> list[tuple[str, Any, Any]]:
    """Return (name, before, now) of each changed setting."""
    before, now = state["settings"], kept_settings(config)
    return [(name, before[name], now[name]) for name in now if name in before and before[name] != now[name]]
