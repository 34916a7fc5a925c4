"""The steps of a response: its text between separators, and the tokens at which they end.

What a process reward model is trained on and what a judge asks it about are cut here alike.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any


def joined_steps(steps: Sequence[str], separator: str) -> list[str]:
    r"""The steps as they stand in a response: each but the last with the separator after it.

    >>> joined_steps(["a", "b\n", "c"], "\n")
    ['a\n', 'b\n', 'c']
    """
    followed = (step if step.endswith(separator) else step + separator for step in steps[:-1])
    return [*followed, *steps[-1:]]


def split_steps(text: str, separator: str) -> list[str]:
    r"""The steps of a text, each with the separator that ends it. What is blank belongs to the step before, at the beginning to
    the one after; a blank text is one step.

    >>> split_steps("a\n\nb\nc", "\n")
    ['a\n\n', 'b\n', 'c']
    """
    *ended, rest = text.split(separator)
    steps: list[str] = []
    for part in (*(each + separator for each in ended), rest):
        if steps and (_is_blank(part, separator) or _is_blank(steps[-1], separator)):
            steps[-1] += part
        else:
            steps.append(part)
    return steps


def step_ends(tokenizer: Any, steps: Sequence[str]) -> tuple[list[int], list[int]]:
    """(ids, ends): the tokens of the steps' text as it follows other text, and of each step how many of them hold it and what is before
    it. A token across two steps counts to the first. The tokenizer is one that tells offsets (`is_fast`)."""
    found = tokenizer("".join(steps), add_special_tokens=False, return_offsets_mapping=True)
    starts, ends, length = [start for start, _ in found["offset_mapping"]], [], 0
    for step in steps:
        length += len(step)
        ends.append(bisect.bisect_left(starts, length))
    return list(found["input_ids"]), ends


def _is_blank(text: str, separator: str) -> bool:
    return not text.replace(separator, "").strip()
