"""The formats rows come in, and a column map over any of them. docs/data.md shows a row of each.

plain      {"prompt": text or messages, "answer": ground truth, "domain"?, "tag"?}
verl       {"prompt": messages, "reward_model": {"ground_truth": ground truth}, "data_source", "extra_info"}
trl        {"prompt": text or messages, "solution" | "answer" | "ground_truth": ground truth, further columns}
messages   {"messages": messages, "solution" | "answer" | "ground_truth": ground truth}
gsm8k      {"question": text, "answer": text that ends in "#### ground truth"}
math       {"problem": text, "answer" | "solution": ground truth, perhaps in a text's last \\boxed{}}
ifeval     {"prompt": text, "instruction_id_list": names, "kwargs": arguments of each}

Any row may have "tools" and "chat_template_kwargs". Columns that are not the prompt go to reward functions
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
from mrl.data.odd_values import refuse_half_characters, without_nan
from mrl.errors import DataError
from mrl.samples import Prompt

_PICTURES = ("image", "images", "video", "videos", "audio", "audios")


@dataclasses.dataclass(frozen=True)
class Fields:
    """Names of the columns of a format; a dotted name reaches into a nested column."""

    prompt: str
    answer: tuple[str, ...]
    """The first of these that a row has holds the ground truth."""
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
"""Formats whose prompt is a question in plain words: it becomes the message of a user."""


@dataclasses.dataclass(frozen=True, slots=True)
class DataRow:
    """A row, its columns understood, not yet tokenised; `ground_truth` is still as the file has it."""

    place: str
    """file:line."""
    prompt: str | Messages
    ground_truth: Any
    domain: str
    tag: str
    metadata: Mapping[str, Any]
    tools: list[dict[str, Any]] | None = None
    """JSON schemas that the chat template shows the model; None where the row has no such column."""
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    content: str = ""
    """Digest of what it says (identity.py)."""


def shape_of(columns: Mapping[str, Any], *, place: str) -> str:
    """The format a row looks like."""
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
        f"{place}: cannot tell the format from the columns {names_of(columns)}; set data.format and data.columns"
    )


def names_of(columns: Mapping[str, Any]) -> list[str]:
    """The names of a row's columns as an error shows them: not all of very many, nor whole where one is a text's length."""
    names = [name if len(name) <= 60 else f"{name[:60]}..." for name in sorted(columns)]
    return names if len(names) <= 30 else [*names[:30], f"and {len(names) - 30} more"]


def fields_of(shape: str, mapped: ColumnMap) -> Fields:
    """The columns of a format, with the map's names in place of the format's own."""
    return _fields(shape, tuple(mapped))


@functools.cache
def _fields(shape: str, mapped: tuple[tuple[str, Any], ...]) -> Fields:
    own = {name: value for name, value in mapped if value is not None}
    if "answer" in own:
        own |= {"answer": (own["answer"],), "needs_answer": True}
    return dataclasses.replace(_FORMATS[shape], **own)


def read_row(
    columns: Mapping[str, Any], *, place: str, entry: DataEntry, shape: str, from_arrow: bool = False
) -> DataRow:
    """Understand one row. Raises DataError naming the place and the missing or malformed column.

    In rows `from_arrow` a null field of a message or tool means that there is no such field.
    """
    fields = fields_of(shape, entry.columns)
    _refuse_pictures(columns, place)
    clean = without_nulls if from_arrow else _as_it_is
    whole = _prompt(clean(_column(columns, fields.prompt, place)), fields, shape, place)
    prompt = whole if isinstance(whole, str) else _up_to_the_last_question(whole, shape, place)
    if entry.system is not None:
        own = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
        prompt = ({"role": "system", "content": entry.system}, *own)
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
    refuse_half_characters((columns, row.prompt, row.tools, row.chat_template_kwargs), place)
    return row


def as_prompt(row: DataRow, *, index: int, tokens: np.ndarray, text: str) -> Prompt:
    """The prompt of a row whose ground truth is parsed: `text` is what the model reads, `tokens` its ids."""
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
    """The prompt's own text, or its messages' texts, each from a new line."""
    return prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt if m.get("content"))


def _refuse_pictures(columns: Mapping[str, Any], place: str) -> None:
    held = [name for name in _PICTURES if columns.get(name)]
    if held:
        raise DataError(
            f"{place}: the row has something in {held}, and the models trained here take text alone; "
            "leave these columns out of the file if the prompt does not need them"
        )


def _prompt(value: Any, fields: Fields, shape: str, place: str) -> str | Messages:
    if shape == "messages":
        return read_messages(value, name=fields.prompt, place=place)
    read = read_text_or_messages(value, name=fields.prompt, place=place)
    if not isinstance(read, str):
        return read
    if not read.strip():
        raise DataError(f"{place}: column {fields.prompt!r} is empty")
    return ({"role": "user", "content": read},) if shape in _QUESTIONS else read


def _up_to_the_last_question(messages: Messages, shape: str, place: str) -> Messages:
    """A conversation without its last answers, which are the policy's to give; a prompt as it is."""
    end = len(messages)
    while shape == "messages" and end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end:
        raise DataError(f"{place}: all messages are the assistant's; a prompt ends with another role's")
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
            f"{place}: the answer of a gsm8k row ends in '#### n'; it ends in {str(value)[-60:]!r}"
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
