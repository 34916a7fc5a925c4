"""The tree of settings as text, one sentence a field, for `mrl --help`."""

from __future__ import annotations

from typing import Any

import pydantic
from pydantic_core import PydanticUndefined

from mrl.config.load import section_types
from mrl.config.root import Config


def describe(section: type[pydantic.BaseModel] = Config, indent: int = 0) -> str:
    """`name = default   sentence` lines, sections nested by two spaces."""
    return "\n".join(
        line for name, field in section.model_fields.items() for line in _field(name, field, indent)
    )


def _field(name: str, field: Any, indent: int) -> list[str]:
    space, inner = "  " * indent, section_types(field.annotation)
    sentence = (field.description or "").replace("\n", " ")
    if inner:
        return [f"{space}{name}:  # {sentence}", *[describe(s, indent + 1) for s in inner]]
    default = (
        "(required)"
        if field.default is PydanticUndefined and field.default_factory is None
        else field.default
    )
    return [f"{space}{name} = {default!s:<12}  # {sentence}"]
