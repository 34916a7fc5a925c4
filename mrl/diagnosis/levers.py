"""Changes with values, made from a run's own settings."""

from __future__ import annotations

from mrl.diagnosis.findings import DiagnosedRun, Lever


def scaled_setting(run: DiagnosedRun, setting: str, factor: float, why: str) -> list[Lever]:
    """The setting times a factor; nothing where the run does not have it as a number above 0."""
    now = run.number(setting)
    return [Lever(setting, f"{now:g}", f"{now * factor:g}", why)] if now else []


def at_least(run: DiagnosedRun, setting: str, value: float, why: str) -> list[Lever]:
    """A number that the setting is below; nothing where it is there already, or where the run does not have it."""
    now = run.number(setting)
    return [Lever(setting, f"{now:g}", f"{value:g}", why)] if now is not None and now < value else []


def switched(run: DiagnosedRun, setting: str, value: str, why: str) -> list[Lever]:
    """Another word; nothing where it stands there."""
    now = run.settings.get(setting, "")
    return [] if now == value else [Lever(setting, now, value, why)]


def advice(text: str, why: str) -> list[Lever]:
    """Something that is no setting."""
    return [Lever(text, "", "", why)]
