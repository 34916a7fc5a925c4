"""Describe every metric of metrics.jsonl and expert_load.jsonl, with unit and meaning: a contract with
readers.

The list is the page metrics.md in this folder. The report is made from it; a test fails if a run writes a
metric that is not in the list. Pure.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, NamedTuple

from mrl.config.other_names import RENAMED_METRICS


class Metric(NamedTuple):
    """Unit and meaning of a number."""

    unit: str
    """Unit that the page explains, or that needs no explanation."""
    meaning: str
    """One sentence."""


_FORMER = re.compile(f"^(?:{'|'.join(RENAMED_METRICS)})(?=/|$)")
_LINE = re.compile(r"^- `(.+?)` \[(.+?)\] (.+(?:\n  .+)*)", re.MULTILINE)


def metrics_page() -> str:
    """Return the text of metrics.md, which `make docs` puts into the site."""
    return resources.files("mrl.observe").joinpath("metrics.md").read_text(encoding="utf-8")


METRICS = {name: Metric(unit, " ".join(text.split())) for name, unit, text in _LINE.findall(metrics_page())}
"""Name -> unit and meaning; <...> is a variable part. A row omits what does not apply to its step."""


@functools.cache
def pattern_of(name: str) -> re.Pattern[str]:
    """Return the pattern of a METRICS name: <a|b> matches its words, any other <...> one name part."""
    parts = re.split(r"(<[^>]*>)", name)
    return re.compile("".join(_part(part) for part in parts))


def _part(part: str) -> str:
    if not part.startswith("<"):
        return re.escape(part)
    return f"({part[1:-1]})" if "|" in part else "[^/]+"


def with_current_names(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rename the metrics of earlier releases, unless the row also has the current name.

    `val/accuracy` was the mean reward of any kind; today it stands beside `val/reward` if rewards are 0 or 1.

    >>> with_current_names({"step": 3, "val/accuracy": 0.5, "val/accuracy/sums": 1.0})
    {'step': 3, 'val/reward': 0.5, 'val/reward/sums': 1.0}
    """
    if all(_current_name(name) == name for name in row):
        return row
    return {name if _current_name(name) in row else _current_name(name): value for name, value in row.items()}


@functools.cache
def _current_name(name: str) -> str:
    return _FORMER.sub(lambda former: RENAMED_METRICS[former[0]], name)


@functools.cache
def name_in_list(name: str) -> str | None:
    """Return the entry of METRICS for a row's name, exact names first; None if there is none.

    >>> name_in_list("time/sync_seconds"), name_in_list("reward/max"), name_in_list("nobody/knows")
    ('time/<phase>_seconds', 'reward/max', None)
    """
    if name in METRICS:
        return name
    return next((entry for entry in METRICS if pattern_of(entry).fullmatch(name)), None)


def undescribed(names: Iterable[str]) -> list[str]:
    """Return the names that are not in the list.

    >>> undescribed(["reward/mean", "time/sync_seconds", "reward/of/nobody"])
    ['reward/of/nobody']
    """
    return [name for name in names if name_in_list(name) is None]
