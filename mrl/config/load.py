"""Turn a merged tree into a checked Config; errors name the path, the origin and the closest valid name."""

from __future__ import annotations

import copy
import difflib
import functools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml

from mrl.config.describe import section_at, settings, settings_named
from mrl.config.merge import MAX_VALUE_CHARS, Origins, merge
from mrl.config.other_names import OTHERS_SECTIONS, moving_hint, replacement_of
from mrl.config.root import Config
from mrl.errors import ConfigError
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.section import Section

CHOICES = {"algorithm.loss": ("name", "ppo_clip"), "algorithm.correction": ("kind", "off")}
"""Sections (with the key that chooses, and its default) whose constants belong to the choice: another loss or
correction drops the constants given for the former one."""
log = logging.getLogger(__name__)
_NOT_AUTO = "literal['auto']"
"""Pydantic's name of `auto` in the place of an error, for a setting that is `auto` or of another type."""
MOST_PLACES = 3
"""Most settings of one name that an error lists."""


def load_config(*sources: str | Path | Mapping[str, Any]) -> Config:
    """Return the resolved configuration of a command's arguments: YAML files and mappings of the same form,
    merged left to right, then every `a.b.c=value`.

    A run's own `config.yaml` is a file like any other. Raise ConfigError with one line per problem.

    >>> task = {"data": {"train": "t.jsonl"}, "reward": {"kind": "maths"}}
    >>> load_config(task, {"run": {"name": "a"}, "model": {"path": "m"}}, "loop.steps=7").loop.steps
    7
    """
    _, overrides = split_arguments([source for source in sources if isinstance(source, str)])
    return load([source for source in sources if source not in overrides], overrides)


def load_tune(*sources: str | Path | Mapping[str, Any]) -> tuple[Config, frozenset[str]]:
    """Return the configuration of `mrl tune`, as `load_config` does, and the names of the sections that were
    not given and that tune does not read (data, reward, rollout). A new model's tokenizer is then made from
    the rows of tune.data.train."""
    _, overrides = split_arguments([source for source in sources if isinstance(source, str)])
    layers = [source for source in sources if source not in overrides]
    tree, _ = merge(layers, overrides)
    model = tree.get("model")
    absent: dict[str, Any] = {"data": {"train": _tune_rows(tree)}, "reward": {"kind": "format"}}
    if isinstance(model, dict) and model.get("max_length") is not None:
        absent["rollout"] = {"max_response_tokens": 1}  # fits into any length
    absent = {name: section for name, section in absent.items() if name not in tree}
    return load([*layers, absent], overrides), frozenset(absent)


