"""Choose the page's figures: one per entry of the metric list that a run wrote, in sections. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mrl.observe.metric_names import METRICS, name_in_list

OVERVIEW = (
    "reward/mean",
    "reward/mean/<domain>",
    "val/reward",
    "val/reward/<domain or tag>",
    "policy/entropy",
    "rollout/response_tokens_mean",
    "policy/rollout_mismatch_kl",
    "<optim|critic>/grad_norm",
    "group/kept_frac",
    "time/step_seconds",
    "tune/loss",
    "val/loss",
    "val/preference/accuracy",
)
"""Metrics that people look at first."""
SECTIONS = {
    "Rewards and validation": ("reward", "val"),
    "Filtering": ("group",),
    "Responses": ("rollout", "advantage"),
    "Episodes": ("agent",),
    "Policy and critic": ("policy", "optim", "critic", "distillation", "draft"),
    "Tuning": ("tune", "preference"),
    "Experts": ("moe", "routing"),
    "Weight sync": ("sync",),
    "Memory": ("mem", "buffer"),
    "Time": ("time", "perf", "stream", "resume"),
}
"""Section -> first name parts of its metrics; unknown metrics, of another version of mrl, come last."""
OTHERS = "Other metrics"


def figures(names: Iterable[str]) -> list[dict[str, Any]]:
    """Return figures in the page's order, each with title, unit, meaning, section and the names of its
    curves.

    >>> [(f["section"], f["title"]) for f in figures(["sync/seconds", "of/old"])]
    [('Weight sync', 'sync/seconds'), ('Other metrics', 'of/old')]
    """
    by_entry: dict[str, list[str]] = {}
    for name in sorted(set(names)):
        by_entry.setdefault(name_in_list(name) or name, []).append(name)
    order = {entry: place for place, entry in enumerate(METRICS)}
    result = [_figure(_section(members[0], entry), entry, members) for entry, members in by_entry.items()]
    places = {section: place for place, section in enumerate([*SECTIONS, OTHERS])}
    result.sort(key=lambda figure: (places[figure["section"]], order.get(figure["entry"], len(order))))
    first = [_figure("Overview", entry, by_entry[entry]) for entry in OVERVIEW if entry in by_entry]
    return first + result


def _figure(section: str, entry: str, names: list[str]) -> dict[str, Any]:
    unit, meaning = METRICS.get(entry, ("", ""))
    title = names[0] if len(names) == 1 else entry
    described = {"section": section, "entry": entry, "title": title, "unit": unit}
    return described | {"meaning": meaning, "names": names}


def _section(name: str, entry: str) -> str:
    first = name.partition("/")[0]
    if entry not in METRICS:
        return OTHERS
    return next((section for section, parts in SECTIONS.items() if first in parts), OTHERS)
