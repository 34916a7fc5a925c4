"""Names that users write: checked against the known ones, with the nearest in the refusal, and those that are gone."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, get_args


def named(what: str, literal: Any) -> Callable[[Any], Any]:
    """A validator whose error lists the known names with the nearest first."""
    names = [str(name) for name in get_args(literal)]

    def check(value: Any) -> Any:
        if value is None or value in names or not isinstance(value, str):
            return value
        close = difflib.get_close_matches(value, names, n=1, cutoff=0.4)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise ValueError(f"unknown {what} '{value}': {hint}known: {', '.join(names)}")

    return check


def gone(advice: Mapping[str, str]) -> Callable[[Any], Any]:
    """A validator that refuses values which earlier versions took, each with what to write instead."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and value in advice:
            raise ValueError(f"'{value}' is gone: {advice[value]}")
        return value

    return check
