"""The shapes that rows of `mrl tune` come in. What they are in tokens is conversation.py's business.

Demonstrations:

text          {"prompt": text or messages, "response" | "completion": text or messages}
conversation  {"messages": messages}

Preferences:

text          {"prompt": text or messages, "chosen": text or messages, "rejected": text or messages}
whole         {"chosen": messages, "rejected": messages}: the prompt is what both begin with
dialogue      {"chosen": text, "rejected": text} of "\\n\\nHuman: ...\\n\\nAssistant: ..." turns
labelled      {"prompt": text or messages, "completion": text or messages, "label": true or false}

A pair may say more of itself, which reward models read: "margin", by how much the chosen response is better, and
"chosen_probability", how sure that is (0.8: four of five people chose it).
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
"""Columns of a demonstration's response."""


@dataclasses.dataclass(frozen=True, slots=True)
class Responses:
    """Responses to one prompt, each with its side; a pair has the chosen one first."""

    prompt: Text
    responses: tuple[Text, ...]
    sides: tuple[bool, ...]
    """True for a chosen response."""


@dataclasses.dataclass(frozen=True, slots=True)
class PairLabel:
    """What is known of a pair beside which response was chosen."""

    margin: float = 0.0
    """By how much the chosen response is better, in units of the score."""
    probability: float = 1.0
    """That the chosen response is the better one."""


CERTAIN = PairLabel()


def demonstration(columns: Mapping[str, Any], *, place: str) -> tuple[Text, Text]:
    """(prompt, response) of a row; a conversation is all prompt, with an empty response. A response that is a number is its text."""
    if "messages" in columns:
        return read_messages(columns["messages"], name="messages", place=place), ()
    answer = next((name for name in ANSWERS if columns.get(name) is not None), ANSWERS[0])
    if absent := [name for name in ("prompt", answer) if columns.get(name) is None]:
        raise DataError(
            f"{place}: a demonstration has a prompt and a response, or messages; this row has no {absent[0]!r}"
        )
    given = ((name, columns[name]) for name in ("prompt", answer))
    prompt, response = (
        _text(value if isinstance(value, str | list) else str(value), name, place) for name, value in given
    )
    return prompt, response


def label_of(columns: Mapping[str, Any], *, place: str) -> PairLabel:
    """Margin and probability of a row, where it has them. DataError names the place and what is wrong."""
    margin, probability = columns.get("margin"), columns.get("chosen_probability")
    for name, value in (("margin", margin), ("chosen_probability", probability)):
        if value is not None and (not isinstance(value, int | float) or not math.isfinite(value)):
            raise DataError(f"{place}: {name} is a number, not {value!r}")
    if probability is not None and not 0 <= probability <= 1:
        raise DataError(f"{place}: chosen_probability is between 0 and 1, not {probability}")
    return PairLabel(
        0.0 if margin is None else float(margin), 1.0 if probability is None else float(probability)
    )


def preferences(columns: Mapping[str, Any], *, place: str) -> Responses:
    """The pair of a row. DataError names the place and what is wrong."""
    if absent := [name for name in ("chosen", "rejected") if columns.get(name) is None]:
        raise DataError(f"{place}: no column {absent[0]!r}; the row has {names_of(columns)}")
    chosen, rejected = (_text(columns[name], name, place) for name in ("chosen", "rejected"))
    prompt = _text(columns["prompt"], "prompt", place) if columns.get("prompt") is not None else None
    return Responses(*_split(prompt, chosen, rejected, place), (True, False))


def labelled(columns: Mapping[str, Any], *, place: str) -> list[Responses]:
    """The response of a row with its label, or each of a pair's by itself."""
    if "label" not in columns:
        pair = preferences(columns, place=place)
        taken_apart = zip(pair.responses, pair.sides, strict=True)
        return [Responses(pair.prompt, (response,), (side,)) for response, side in taken_apart]
    if not isinstance(columns["label"], bool | int) or columns["label"] not in (0, 1):
        raise DataError(f"{place}: label is true or false, not {columns['label']!r}")
    prompt, response = (_column(columns, name, place) for name in ("prompt", "completion"))
    return [Responses(prompt, (response,), (bool(columns["label"]),))]


def _split(prompt: Text | None, chosen: Text, rejected: Text, place: str) -> tuple[Text, tuple[Text, Text]]:
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(f"{place}: chosen and rejected are both text or both messages")
    if isinstance(chosen, str) and isinstance(rejected, str):
        return (prompt, (chosen, rejected)) if prompt is not None else _dialogue(chosen, rejected, place)
    assert not isinstance(chosen, str) and not isinstance(rejected, str)
    if prompt is not None and chosen[0]["role"] == "assistant":
        asked = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
        return asked, (chosen, rejected)
    return _whole(chosen, rejected, place)


def _whole(chosen: Messages, rejected: Messages, place: str) -> tuple[Text, tuple[Text, Text]]:
    common = _shared(chosen, rejected)
    rest = chosen[common:], rejected[common:]
    if not common or not all(part and part[0]["role"] == "assistant" for part in rest):
        raise DataError(
            f"{place}: chosen and rejected are conversations that begin alike and then differ in what the assistant says; these "
            f"share {common} messages"
        )
    return chosen[:common], rest


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many elements both begin with."""
    unlike = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(unlike, min(len(one), len(other)))


def _dialogue(chosen: str, rejected: str, place: str) -> tuple[Text, tuple[Text, Text]]:
    end = chosen[: _shared(chosen, rejected)].rfind(ASSISTANT)
    if end < 0:
        raise DataError(
            f"{place}: without a prompt, texts share turns up to an '{ASSISTANT.strip()}'; give a column 'prompt'"
        )
    end += len(ASSISTANT)
    return chosen[:end], (chosen[end:], rejected[end:])


def _column(columns: Mapping[str, Any], name: str, place: str) -> Text:
    if columns.get(name) is None:
        raise DataError(f"{place}: no column {name!r}; the row has {names_of(columns)}")
    return _text(columns[name], name, place)


def _text(value: Any, name: str, place: str) -> Text:
    return read_text_or_messages(value, name=name, place=place)
