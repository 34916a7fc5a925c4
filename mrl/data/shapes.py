"""The shapes rows come in: our plain one, verl's, TRL's and GSM8K's, and a column map over any of them.

plain   {"prompt": text or messages, "answer": gold, "domain"?, "tag"?}
verl    {"prompt": messages, "reward_model": {"ground_truth": gold}, "data_source", "extra_info"}
trl     {"prompt": text or messages, "solution" | "answer" | "ground_truth": gold, further columns}
gsm8k   {"question": text, "answer": text that ends in "#### gold"}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mrl.config.data import ColumnMap, DataEntry
from mrl.errors import DataError

Messages = tuple[dict[str, str], ...]

_TRL_GOLD = ("solution", "answer", "ground_truth")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A row, its columns understood, not yet tokenised; `gold` is still as the file has it."""

    place: str
    """file:line."""
    prompt: str | Messages
    gold: Any
    domain: str
    tag: str
    metadata: Mapping[str, Any]


def shape_of(columns: Mapping[str, Any], *, place: str) -> str:
    """The format a row looks like."""
    if "reward_model" in columns:
        return "verl"
    if "question" in columns and "prompt" not in columns:
        return "gsm8k"
    if "prompt" in columns:
        return "plain" if "answer" in columns else "trl"
    raise DataError(
        f"{place}: cannot tell the format from the columns {sorted(columns)}; set data.format and data.columns"
    )


def read_row(columns: Mapping[str, Any], *, place: str, entry: DataEntry, shape: str) -> Row:
    """Understand one row. Raises DataError naming the place and the missing or malformed column."""
    mapped = entry.columns
    prompt = _prompt(columns, mapped, shape, place)
    if entry.system is not None:
        own = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
        prompt = ({"role": "system", "content": entry.system}, *own)
    domain = _optional(columns, mapped.domain or ("domain" if shape == "plain" else None)) or entry.domain
    tag_column = mapped.tag or {"plain": "tag", "verl": "data_source"}.get(shape)
    return Row(
        place=place,
        prompt=prompt,
        gold=_gold(columns, mapped, shape, place),
        domain=str(domain),
        tag=str(_optional(columns, tag_column) or ""),
        metadata=_metadata(columns, shape),
    )


def _prompt(columns: Mapping[str, Any], mapped: ColumnMap, shape: str, place: str) -> str | Messages:
    name = mapped.prompt or ("question" if shape == "gsm8k" else "prompt")
    value = _column(columns, name, place)
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{place}: column {name!r} is empty")
        return ({"role": "user", "content": value},) if shape == "gsm8k" else value
    return _messages(value, name, place)


def _messages(value: Any, name: str, place: str) -> Messages:
    wrong = f"{place}: column {name!r} must be text or a list of {{role, content}}"
    if not isinstance(value, list) or not value:
        raise DataError(f"{wrong}; it is {type(value).__name__} {str(value)[:80]!r}")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{wrong}; one message is {str(message)[:80]!r}")
        if not isinstance(message.get("content"), str):
            raise DataError(f"{wrong}; the content of a message is {str(message.get('content'))[:80]!r}")
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _gold(columns: Mapping[str, Any], mapped: ColumnMap, shape: str, place: str) -> Any:
    if mapped.answer:
        value = _column(columns, mapped.answer, place)
    elif shape == "verl":
        value = _column(columns, "reward_model.ground_truth", place)
    elif shape == "trl":
        value = next((columns[name] for name in _TRL_GOLD if columns.get(name) is not None), None)
    else:
        value = columns.get("answer")
    if shape != "gsm8k":
        return value
    if not isinstance(value, str) or "####" not in value:
        raise DataError(
            f"{place}: the answer of a gsm8k row ends in '#### n'; it ends in {str(value)[-60:]!r}"
        )
    return value.rpartition("####")[2].strip()


def _metadata(columns: Mapping[str, Any], shape: str) -> dict[str, Any]:
    if shape == "verl":
        extra = columns.get("extra_info")
        return {
            "data_source": columns.get("data_source"),
            "extra_info": dict(extra) if isinstance(extra, dict) else {},
        }
    return {name: value for name, value in columns.items() if name not in ("prompt", "question")}


def _column(columns: Mapping[str, Any], name: str, place: str) -> Any:
    value: Any = columns
    for part in name.split("."):
        if not isinstance(value, dict | Mapping) or value.get(part) is None:
            raise DataError(f"{place}: no column {name!r}; the row has {sorted(columns)}")
        value = value[part]
    return value


def _optional(columns: Mapping[str, Any], name: str | None) -> Any:
    value: Any = columns
    for part in (name or "").split("."):
        if not isinstance(value, dict | Mapping):
            return None
        value = value.get(part)
    return value
