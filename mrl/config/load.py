"""A merged tree becomes a checked Config; its errors name path, origin and the nearest valid name."""

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

from mrl.config.describe import named, section_at, settings
from mrl.config.merge import SHOWN, Origins, merge
from mrl.config.other_names import OTHERS_SECTIONS, answer, former
from mrl.config.root import Config
from mrl.errors import ConfigError
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.section import Section

CHOICES = {
    "algorithm.loss": ("name", "ppo_clip"),
    "algorithm.correction": ("kind", "off"),
}
"""Sections (with the key that chooses and its value without one) whose constants belong to the choice: another
loss or correction takes constants of its own, not the former's."""
log = logging.getLogger(__name__)
MOST_PLACES = 3
"""Settings of one name that an error lists; more would say nothing."""


def load_config(*sources: str | Path | Mapping[str, Any]) -> Config:
    """The resolved configuration of a run, from what a command's arguments are: YAML files, and mappings of the
    same form, are merged left to right, then every `a.b.c=value`.

    A run's own `config.yaml` is a file like any other. Raises ConfigError with one line per problem.

    >>> task = {"data": {"train": "t.jsonl"}, "reward": {"kind": "maths"}}
    >>> load_config(task, {"run": {"name": "a"}, "model": {"path": "m"}}, "loop.steps=7").loop.steps
    7
    """
    _, overrides = split_arguments([source for source in sources if isinstance(source, str)])
    return load([source for source in sources if source not in overrides], overrides)


def load_tune(*sources: str | Path | Mapping[str, Any]) -> tuple[Config, frozenset[str]]:
    """The configuration of `mrl tune`, as `load_config` gives it, and which of the sections that it does not read (data, reward, rollout)
    it was not given. A new model's tokenizer is then made from the rows of tune.data.train."""
    _, overrides = split_arguments([source for source in sources if isinstance(source, str)])
    layers = [source for source in sources if source not in overrides]
    tree, _ = merge(layers, overrides)
    model = tree.get("model")
    absent: dict[str, Any] = {"data": {"train": _tune_rows(tree)}, "reward": {"kind": "format"}}
    if isinstance(model, dict) and model.get("max_length") is not None:
        absent["rollout"] = {"max_response_tokens": 1}  # which fits into any length
    absent = {name: section for name, section in absent.items() if name not in tree}
    return load([*layers, absent], overrides), frozenset(absent)


def _tune_rows(tree: Mapping[str, Any]) -> list[dict[str, str]]:
    """The files of tune.data.train; what is wrong with that section is its own to say."""
    tune = tree.get("tune")
    data = tune.get("data") if isinstance(tune, dict) else None
    rows = data.get("train") if isinstance(data, dict) else None
    names = (
        [rows]
        if isinstance(rows, str)
        else [each.get("path") for each in rows or () if isinstance(each, dict)]
    )
    return [{"path": name} for name in names if isinstance(name, str)] or [{"path": "tune.data.train"}]


def load_reward(tree: Mapping[str, Any]) -> RewardSection:
    """The section `reward` of a configuration, alone. Raises ConfigError as `load_config` does."""
    try:
        return RewardSection.model_validate(tree)
    except pydantic.ValidationError as error:
        found: list[Any] = [{**problem, "loc": ("reward", *problem["loc"])} for problem in error.errors()]
        raise _refused(found, {}) from None


def load(files: Iterable[str | Path | Mapping[str, Any]], overrides: Iterable[str] = ()) -> Config:
    """The resolved configuration of a run.

    Settings that an earlier release wrote into a run's own config.yaml and that were removed since are left out, with a warning.

    Raises ConfigError with one line per problem: dotted path, where the value came from, what is wrong.
    """
    tree, origins = merge(files, overrides, choices=CHOICES)
    try:
        return Config.model_validate(tree)
    except pydantic.ValidationError as error:
        left = _without_removed(tree, error.errors(), origins)
        if left is None:
            raise _refused(error.errors(), origins) from None
    try:
        return Config.model_validate(left)
    except pydantic.ValidationError as error:
        raise _refused(error.errors(), origins) from None


def _without_removed(
    tree: dict[str, Any], problems: Sequence[Any], origins: Origins
) -> dict[str, Any] | None:
    """Return the tree without the removed settings that come from a run's own config.yaml; None if there are none."""
    left, gone = copy.deepcopy(tree), []
    for problem in problems:
        section, parts, key = _place(problem)
        path = ".".join([*parts, key])
        is_removed = (
            section and key not in section.model_fields and former(section, key).startswith("removed")
        )
        if is_removed and _of_a_run(path, origins):
            del functools.reduce(_inside, parts, left)[key]
            gone.append(f"{path} = {problem['input']!r}")
    if gone:
        log.warning("settings of the run's config.yaml that this release does not have: %s", "; ".join(gone))
    return left if gone else None


