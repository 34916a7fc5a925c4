"""Print the tree of settings, one line each, for `mrl settings` and the settings page of `make docs`."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pydantic
from pydantic_core import PydanticUndefined

from mrl.config.other_names import moving_hint, replacement_of
from mrl.config.root import Config
from mrl.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One setting or section."""

    path: str
    """Dotted path; a chosen section has its name in brackets."""
    form: str
    """Type and default."""
    sentence: str

    def __str__(self) -> str:
        return f"{self.path}{self.form}  # {self.sentence}"


def describe(prefix: str = "") -> str:
    """Return all settings, or those at and below a dotted path such as `reward` or `rollout.tp`.

    A line is `path: type = default  # sentence`. Raise ConfigError if the path leads to no setting.
    """
    shown = [setting for setting in settings(prefix) if _below(setting.path, prefix)]
    if not shown:
        raise ConfigError(f"there is no setting {prefix}{_hint(prefix)}; `mrl settings` lists all")
    return "\n".join(map(str, shown))


def _hint(path: str) -> str:
    """Return a hint for an unknown path: the new name of a former section, the setting for another system's
    word, settings with the same last name, or the closest path."""
    section, name = path.partition(".")[0], path.rpartition(".")[2]
    if replacement := replacement_of(Config, section):
        return f"; {section} is {replacement}"
    if hint := moving_hint(path):
        return hint
    paths = [setting.path for setting in settings()]
    close = settings_named(name) or difflib.get_close_matches(path, paths, n=1, cutoff=0.4)
    return f"; did you mean '{"' or '".join(close)}'?" if close else ""


def settings_named(name: str) -> list[str]:
    """Return every setting with this last name, as written in a file.

    >>> named("old_logprobs")
    ['algorithm.old_logprobs']
    """
    paths = [setting.path for setting in settings() if setting.path.endswith(f".{name}")]
    return list(dict.fromkeys(map(_plain, paths)))


def settings(prefix: str = "") -> list[Setting]:
    """Return every setting once; a section that recurs at or below `prefix` only shows its differences."""
    return list(_walk(Config, "", {}, prefix))


def page() -> str:
    """Return docs/settings.md: every setting once, with a heading per top-level section."""
    lines = [
        "# Settings",
        "",
        "Generated from the code by `make docs`; `mrl settings [PATH]` prints the same. Write a setting as a",
        "tree in a YAML file, or as `path=value` on the command line. The brackets of a chosen section",
        "(`algorithm.loss[gspo]`) contain its `name` or `kind` and are not part of the path.",
    ]
    for setting in settings():
        if "." not in setting.path:
            lines += ["", f"## {setting.path}", "", setting.sentence, ""]
        else:
            lines.append(f"- `{setting.path}{setting.form}` {setting.sentence}")
    return "\n".join(lines) + "\n"


def _below(path: str, prefix: str) -> bool:
    """Return True if a path is at or inside the prefix, which may omit choices: `algorithm.loss.clip_low`."""
    ends = (prefix + ".", prefix + "[")
    return not prefix or any(form == prefix or form.startswith(ends) for form in (path, _plain(path)))


def _plain(path: str) -> str:
    return re.sub(r"\[[^]]*\]", "", path)


def _walk(
    section: type[pydantic.BaseModel], prefix: str, first: dict[type[pydantic.BaseModel], str], wanted: str
) -> Iterator[Setting]:
    """Yield a section's settings; fills `first` with the path of each section's first place in `wanted`."""
    for name, field in section.model_fields.items():
        path, sentence = f"{prefix}{name}", (field.description or "").replace("\n", " ")
        sections = section_types(field.annotation)
        if not sections:
            if typing.get_args(field.annotation) != (field.default,):  # not the tag of a chosen section
                yield Setting(path, f": {type_name(field.annotation)}{_default(field)}", sentence)
            continue
        yield Setting(path, f": {_section_name(field.annotation)}", sentence)
        for inner in sections:
            inner_path = path
            if len(sections) > 1:
                inner_path = f"{path}[{tag_of(inner) or inner.__name__}]"
                yield Setting(inner_path, "", " ".join((inner.__doc__ or "").partition("\n\n")[0].split()))
            related = (other for other in first if issubclass(other, inner) or issubclass(inner, other))
            if (known := next(related, None)) is not None:
                differences = list(_differences(inner, known, f"{inner_path}."))
                yield from differences
                yield Setting(
                    f"{inner_path}.*", "", f"{'Otherwise like' if differences else 'Like'} {first[known]}."
                )
                continue
            if _below(inner_path, wanted):
                first[inner] = inner_path
            yield from _walk(inner, f"{inner_path}.", first, wanted)


def _differences(
    section: type[pydantic.BaseModel], known: type[pydantic.BaseModel], prefix: str
) -> Iterator[Setting]:
    """Yield the settings of a section that differ from those of `known`, a section of the same form."""
    alike = set(_walk(known, prefix, {}, prefix))
    return (setting for setting in _walk(section, prefix, {}, prefix) if setting not in alike)


def section_types(annotation: Any) -> list[type[pydantic.BaseModel]]:
    """Return all sections in a field's annotation, also inside unions, lists and optionals."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return [annotation] if issubclass(annotation, pydantic.BaseModel) else []
    return [s for a in typing.get_args(annotation) for s in section_types(a)]


def tag_of(section: type[pydantic.BaseModel]) -> str | None:
    """Return the fixed `name` or `kind` that chooses this section among others; None if nothing does."""
    fields = (section.model_fields.get(key) for key in ("name", "kind"))
    return next((f.default for f in fields if f is not None and isinstance(f.default, str)), None)


def section_at(parts: Sequence[str]) -> tuple[type[pydantic.BaseModel] | None, list[str]]:
    """Return the section at one of pydantic's paths, or None, and the path without chosen sections' tags."""
    section: type[pydantic.BaseModel] | None = Config
    path, is_key = [], False
    for number, part in enumerate(parts):
        field = section.model_fields.get(part) if section and not is_key else None
        if field is None:
            tagged = section and not is_key and part in (tag_of(section), section.__name__)
            path += [] if tagged else [part]
            is_key = False
            continue
        path.append(part)
        inner, remaining = section_types(field.annotation), parts[number + 1 :]
        is_key = typing.get_origin(field.annotation) is dict
        section = next(
            (s for s in inner if s.__name__ in remaining or tag_of(s) in remaining), (inner or [None])[0]
        )
    return section, path


def type_name(annotation: Any) -> str:
    """Return a type as people write it: choices in full, `| null` if optional."""
    if annotation is type(None):
        return "null"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " | ".join(str(value) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_name(argument) for argument in arguments)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin in (tuple, list):
        return f"list of ({type_name(arguments[0])})"
    if origin is dict:
        return f"mapping of {type_name(arguments[0])} to ({type_name(arguments[1])})"
    name: str = annotation.__name__
    return {"str": "text", "bool": "true | false"}.get(name, name)


def _section_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is dict:
        return "mapping of names to sections"
    if str in arguments:
        return "text | list of sections"
    if origin in (tuple, list):
        return "list of sections"
    return "section | null" if type(None) in arguments else "section"


def _default(field: Any) -> str:
    if field.default is PydanticUndefined and field.default_factory is None:
        return " (required)"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, str) and (not value or not value.isprintable()):
        return f" = {value!r}"
    shown = {None: "null", True: "true", False: "false"}
    return f" = {shown[value] if isinstance(value, bool | None) else value}"
