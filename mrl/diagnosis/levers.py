"""Make suggested changes, with values, from a run's own settings."""

from __future__ import annotations

from mrl.diagnosis.findings import DiagnosedRun, Lever


def scaled_setting(run: DiagnosedRun, setting: str, factor: float, why: str) -> list[Lever]:
    """Suggest the setting times a factor; nothing if it is not a number above 0."""
    now = run.number(setting)
    return [Lever(setting, f"{now:g}", f"{now * factor:g}", why)] if now else []


def at_least(run: DiagnosedRun, setting: str, value: float, why: str) -> list[Lever]:
    """Suggest raising a number to at least `value`; nothing if it is already there or not set."""
    now = run.number(setting)
    return [Lever(setting, f"{now:g}", f"{value:g}", why)] if now is not None and now < value else []


def switched(run: DiagnosedRun, setting: str, value: str, why: str) -> list[Lever]:
    """Suggest another value; nothing if it is already set."""
    now = run.settings.get(setting, "")
    return [] if now == value else [Lever(setting, now, value, why)]


def advice(text: str, why: str) -> list[Lever]:
    """Suggest something that is not a setting."""
    return [Lever(text, "", "", why)]