def _inside(tree: Any, part: str) -> Any:
    """Return what a part of a path names in the tree; the tree itself if the part is pydantic's name of a union's member."""
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
    """YAML that `load` reads back to an equal configuration; some sections left out."""
    tree = config.model_dump(mode="json", exclude=set(without))
    return yaml.safe_dump(tree, sort_keys=False, width=110, allow_unicode=True)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments of a command as (files, a.b.c=value overrides); a file named x=y.yaml must be given as
    ./x=y.yaml."""
    overrides = [a for a in arguments if "=" in a and not a.startswith((".", "/"))]
    return [a for a in arguments if a not in overrides], overrides


def _refused(problems: Sequence[Any], origins: Origins) -> ConfigError:
    return ConfigError("\n".join(dict.fromkeys(_explain(problem, origins) for problem in problems)))


def _explain(problem: Any, origins: Origins) -> str:
    section, parts, key = _place(problem)
    above = [str(part) for part in problem["loc"][:-1]]
    holder, setting = (section_at(above[:-1])[0], above[-1]) if key.isdigit() and above else (section, key)
    path, value = ".".join([*parts, key]), problem["input"]
    origin = _origin(path, origins) or (_origin(".".join(parts), origins) if key.isdigit() else "")
    if holder:
        old = repr(value) if setting in holder.model_fields else "the setting"
        if said := former(holder, setting, _choice(value)):
            return f"{path}: {old} is {said}{origin}"
    if problem["type"] == "extra_forbidden":
        return _unknown(path, value, section, origins)
    if problem["type"] == "missing":
        return f"{path}: required and not given"
    message = problem["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(value, dict | Section) else f"; got {_told(value)}"
    return f"{path or 'configuration'}: {message}{shown}{origin}"


def _place(problem: Any) -> tuple[type[pydantic.BaseModel] | None, list[str], str]:
    """Return the section of one of pydantic's problems, that section's path, and the key in it."""
    *above, key = [str(part) for part in problem["loc"]] or [""]
    return *section_at(above), key


def _choice(value: Any) -> Any:
    """Return what chooses a section among others; the value itself if it is not a section."""
    return value.get("name", value.get("kind")) if isinstance(value, dict) else value


def _unknown(path: str, value: Any, section: type[pydantic.BaseModel] | None, origins: Origins) -> str:
    """A line for a key that is no setting; if it is another system's section, a line for each setting in it."""
    key = path.rpartition(".")[2]
    is_typo = difflib.get_close_matches(key, section.model_fields if section else (), n=1, cutoff=0.85)
    hints = {} if is_typo else {leaf: answer(leaf) or _same_end(leaf) for leaf in _leaves(path, value)}
    if not any(hints.values()) and key not in OTHERS_SECTIONS:
        hints = {path: answer(path) or _nearest(key, section, path)}
    elsewhere = "; docs/moving.md has other systems' names with those of here"
    return "\n".join(
        f"{leaf}: unknown key{_origin(leaf, origins)}{hint or elsewhere}" for leaf, hint in hints.items()
    )


def _leaves(path: str, value: Any) -> Iterator[str]:
    """The paths of what stands inside a mapping that is no section; of anything else its own."""
    if not isinstance(value, dict) or not value:
        yield path
        return
    for name, inner in value.items():
        yield from _leaves(f"{path}.{name}", inner)


def _same_end(path: str) -> str:
    """The hint of a setting whose whole path is the end of this one."""
    ends = (path.partition(".")[2],) if "." in path else ()
    found = next((end for end in ends if "." in end and end in _paths()), "")
    return f"; did you mean {found}?" if found else (_same_end(ends[0]) if ends else "")


@functools.cache
def _paths() -> frozenset[str]:
    return frozenset(setting.path for setting in settings())


def _told(value: Any) -> str:
    try:
        said = repr(value)
    except ValueError:  # a number of more digits than Python writes
        return "a number of thousands of digits"
    return said if len(said) <= SHOWN else f"{said[:SHOWN]}..."


def _origin(path: str, origins: Origins) -> str:
    source = _source(path, origins)
    return f" ({source})" if source else ""


def _source(path: str, origins: Origins) -> str:
    """Return where the value at a path, or the first inside it, came from; empty if nobody gave it."""
    inside = (o for p, o in origins.items() if p == path or p.startswith(path + "."))
    return next(inside, "") if path else ""


def _nearest(key: str, section: type[pydantic.BaseModel] | None, path: str) -> str:
    if section is None:
        return ""
    elsewhere = [each for each in named(key) if each != path]  # the same path: another choice's
    if 0 < len(elsewhere) <= MOST_PLACES:
        return f"; did you mean '{"' or '".join(elsewhere)}'?"
    names = list(section.model_fields)
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.4)
    return f"; did you mean '{close[0]}'?" if close else f"; known keys here: {', '.join(names)}"
