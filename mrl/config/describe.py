"""The tree of settings as text, one sentence a setting: for `mrl settings` and the settings page of `make docs`."""

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

from mrl.config.other_names import answer, former
from mrl.config.root import Config
from mrl.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One setting or section."""

    path: str
    """Dotted; of sections among which one is chosen, each has its name in brackets."""
    form: str
    """Type and default."""
    sentence: str

    def __str__(self) -> str:
        return f"{self.path}{self.form}  # {self.sentence}"


def describe(prefix: str = "") -> str:
    """All settings, or those at and below a dotted path such as `reward` or `rollout.tp`.

    A line is `path: type = default  # sentence`. Raises ConfigError where the path leads to no setting.
    """
    shown = [setting for setting in settings(prefix) if _below(setting.path, prefix)]
    if not shown:
        raise ConfigError(f"there is no setting {prefix}{_hint(prefix)}; `mrl settings` prints all")
    return "\n".join(map(str, shown))


def _hint(path: str) -> str:
    """What a former section's or another system's word is here, else every setting of that last name, else the path nearest to it."""
    section, name = path.partition(".")[0], path.rpartition(".")[2]
    if said := former(Config, section):
        return f"; {section} is {said}"
    if elsewhere := answer(path):
        return elsewhere
    paths = [setting.path for setting in settings()]
    close = named(name) or difflib.get_close_matches(path, paths, n=1, cutoff=0.4)
    return f"; did you mean '{"' or '".join(close)}'?" if close else ""


def named(name: str) -> list[str]:
    """Every setting of this last name, as it is written in a file.

    >>> named("old_logprobs")
    ['algorithm.old_logprobs']
    """
    paths = [setting.path for setting in settings() if setting.path.endswith(f".{name}")]
    return list(dict.fromkeys(map(_plain, paths)))


def settings(prefix: str = "") -> list[Setting]:
    """Every setting once: of a section that is used again, at or below `prefix`, the later places show what differs from the first."""
    return list(_walk(Config, "", {}, prefix))


def page() -> str:
    """docs/settings.md: every setting once, a heading for each section of the top."""
    lines = [
        "# Settings",
        "",
        "Made from the code by `make docs`; `mrl settings [PATH]` prints the same. A setting is written in a YAML",
        "file as a tree or on the command line as `path=value`. Of sections among which one is chosen",
        "(`algorithm.loss[gspo]`), the name in brackets is the value of `name` or `kind` and no part of the path.",
    ]
    for setting in settings():
        if "." not in setting.path:
            lines += ["", f"## {setting.path}", "", setting.sentence, ""]
        else:
            lines.append(f"- `{setting.path}{setting.form}` {setting.sentence}")
    return "\n".join(lines) + "\n"


def _below(path: str, prefix: str) -> bool:
    """Whether a path is the prefix or inside it, which may leave out what is chosen: `algorithm.loss.clip_low` of every loss."""
    ends = (prefix + ".", prefix + "[")
    return not prefix or any(each == prefix or each.startswith(ends) for each in (path, _plain(path)))


def _plain(path: str) -> str:
    return re.sub(r"\[[^]]*\]", "", path)


def _walk(
    section: type[pydantic.BaseModel], prefix: str, first: dict[type[pydantic.BaseModel], str], wanted: str
) -> Iterator[Setting]:
    """The settings of a section; `first`: the path of each section's first place at or below `wanted`, which the walk fills."""
    for name, field in section.model_fields.items():
        path, sentence = f"{prefix}{name}", (field.description or "").replace("\n", " ")
        sections = section_types(field.annotation)
        if not sections:
            if typing.get_args(field.annotation) != (field.default,):  # what tells a chosen section apart
                yield Setting(path, f": {type_name(field.annotation)}{_default(field)}", sentence)
            continue
        yield Setting(path, f": {_section_name(field.annotation)}", sentence)
        for inner in sections:
            own = path
            if len(sections) > 1:
                own = f"{path}[{tag_of(inner) or inner.__name__}]"
                yield Setting(own, "", " ".join((inner.__doc__ or "").partition("\n\n")[0].split()))
            related = (each for each in first if issubclass(each, inner) or issubclass(inner, each))
            if (known := next(related, None)) is not None:
                own_settings = list(_differences(inner, known, f"{own}."))
                yield from own_settings
                yield Setting(
                    f"{own}.*", "", f"{'Otherwise as' if own_settings else 'As'} in {first[known]}."
                )
                continue
            if _below(own, wanted):
                first[inner] = own
            yield from _walk(inner, f"{own}.", first, wanted)


def _differences(
    section: type[pydantic.BaseModel], known: type[pydantic.BaseModel], prefix: str
) -> Iterator[Setting]:
    """The settings of a section that another one, of the same form, does not have alike."""
    alike = set(_walk(known, prefix, {}, prefix))
    return (setting for setting in _walk(section, prefix, {}, prefix) if setting not in alike)


def section_types(annotation: Any) -> list[type[pydantic.BaseModel]]:
    """All sections named in a field's annotation (unions, lists, optionals looked through)."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return [annotation] if issubclass(annotation, pydantic.BaseModel) else []
    return [s for a in typing.get_args(annotation) for s in section_types(a)]


def tag_of(section: type[pydantic.BaseModel]) -> str | None:
    """What chooses this section among others (its fixed `name` or `kind`), if anything does."""
    fields = (section.model_fields.get(key) for key in ("name", "kind"))
    return next((f.default for f in fields if f is not None and isinstance(f.default, str)), None)


def section_at(parts: Sequence[str]) -> tuple[type[pydantic.BaseModel] | None, list[str]]:
    """The section at a path of pydantic's, None for what is no section; and the path without the tags of
    chosen sections."""
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
        inner, rest = section_types(field.annotation), parts[number + 1 :]
        is_key = typing.get_origin(field.annotation) is dict
        section = next((s for s in inner if s.__name__ in rest or tag_of(s) in rest), (inner or [None])[0])
    return section, path


def type_name(annotation: Any) -> str:
    """The type as people write it: choices in full, `| null` where nothing may be given."""
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
