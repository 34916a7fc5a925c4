"""Base class of every configuration section, and the check of names that users write."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Any, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator


class Section(BaseModel):
    """Group of settings, strict and frozen: unknown keys are errors. Every field has a sentence for users."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True
    )

    def faults(self) -> Iterator[str]:
        """Yield a sentence for each combination of settings that is invalid although each one is valid."""
        yield from ()

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        for fault in self.faults():
            raise ValueError(fault)
        return self


def known_name(kind: str, choices: Any) -> Callable[[Any], Any]:
    """Return a validator whose error lists the valid names (a Literal's, or a tuple), the closest first."""
    names = [str(name) for name in get_args(choices) or choices]

    def check(value: Any) -> Any:
        if value is None or value in names or not isinstance(value, str):
            return value
        close = difflib.get_close_matches(value, names, n=1, cutoff=0.4)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise ValueError(f"unknown {kind} '{value}': {hint}known: {', '.join(names)}")

    return check


def chosen(kind: str, key: str, literal: Any, *, default: str) -> BeforeValidator:
    """Return a validator for a union of sections told apart by `key`: fills it in, refuses unknown ones."""
    check = known_name(kind, literal)

    def choose(value: Any) -> Any:
        return value | {key: check(value.get(key, default))} if isinstance(value, dict) else value

    return BeforeValidator(choose)
