"""Read a row of any supported format, or with a column map over one. docs/data.md shows a row of each.

plain      {"prompt": text or messages, "answer": ground truth, "domain"?, "tag"?}
verl       {"prompt": messages, "reward_model": {"ground_truth": ground truth}, "data_source", "extra_info"}
trl        {"prompt": text or messages, "solution" | "answer" | "ground_truth": ground truth, further columns}
messages   {"messages": messages, "solution" | "answer" | "ground_truth": ground truth}
gsm8k      {"question": text, "answer": text that ends in "#### ground truth"}
math       {"problem": text, "answer" | "solution": ground truth, perhaps in a text's last \\boxed{}}
ifeval     {"prompt": text, "instruction_id_list": names, "kwargs": arguments of each}

Any row may have "tools" and "chat_template_kwargs". Columns other than the prompt reach reward functions
unchanged.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from mrl.config.sections.data import ColumnMap, DataEntry
from mrl.data.messages import (
    Messages,
    read_messages,
    read_template_arguments,
    read_text_or_messages,
    read_tools,
    without_nulls,
)
from mrl.data.odd_values import refuse_lone_surrogates, without_nan
from mrl.errors import DataError
from mrl.samples import Prompt

_PICTURES = ("image", "images", "video", "videos", "audio", "audios")


@dataclasses.dataclass(frozen=True)
class Fields:
    """Column names of a format; a dotted name reaches into a nested column."""

    prompt: str
    answer: tuple[str, ...]
    """The first of these columns that a row has contains the ground truth."""
    needs_answer: bool = False
    domain: str | None = None
    tag: str | None = None
    tools: str = "tools"
    chat_template_kwargs: str = "chat_template_kwargs"


_ANSWERS = ("solution", "answer", "ground_truth")
_FORMATS = {
    "plain": Fields("prompt", ("answer",), domain="domain", tag="tag"),
    "verl": Fields("prompt", ("reward_model.ground_truth",), needs_answer=True, tag="data_source"),
    "trl": Fields("prompt", _ANSWERS),
    "messages": Fields("messages", _ANSWERS),
    "gsm8k": Fields("question", ("answer",), needs_answer=True),
    "math": Fields("problem", ("answer", "solution")),
    "ifeval": Fields("prompt", ("instruction_id_list", "kwargs"), needs_answer=True),
}
_QUESTIONS = ("gsm8k", "math", "ifeval")
"""Formats whose prompt is a plain question: it becomes a user message."""


@dataclasses.dataclass(frozen=True, slots=True)
class DataRow:
    """A row with its columns interpreted but not tokenised; `ground_truth` is still as in the file."""

    place: str
    """file:line."""
    prompt: str | Messages
    ground_truth: Any
    domain: str
    tag: str
    metadata: Mapping[str, Any]
    tools: list[dict[str, Any]] | None = None
    """JSON schemas that the chat template shows the model; None if the row has no such column."""
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    content: str = ""
    """Digest of the row's content (identity.py)."""


def shape_of(columns: Mapping[str, Any], *, place: str) -> str:
    """Return the format that a row looks like. Raises DataError if its columns fit none."""
    if "reward_model" in columns:
        return "verl"
    if "instruction_id_list" in columns:
        return "ifeval"
    if "prompt" in columns:
        return "plain" if "answer" in columns else "trl"
    for column, shape in (("question", "gsm8k"), ("problem", "math"), ("messages", "messages")):
        if column in columns:
            return shape
    raise DataError(
        f"{place}: no known format has the columns {names_of(columns)}; set data.format and data.columns"
    )


def names_of(columns: Mapping[str, Any]) -> list[str]:
    """Return a row's column names for an error message: at most 30, each cut to 60 characters."""
    names = [name if len(name) <= 60 else f"{name[:60]}..." for name in sorted(columns)]
    return names if len(names) <= 30 else [*names[:30], f"and {len(names) - 30} more"]


def fields_of(shape: str, mapped: ColumnMap) -> Fields:
    """Return the columns of a format, with the names of `mapped` in place of the format's own."""
    return _fields(shape, tuple(mapped))


@functools.cache
def _fields(shape: str, mapped: tuple[tuple[str, Any], ...]) -> Fields:
    overrides = {name: value for name, value in mapped if value is not None}
    if "answer" in overrides:
        overrides |= {"answer": (overrides["answer"],), "needs_answer": True}
    return dataclasses.replace(_FORMATS[shape], **overrides)


