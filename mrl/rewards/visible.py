"""What a reader sees of a response: not its thoughts.

A thought stands between <think> and </think>, also where a model has other marks (`mrl.rewards.thoughts`). Templates of thinking
models end the prompt with an opened thought, so that a response may close one that it did not open; one that is never closed hides
all that follows it.
"""

from __future__ import annotations

from mrl.rewards.thoughts import CLOSING, OPENING, as_thought, opens_thought


def answer_frames(text: str) -> list[str]:
    """What stands between each <answer> and its </answer>, as R1's template has it. Linear."""
    return [part.rpartition("<answer>")[2] for part in text.split("</answer>")[:-1] if "<answer>" in part]


def with_opened_thought(response: str, prompt: str) -> str:
    """The response, behind the thought that its prompt ends with, where it does."""
    return as_thought(response) if opens_thought(prompt) else response


def visible_text(text: str) -> str:
    """What follows the last closed thought, up to one that is opened and not closed. Linear; the visible part
    of visible text is all of it.

    "a" -> "a"    "<think>a</think>b" -> "b"    "a</think>b" -> "b"    "<think>a" -> ""    "a<think>b" -> "a"
    """
    return text.rpartition(CLOSING)[2].partition(OPENING)[0]