def _tune_rows(tree: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the files of tune.data.train; errors in that section are reported by the section itself."""
    tune = tree.get("tune")
    data = tune.get("data") if isinstance(tune, dict) else None
    rows = data.get("train") if isinstance(data, dict) else None
    names = (
        [rows] if isinstance(rows, str) else [row.get("path") for row in rows or () if isinstance(row, dict)]
    )
    return [{"path": name} for name in names if isinstance(name, str)] or [{"path": "tune.data.train"}]


def load_reward(tree: Mapping[str, Any]) -> RewardSection:
    """Return the section `reward` of a configuration, alone; raise ConfigError as `load_config` does."""
    try:
        return RewardSection.model_validate(tree)
    except pydantic.ValidationError as error:
        problems: list[Any] = [{**problem, "loc": ("reward", *problem["loc"])} for problem in error.errors()]
        raise _refused(problems, {}) from None


def load(files: Iterable[str | Path | Mapping[str, Any]], overrides: Iterable[str] = ()) -> Config:
    """Return the resolved configuration of a run.

    Settings from a run's own config.yaml that were removed since are dropped with a warning.

    Raises:
        ConfigError: With one line per problem: dotted path, origin of the value, what is wrong.
    """
    tree, origins = merge(files, overrides, choices=CHOICES)
    try:
        return Config.model_validate(tree)
    except pydantic.ValidationError as error:
        remaining = _without_removed(tree, error.errors(), origins)
        if remaining is None:
            raise _refused(error.errors(), origins) from None
    try:
        return Config.model_validate(remaining)
    except pydantic.ValidationError as error:
        raise _refused(error.errors(), origins) from None


def _without_removed(
    tree: dict[str, Any], problems: Sequence[Any], origins: Origins
) -> dict[str, Any] | None:
    """Return the tree without the removed settings from a run's own config.yaml; None if there are none."""
    remaining, dropped = copy.deepcopy(tree), []
    for problem in problems:
        section, parts, key = _place(problem)
        path = ".".join([*parts, key])
        is_removed = (
            section and key not in section.model_fields and replacement_of(section, key).startswith("removed")
        )
        if is_removed and _of_a_run(path, origins):
            del functools.reduce(_inside, parts, remaining)[key]
            dropped.append(f"{path} = {problem['input']!r}")
    if dropped:
        log.warning("ignoring settings of the run's config.yaml that were removed: %s", "; ".join(dropped))
    return remaining if dropped else None


def _inside(tree: Any, part: str) -> Any:
    """Return what a path's part names in the tree, or the tree if it is pydantic's name of a union member."""
    if isinstance(tree, list):
        return tree[int(part)] if part.isdigit() else tree
    return tree.get(part, tree)


def _of_a_run(path: str, origins: Origins) -> bool:
    """Return True if a value, or the list that contains it, comes from the config.yaml of a run folder."""
    parts = path.split(".")
    above = (_source(".".join(parts[:end]), origins) for end in range(len(parts), 0, -1))
    file = Path(next(filter(None, above), "").rpartition(":")[0])
    return file.name == "config.yaml" and (file.parent / "metrics.jsonl").exists()


def dump(config: Config, *, without: Collection[str] = ()) -> str:
    """Return YAML that `load` reads back to an equal configuration, without some sections."""
    tree = config.model_dump(mode="json", exclude=set(without))
    return yaml.safe_dump(tree, sort_keys=False, width=110, allow_unicode=True)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into (files, a.b.c=value overrides); write a file named x=y.yaml as ./x=y.yaml."""
    overrides = [a for a in arguments if "=" in a and not a.startswith((".", "/"))]
    return [a for a in arguments if a not in overrides], overrides


def _refused(problems: Sequence[Any], origins: Origins) -> ConfigError:
    """Return one line per problem. A value that is neither auto nor of the setting's type is one problem."""
    autos = {problem["loc"][:-1] for problem in problems if problem["loc"][-1:] == (_NOT_AUTO,)}
    problems = [
        {**problem, "loc": loc[:-1], "msg": f"{problem['msg']}, or auto"} if loc[:-1] in autos else problem
        for problem in problems
        if (loc := problem["loc"])[-1:] != (_NOT_AUTO,)
    ]
    return ConfigError("\n".join(dict.fromkeys(_explain(problem, origins) for problem in problems)))


def _explain(problem: Any, origins: Origins) -> str:
    section, parts, key = _place(problem)
    above = [str(part) for part in problem["loc"][:-1]]
    holder, setting = (section_at(above[:-1])[0], above[-1]) if key.isdigit() and above else (section, key)
    path, value = ".".join([*parts, key]), problem["input"]
    origin = _origin(path, origins) or (_origin(".".join(parts), origins) if key.isdigit() else "")
    if holder:
        old = repr(value) if setting in holder.model_fields else "the setting"
        if replacement := replacement_of(holder, setting, _choice(value)):
            return f"{path}: {old} is {replacement}{origin}"
    if problem["type"] == "extra_forbidden":
        return _unknown(path, value, section, origins)
    if problem["type"] == "missing":
        return f"{path}: required but not given"
    message = problem["msg"].removeprefix("Value error, ")
    got = "" if isinstance(value, dict | Section) else f"; got {_shown(value)}"
    return f"{path or 'configuration'}: {message}{got}{origin}"


def _place(problem: Any) -> tuple[type[pydantic.BaseModel] | None, list[str], str]:
    """Return the section of one of pydantic's problems, that section's path, and the key in it."""
    *above, key = [str(part) for part in problem["loc"]] or [""]
    return *section_at(above), key


def _choice(value: Any) -> Any:
    """Return the value that chooses a section among others; the value itself if it is not a section."""
    return value.get("name", value.get("kind")) if isinstance(value, dict) else value


def _unknown(path: str, value: Any, section: type[pydantic.BaseModel] | None, origins: Origins) -> str:
    """Return one line for an unknown key, or one per setting if the key is another system's section."""
    key = path.rpartition(".")[2]
    is_typo = difflib.get_close_matches(key, section.model_fields if section else (), n=1, cutoff=0.85)
    hints = {} if is_typo else {leaf: moving_hint(leaf) or _same_end(leaf) for leaf in _leaves(path, value)}
    if not any(hints.values()) and key not in OTHERS_SECTIONS:
        hints = {path: moving_hint(path) or _nearest(key, section, path)}
    moving_page = "; docs/moving.md maps other systems' names to ours"
    return "\n".join(
        f"{leaf}: unknown key{_origin(leaf, origins)}{hint or moving_page}" for leaf, hint in hints.items()
    )


def _leaves(path: str, value: Any) -> Iterator[str]:
    """Yield the paths of all leaves in a mapping; for any other value, its own path."""
    if not isinstance(value, dict) or not value:
        yield path
        return
    for name, inner in value.items():
        yield from _leaves(f"{path}.{name}", inner)


def _same_end(path: str) -> str:
    """Return a hint at the setting whose whole path is the end of this one; empty if there is none."""
    ends = (path.partition(".")[2],) if "." in path else ()
    match = next((end for end in ends if "." in end and end in _paths()), "")
    return f"; did you mean {match}?" if match else (_same_end(ends[0]) if ends else "")


@functools.cache
def _paths() -> frozenset[str]:
    return frozenset(setting.path for setting in settings())


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # more digits than Python prints
        return "a number with thousands of digits"
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."


def _origin(path: str, origins: Origins) -> str:
    source = _source(path, origins)
    return f" ({source})" if source else ""


def _source(path: str, origins: Origins) -> str:
    """Return the origin of the value at a path, or of the first value inside it; empty if nobody gave it."""
    inside = (o for p, o in origins.items() if p == path or p.startswith(path + "."))
    return next(inside, "") if path else ""


def _nearest(key: str, section: type[pydantic.BaseModel] | None, path: str) -> str:
    if section is None:
        return ""
    others = [
        other for other in settings_named(key) if other != path
    ]  # the same path belongs to another choice
    if 0 < len(others) <= MOST_PLACES:
        return f"; did you mean '{"' or '".join(others)}'?"
    names = list(section.model_fields)
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.4)
    return f"; did you mean '{close[0]}'?" if close else f"; known keys here: {', '.join(names)}"
