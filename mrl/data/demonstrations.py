"""The shapes that demonstrations come in.

text          {"prompt": text or messages, "response" | "completion": text or messages}
conversation  {"messages": messages, "tools"?}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.data.messages import Messages, read_messages, read_text_or_messages, read_tools
from mrl.errors import DataError

ANSWERS = ("response", "completion")


def demonstration(columns: Mapping[str, Any], *, place: str) -> tuple[str | Messages, str | Messages]:
    """(prompt, response) of a row; a conversation is all prompt, with an empty response. A response that is a number is its text."""
    if "messages" in columns:
        return read_messages(columns["messages"], name="messages", place=place), ()
    answer = next((name for name in ANSWERS if columns.get(name) is not None), ANSWERS[0])
    if absent := [name for name in ("prompt", answer) if columns.get(name) is None]:
        raise DataError(
            f"{place}: a demonstration has a prompt and a response, or messages; this row has no {absent[0]!r}"
        )
    prompt, response = (_text(columns[name], name, place) for name in ("prompt", answer))
    return prompt, response


def _text(value: Any, name: str, place: str) -> str | Messages:
    known = isinstance(value, str | list)
    return read_text_or_messages(value, name=name, place=place) if known else str(value)


def tools_of(columns: Mapping[str, Any], *, place: str) -> list[dict[str, Any]] | None:
    """The tools that the chat template shows, None without."""
    return read_tools(columns.get("tools"), place=place)
