"""The shape that labelled steps come in (stepwise supervision, as in TRL).

stepwise      {"prompt": text or messages, "completions": [text of a step], "labels": [true, false, 0..1 or null]}

A label says whether its step is right, a number between 0 and 1 how likely that is (the share of continuations that came to the
right answer: Math-Shepherd, arXiv 2312.08935); a step with null is read and not judged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mrl.data.messages import Messages, read_text_or_messages
from mrl.data.row_shapes import names_of
from mrl.errors import DataError
from mrl.reasoning_steps import joined_steps, split_steps


@dataclasses.dataclass(frozen=True, slots=True)
class Stepwise:
    """A response in steps."""

    prompt: str | Messages
    steps: tuple[str, ...]
    """Each with the separator after it."""
    labels: tuple[float | None, ...]
    """The probability that each step is right; None where nobody judged it."""


def stepwise(columns: Mapping[str, Any], separator: str, *, place: str) -> Stepwise:
    """The response of a row. DataError names the place and what is wrong."""
    names = ("prompt", "completions", "labels")
    if absent := [name for name in names if columns.get(name) is None]:
        raise DataError(f"{place}: no column {absent[0]!r}; the row has {names_of(columns)}")
    prompt, steps, labels = (columns[name] for name in names)
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) for step in steps):
        raise DataError(f"{place}: completions is a list of texts, one of each step")
    if not isinstance(labels, list) or len(labels) != len(steps):
        raise DataError(f"{place}: labels is a list with one label of each of the {len(steps)} completions")
    parts, found = joined_steps(steps, separator), tuple(_label(each, place) for each in labels)
    if split_steps("".join(parts), separator) != parts:
        raise DataError(
            f"{place}: a step is blank or has {separator!r} inside, so that the response would be cut into other steps; set "
            "tune.data.step_separator to what stands between steps alone"
        )
    if all(label is None for label in found):
        raise DataError(f"{place}: no step has a label")
    read = read_text_or_messages(prompt, name="prompt", place=place)
    return Stepwise(read, tuple(parts), found)


def _label(value: Any, place: str) -> float | None:
    if value is None:
        return None
    if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
        raise DataError(f"{place}: a label is true, false, a number between 0 and 1, or null, not {value!r}")
    return float(value)