def read_row(
    columns: Mapping[str, Any], *, place: str, entry: DataEntry, shape: str, from_arrow: bool = False
) -> DataRow:
    """Interpret the columns of one row. Raises DataError if a column is missing or malformed.

    `place` is file:line. In rows `from_arrow` a null field of a message or tool means an absent field.
    """
    fields = fields_of(shape, entry.columns)
    _refuse_pictures(columns, place)
    clean = without_nulls if from_arrow else _as_it_is
    whole = _prompt(clean(_column(columns, fields.prompt, place)), fields, shape, place)
    prompt = whole if isinstance(whole, str) else _up_to_the_last_question(whole, shape, place)
    if entry.system is not None:
        messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
        prompt = ({"role": "system", "content": entry.system}, *messages)
    row = DataRow(
        place=place,
        prompt=prompt,
        ground_truth=_ground_truth(columns, fields, shape, place),
        domain=str(_optional(columns, fields.domain) or entry.domain),
        tag=str(_optional(columns, fields.tag) or ""),
        metadata={n: v for n, v in columns.items() if n != fields.prompt or shape == "messages"},
        tools=read_tools(clean(_optional(columns, fields.tools)), place=place),
        chat_template_kwargs=read_template_arguments(
            clean(_optional(columns, fields.chat_template_kwargs)), place=place
        ),
    )
    refuse_lone_surrogates((columns, row.prompt, row.tools, row.chat_template_kwargs), place)
    return row


def as_prompt(row: DataRow, *, index: int, tokens: np.ndarray, text: str) -> Prompt:
    """Build the prompt of a row with parsed ground truth from the text the model reads and its ids [T]."""
    return Prompt(
        index=index,
        tokens=tokens,
        text=text,
        ground_truth=row.ground_truth,
        domain=row.domain,
        tag=row.tag,
        row=row.place,
        metadata=row.metadata,
        messages=() if isinstance(row.prompt, str) else row.prompt,
        content=row.content,
    )


def texts_of(prompt: str | Messages) -> str:
    """Return the prompt's text, or the texts of its messages, joined by newlines."""
    return prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt if m.get("content"))


def _refuse_pictures(columns: Mapping[str, Any], place: str) -> None:
    filled = [name for name in _PICTURES if columns.get(name)]
    if filled:
        raise DataError(
            f"{place}: columns {filled} are not empty, but the models trained here read only text; "
            "remove these columns from the file if the prompt does not need them"
        )


def _prompt(value: Any, fields: Fields, shape: str, place: str) -> str | Messages:
    if shape == "messages":
        return read_messages(value, name=fields.prompt, place=place)
    prompt = read_text_or_messages(value, name=fields.prompt, place=place)
    if not isinstance(prompt, str):
        return prompt
    if not prompt.strip():
        raise DataError(f"{place}: column {fields.prompt!r} is empty")
    return ({"role": "user", "content": prompt},) if shape in _QUESTIONS else prompt


def _up_to_the_last_question(messages: Messages, shape: str, place: str) -> Messages:
    """Drop the last answers of a conversation, which the policy has to give; return a prompt unchanged."""
    end = len(messages)
    while shape == "messages" and end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end:
        raise DataError(f"{place}: all messages have the role assistant; a prompt must end with another role")
    return messages[:end]


def _ground_truth(columns: Mapping[str, Any], fields: Fields, shape: str, place: str) -> Any:
    values = (_optional(columns, name) for name in fields.answer)
    value = next((value for value in values if value is not None), None)
    if value is None and fields.needs_answer:
        _column(columns, fields.answer[0], place)
    if shape == "ifeval" and "kwargs" in fields.answer:
        return {"instruction_id_list": value, "kwargs": columns.get("kwargs")}
    if shape != "gsm8k":
        return value
    if not isinstance(value, str) or "####" not in value:
        raise DataError(
            f"{place}: the answer of a gsm8k row must end in '#### n', but ends in {str(value)[-60:]!r}"
        )
    return value.rpartition("####")[2].strip()


def _as_it_is(value: Any) -> Any:
    return value


def _column(columns: Mapping[str, Any], name: str, place: str) -> Any:
    value = _optional(columns, name)
    if value is None:
        raise DataError(f"{place}: no column {name!r}; the row has {names_of(columns)}")
    return value


def _optional(columns: Mapping[str, Any], name: str | None) -> Any:
    value: Any = columns
    for part in (name or "").split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return without_nan(value)
