"""The driver's cost for a policy's text is linear in its length, whatever it contains."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from mrl.agents.render import Observation, TurnRenderer
from mrl.agents.tool_calls import parse_tool_calls
from mrl.rewards.visible import visible_text, with_opened_thought
from tests.support import chat_tokenizers
from tests.support.hostile_texts import texts

TOOLS = {
    "say": {
        "type": "object",
        "properties": {"text": {"type": "string"}, "items": {"type": "array", "uniqueItems": True}},
    }
}
RENDERER = TurnRenderer(chat_tokenizers.qwen(), roles=("tool",))
READERS: dict[str, Callable[[str], Any]] = {
    "hermes": lambda text: parse_tool_calls(text, "hermes", TOOLS),
    "json": lambda text: parse_tool_calls(text, "json", TOOLS),
    "visible": visible_text,
    "opened": lambda text: with_opened_thought(text, text),
    "observed": lambda text: RENDERER.after(None, [Observation(text, "tool")]),
}
LENGTH, TIMES = 6_000, 4
SQUARE_SECONDS = 0.03
"""A text of TIMES * LENGTH characters read faster than this is linear; a square would take seconds."""


def _seconds(read: Callable[[str], Any], text: str) -> float:
    start = time.thread_time()
    read(text)
    return time.thread_time() - start


@pytest.mark.parametrize("name", READERS)
def test_a_text_four_times_as_long_takes_four_times_as_long(name: str) -> None:
    """A square would take sixteen times as long; nine allows for caches and a noisy clock."""
    read = READERS[name]
    length = LENGTH // 6 if name == "observed" else LENGTH  # a tokenizer takes long for every letter
    for (kind, short), (_, long) in zip(texts(length), texts(TIMES * length), strict=True):
        if _seconds(read, long) > SQUARE_SECONDS:
            before, after = (
                statistics.median(_seconds(read, text) for _ in range(3)) for text in (short, long)
            )
            assert after < 9 * before, f"{kind}: {before:.4f} s, then {after:.4f} s"
