"""Render conversations with the tokenizer's own chat template."""

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
"""What a template raises for a conversation that it rejects."""


SECONDS = 10.0
"""Limit of processor time for one conversation, which normally takes a thousandth of it."""


class EndlessTemplate(MrlError):
    """Rendering took longer than SECONDS. Not in TEMPLATE_ERRORS, so it is not treated as a rejected row."""


class JsonText(dict[str, Any]):
    """An object together with the JSON text from which it was read."""

    def __init__(self, value: Mapping[str, Any], text: str) -> None:
        super().__init__(value)
        self.text = text

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonText, (dict(self), self.text)


def apply_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
    """Render messages; tool-call arguments are objects, or JSON text if the template needs it (DeepSeek V3).

    Raises one of TEMPLATE_ERRORS for messages that the template rejects, and EndlessTemplate.
    """
    values = list(_arguments_of(messages))
    try:
        text = _applied(tokenizer, messages, arguments)
    except TEMPLATE_ERRORS:
        if values and (as_text := _with_text(tokenizer, messages, values, arguments)) is not None:
            return as_text
        raise
    if any(item and str(item) in text for item in values):  # as Python prints an object
        as_text = _with_text(tokenizer, messages, values, arguments)
        return text if as_text is None else as_text
    return text


def _with_text(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], values: list[Any], arguments: Mapping[str, Any]
) -> str | None:
    """Render with JSON text for arguments; return None if the template does not show that text unchanged."""
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
    return text if all(_text_of(item) in text for item in values) else None


def _applied(tokenizer: Any, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> str:
    with _ends(tokenizer):
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments))


@contextlib.contextmanager
def _ends(tokenizer: Any) -> Iterator[None]:
    """Raise EndlessTemplate after SECONDS; only the main thread gets signals, and it loads the rows."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise EndlessTemplate(
            f"the chat template of {getattr(tokenizer, 'name_or_path', '') or 'the tokenizer'} takes more "
            f"than {SECONDS:g} s of processor time; fix its loops, or set data.chat_template=false"
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
