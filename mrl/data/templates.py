"""Conversations as a tokenizer's own chat template renders them."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from jinja2 import TemplateError

from mrl.errors import MrlError

TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError)
"""What a template raises for a conversation that it does not take."""


SECONDS = 10.0
"""Of processor time for one conversation, which takes a thousandth of it."""


class EndlessTemplate(MrlError):
    """Rendering a conversation took longer than SECONDS; what handles a row that a template refuses lets it through."""


class JsonText(dict[str, Any]):
    """An object with the JSON text that it was read from."""

    def __init__(self, value: Mapping[str, Any], text: str) -> None:
        super().__init__(value)
        self.text = text

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonText, (dict(self), self.text)


def apply_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
    """Render messages; the arguments of tool calls are objects, or JSON text where the template takes text (DeepSeek V3).

    Raises what is in TEMPLATE_ERRORS for messages that the template does not take, and EndlessTemplate.
    """
    given = list(_arguments_of(messages))
    try:
        text = _applied(tokenizer, messages, arguments)
    except TEMPLATE_ERRORS:
        if given and (as_text := _with_text(tokenizer, messages, given, arguments)) is not None:
            return as_text
        raise
    if any(each and str(each) in text for each in given):  # as Python prints an object
        as_text = _with_text(tokenizer, messages, given, arguments)
        return text if as_text is None else as_text
    return text


def _with_text(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], given: list[Any], arguments: Mapping[str, Any]
) -> str | None:
    """The conversation with JSON text for arguments; None where the template does not show it as it is."""
    changed = [
        {**message, "tool_calls": [_as_text(call) for call in calls]}
        if (calls := _calls(message))
        else message
        for message in messages
    ]
    try:
        text = _applied(tokenizer, changed, arguments)
    except TEMPLATE_ERRORS:
        return None
    return text if all(_text_of(each) in text for each in given) else None


def _applied(tokenizer: Any, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> str:
    with _ends(tokenizer):
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments))


@contextlib.contextmanager
def _ends(tokenizer: Any) -> Iterator[None]:
    """Raise EndlessTemplate after SECONDS; only the main thread can be interrupted, and it is the one that loads rows."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise EndlessTemplate(
            f"the chat template of {getattr(tokenizer, 'name_or_path', '') or 'the tokenizer'} did not render a conversation in "
            f"{SECONDS:g} s of processor time; mend its loops, or set data.chat_template=false"
        )

    handler = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)


def _calls(message: Mapping[str, Any]) -> list[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _arguments_of(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        for call in _calls(message):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
                yield function["arguments"]


def _as_text(call: Any) -> Any:
    if not list(_arguments_of([{"tool_calls": [call]}])):
        return call
    return {**call, "function": {**call["function"], "arguments": _text_of(call["function"]["arguments"])}}


def _text_of(arguments: Mapping[str, Any]) -> str:
    return arguments.text if isinstance(arguments, JsonText) else json.dumps(arguments, ensure_ascii=False)
