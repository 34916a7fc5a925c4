"""Read the row shapes of `mrl tune`; conversation.py turns them into tokens.

Demonstrations:

text          {"prompt": text or messages, "response" | "completion": text or messages}
conversation  {"messages": messages}

Preferences:

text          {"prompt": text or messages, "chosen": text or messages, "rejected": text or messages}
whole         {"chosen": messages, "rejected": messages}: the prompt is their common prefix
dialogue      {"chosen": text, "rejected": text} of "\\n\\nHuman: ...\\n\\nAssistant: ..." turns
labelled      {"prompt": text or messages, "completion": text or messages, "label": true or false}

A pair may have two further columns for reward models: "margin", by how much the chosen response is better,
and "chosen_probability", the probability that it is better (0.8: four of five people chose it).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mrl.data.messages import Messages, read_messages, read_text_or_messages
from mrl.data.row_shapes import names_of
from mrl.errors import DataError

Text = str | Messages
ASSISTANT = "\n\nAssistant:"
ANSWERS = ("response", "completion")
"""Columns that may contain a demonstration's response."""


@dataclasses.dataclass(frozen=True, slots=True)
class Responses:
    """Responses to one prompt, each with its side; a pair has the chosen one first."""

    prompt: Text
    responses: tuple[Text, ...]
    sides: tuple[bool, ...]
    """True for a chosen response."""


@dataclasses.dataclass(frozen=True, slots=True)
class PairLabel:
    """Further label of a pair, besides which response was chosen."""

    margin: float = 0.0
    """By how much the chosen response is better, in units of the score."""
    probability: float = 1.0
    """Probability that the chosen response is better."""


CERTAIN = PairLabel()


def read_demonstration(columns: Mapping[str, Any], *, place: str) -> tuple[Text, Text]:
    """Return (prompt, response) of a row; a conversation is all prompt. A numeric response becomes text."""
    if "messages" in columns:
        return read_messages(columns["messages"], name="messages", place=place), ()
    response_column = next((name for name in ANSWERS if columns.get(name) is not None), ANSWERS[0])
    if absent := [name for name in ("prompt", response_column) if columns.get(name) is None]:
        raise DataError(
            f"{place}: no column {absent[0]!r}; a demonstration needs a prompt and a response, or messages"
        )
    cells = ((name, columns[name]) for name in ("prompt", response_column))
    prompt, response = (
        _text(value if isinstance(value, str | list) else str(value), name, place) for name, value in cells
    )
    return prompt, response


def label_of(columns: Mapping[str, Any], *, place: str) -> PairLabel:
    """Return a row's margin and probability, or their defaults. Raises DataError if one is invalid."""
    margin, probability = columns.get("margin"), columns.get("chosen_probability")
    for name, value in (("margin", margin), ("chosen_probability", probability)):
        if value is not None and (not isinstance(value, int | float) or not math.isfinite(value)):
            raise DataError(f"{place}: {name} must be a finite number, not {value!r}")
    if probability is not None and not 0 <= probability <= 1:
        raise DataError(f"{place}: chosen_probability must be between 0 and 1, not {probability}")
    return PairLabel(
        0.0 if margin is None else float(margin), 1.0 if probability is None else float(probability)
    )


def read_pair(columns: Mapping[str, Any], *, place: str) -> Responses:
    """Return the pair of a row. Raises DataError if a column is missing or malformed."""
    if absent := [name for name in ("chosen", "rejected") if columns.get(name) is None]:
        raise DataError(f"{place}: no column {absent[0]!r}; the row has {names_of(columns)}")
    chosen, rejected = (_text(columns[name], name, place) for name in ("chosen", "rejected"))
    prompt = _text(columns["prompt"], "prompt", place) if columns.get("prompt") is not None else None
    return Responses(*_split(prompt, chosen, rejected, place), (True, False))


def read_labelled(columns: Mapping[str, Any], *, place: str) -> list[Responses]:
    """Return a row's labelled response, or each response of a pair with its label."""
    if "label" not in columns:
        pair = read_pair(columns, place=place)
        singles = zip(pair.responses, pair.sides, strict=True)
        return [Responses(pair.prompt, (response,), (side,)) for response, side in singles]
    if not isinstance(columns["label"], bool | int) or columns["label"] not in (0, 1):
        raise DataError(f"{place}: label must be true or false, not {columns['label']!r}")
    prompt, response = (_column(columns, name, place) for name in ("prompt", "completion"))
    return [Responses(prompt, (response,), (bool(columns["label"]),))]


def _split(prompt: Text | None, chosen: Text, rejected: Text, place: str) -> tuple[Text, tuple[Text, Text]]:
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(f"{place}: chosen and rejected must both be text or both be messages")
    if isinstance(chosen, str) and isinstance(rejected, str):
        return (prompt, (chosen, rejected)) if prompt is not None else _dialogue(chosen, rejected, place)
    assert not isinstance(chosen, str) and not isinstance(rejected, str)
    if prompt is not None and chosen[0]["role"] == "assistant":
        messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
        return messages, (chosen, rejected)
    return _whole(chosen, rejected, place)


def _whole(chosen: Messages, rejected: Messages, place: str) -> tuple[Text, tuple[Text, Text]]:
    common = _shared(chosen, rejected)
    endings = chosen[common:], rejected[common:]
    if not common or not all(part and part[0]["role"] == "assistant" for part in endings):
        raise DataError(
            f"{place}: chosen and rejected must share their first messages and then differ in the "
            f"assistant's; these share {common} messages"
        )
    return chosen[:common], endings


def _shared(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return the length of the common prefix."""
    differing = (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(differing, min(len(left), len(right)))


def _dialogue(chosen: str, rejected: str, place: str) -> tuple[Text, tuple[Text, Text]]:
    end = chosen[: _shared(chosen, rejected)].rfind(ASSISTANT)
    if end < 0:
        raise DataError(
            f"{place}: texts without a prompt must share turns up to '{ASSISTANT.strip()}'; add a column "
            "'prompt'"
        )
    end += len(ASSISTANT)
    return chosen[:end], (chosen[end:], rejected[end:])


def _column(columns: Mapping[str, Any], name: str, place: str) -> Text:
    if columns.get(name) is None:
        raise DataError(f"{place}: no column {name!r}; the row has {names_of(columns)}")
    return _text(columns[name], name, place)


def _text(value: Any, name: str, place: str) -> Text:
    return read_text_or_messages(value, name=name, place=place)
