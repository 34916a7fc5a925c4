"""Look up names that are not settings: former ones (other_names.yaml), other systems' (moving.md). Pure."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib import resources

import yaml

RENAMED_METRICS = {
    "group/aged_frac": "group/stale_frac",
    "group/all_wrong_frac": "group/all_incorrect_frac",
    "policy/age_frac": "policy/staleness_frac",
    "policy/age_mean": "policy/staleness_mean",
    "policy/age_steps": "policy/staleness_max",
    "policy/aged_token_frac": "policy/stale_token_frac",
    "pool/bytes": "buffer/bytes",
    "reward/witnessed": "reward/audited",
    "reward/wrong_taken_for_right_frac": "reward/false_positive_frac",
    "stream/park_seconds": "stream/pause_seconds",
    "stream/parked": "stream/interrupted",
    "stream/slots_used": "stream/quotas_used",
    "sync/fallback_bytes": "sync/whole_bytes",
    "sync/gather_seconds": "sync/move_seconds",
    "time/park_seconds": "time/pause_seconds",
    "val/accuracy": "val/reward",
}
"""Former metric -> new name."""
OTHERS_SECTIONS = frozenset(
    {"actor_rollout_ref", "trainer", "reward_model", "custom_reward_function", "megatron"}
)
"""Sections of verl that do not exist here."""
_WORD = re.compile(r"`(?:--)?([\w.-]+)[^`]*`")


def _read(name: str) -> str:
    return resources.files("mrl.config").joinpath(name).read_text(encoding="utf-8")


@functools.cache
def former_settings() -> dict[tuple[str, str], str]:
    """Return (section, former setting or setting=value) -> "renamed to ..." or "removed; ..."."""
    starts = {"renamed": "renamed to ", "removed": "removed; "}
    return {
        (section, name): f"{starts[change]}{text}"
        for change, table in yaml.safe_load(_read("other_names.yaml")).items()
        for sections, names in table.items()
        for section in sections.split(", ")
        for name, text in names.items()
    }


@functools.cache
def words_of_others() -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return the words in the page's tables, or the ends of their dotted names: those with equivalent
    settings, and unsupported ones with the alternative."""
    same: dict[str, list[str]] = {}
    unsupported: dict[str, str] = {}
    for line in _read("moving.md").splitlines():
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if len(cells) == 1:
            unsupported |= dict.fromkeys(_WORD.findall(first), cells[0].replace("`", ""))
        elif first.startswith("`"):
            for word in _WORD.findall(re.sub(r"\([^)]*\)", "", " ".join(cells))):
                same.setdefault(word.replace("-", "_"), []).append(first.replace("`", ""))
    return {word: ", or ".join(dict.fromkeys(matches)) for word, matches in same.items()}, unsupported


def replacement_of(section: type, key: str, value: object = None) -> str:
    """Return what became of a former setting, or of a former value of one; empty if it never was one."""
    names = (key, f"{key}={value}") if isinstance(value, str) else (key,)
    replacements = (former_settings().get((section.__name__, name), "") for name in names)
    return next(filter(None, replacements), "")


def moving_hint(path: str) -> str:
    """Return the hint of an error for a former metric or another system's name; empty if there is none.

    The longest end of the dotted path that is in the tables decides, else the path without its last name.

    >>> answer("actor_rollout_ref.actor.optim.lr"), answer("peft_config.r")[:40]
    ('; did you mean training.optimizer.lr?', '; did you mean training.lora.rank (and w')
    """
    parts, (same, unsupported) = path.split("."), words_of_others()
    for word in (".".join(parts[first:]) for first in range(len(parts))):
        if word in RENAMED_METRICS:
            return f"; the metric is renamed to {RENAMED_METRICS[word]}"
        if word in unsupported:
            return f"; {word} is not supported: {unsupported[word]}"
        if word in same:
            return f"; did you mean {same[word]}?"
    return moving_hint(path.rpartition(".")[0]) if len(parts) > 1 else ""
