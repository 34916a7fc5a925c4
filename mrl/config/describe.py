"""The tree of settings as text, one sentence a field, for `mrl settings`."""

from __future__ import annotations

import difflib
import types
import typing
from typing import Any, Literal

import pydantic
from pydantic_core import PydanticUndefined

from mrl.config.load import section_types, tag_of
from mrl.config.root import Config
from mrl.errors import ConfigError


def describe(prefix: str = "") -> str:
    """All settings, or those at and below a dotted path such as `reward` or `rollout.tp`; ConfigError where there is none.

    A line is `path: type = default  # sentence`. A section that stands in several places is printed at the first; among
    sections of which one is chosen, each has its name behind its path.
    """
    shown = [line for path, line in _lines(Config, "", set()) if _below(path, prefix)]
    if not shown and prefix:  # inside a section that is printed at its first place alone
        shown = [line for path, line in _lines(Config, "", None) if _below(path, prefix)]
    if not shown:
        paths = [path for path, _ in _lines(Config, "", set())]
        close = difflib.get_close_matches(prefix, paths, n=1, cutoff=0.4)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise ConfigError(f"there is no setting {prefix}{hint} `mrl settings` prints all")
    return "\n".join(shown)


def _below(path: str, prefix: str) -> bool:
    return not prefix or path == prefix or path.startswith((prefix + ".", prefix + "["))


def _lines(
    section: type[pydantic.BaseModel], prefix: str, printed: set[type] | None, depth: int = 0
) -> list[tuple[str, str]]:
    """(path, line) of each field; `printed` are sections that were printed elsewhere, None where they are printed again."""
    found: list[tuple[str, str]] = []
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        sentence = (field.description or "").replace("\n", " ")
        inner = section_types(field.annotation)
        if not inner:
            found.append((path, f"{path}: {type_name(field.annotation)}{_default(field)}  # {sentence}"))
            continue
        found.append((path, f"{path}: {_section_name(field.annotation)}  # {sentence}"))
        for each in inner:
            own = f"{path}[{tag_of(each) or each.__name__}]" if len(inner) > 1 else path
            if depth > 3 or any(issubclass(known, each) for known in printed or ()):
                found.append((f"{own}.", f"{own}.*  # settings that stand above"))
                continue
            if printed is not None:
                printed.add(each)
            found += _lines(each, f"{own}.", printed, depth + 1)
    return found


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
    if str in arguments:
        return "text | list of sections"
    if origin in (tuple, list):
        return "list of sections"
    if origin is dict:
        return "mapping of names to sections"
    return "section"


def _default(field: Any) -> str:
    if field.default is PydanticUndefined and field.default_factory is None:
        return " (required)"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, tuple):
        value = list(value)
    shown = {None: "null", True: "true", False: "false", "": "''"}
    return f" = {shown.get(value, value) if isinstance(value, bool | str | None) else value}"
