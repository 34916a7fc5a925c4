"""Visible part of a response: all but its thoughts.

A thought is between <think> and </think>, even if a model has other marks (`mrl.rewards.thoughts`). Templates
of thinking models end the prompt with an opened thought, so a response may close one that it did not open. A
thought that is never closed hides all that follows it.
"""

from __future__ import annotations

from mrl.rewards.thoughts import CLOSING, OPENING, as_thought, opens_thought


def answer_frames(text: str) -> list[str]:
    """Return the text between each <answer> and </answer> (R1's template). Linear."""
    return [part.rpartition("<answer>")[2] for part in text.split("</answer>")[:-1] if "<answer>" in part]


def with_opened_thought(response: str, prompt: str) -> str:
    """Return the response, with an opening mark if its prompt ends with an opened thought."""
    return as_thought(response) if opens_thought(prompt) else response


def visible_text(text: str) -> str:
    """Return the text after the last closed thought, up to an unclosed one. Linear and idempotent.

    "a" -> "a"    "<think>a</think>b" -> "b"    "a</think>b" -> "b"    "<think>a" -> ""    "a<think>b" -> "a"
    """
    return text.rpartition(CLOSING)[2].partition(OPENING)[0]
