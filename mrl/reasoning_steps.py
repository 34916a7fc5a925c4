"""The steps of a response: its text between separators, and the tokens at which they end.

What a process reward model is trained on and what a judge asks it about are cut here alike. The separator stands after the last step too
(as in TRL), so that every step is read at the same token.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any


def joined_steps(steps: Sequence[str], separator: str) -> list[str]:
    r"""The steps as they are read: each with the separator after it.

    >>> joined_steps(["a", "b\n", "c"], "\n")
    ['a\n', 'b\n', 'c\n']
    """
    return [step if step.endswith(separator) else step + separator for step in steps]


def split_steps(text: str, separator: str) -> list[str]:
    r"""The steps of a text, each with the separator that ends it; the last one has it too, where the text may have none. What is
    blank belongs to the step before, at the beginning to the one after; a blank text is one step.

    >>> split_steps("a\n\nb\nc", "\n")
    ['a\n\n', 'b\n', 'c\n']
    """
    steps: list[list[str]] = []
    last_is_blank = False
    for part in (text + separator * (not text.endswith(separator))).split(separator)[:-1]:
        is_blank = not part.strip()
        if steps and (is_blank or last_is_blank):
            steps[-1].append(part + separator)
            last_is_blank = last_is_blank and is_blank
        else:
            steps.append([part + separator])
            last_is_blank = is_blank
    return ["".join(step) for step in steps]


def step_ends(tokenizer: Any, steps: Sequence[str]) -> tuple[list[int], list[int]]:
    """(ids, ends): the tokens of the steps' text as it follows other text, and of each step how many of them hold it and what is before
    it. A token across two steps counts to the first. The tokenizer is one that tells offsets (`is_fast`)."""
    found = tokenizer("".join(steps), add_special_tokens=False, return_offsets_mapping=True)
    starts = [start for start, _ in found["offset_mapping"]]
    lengths = itertools.accumulate(map(len, steps))
    return list(found["input_ids"]), [bisect.bisect_left(starts, length) for length in lengths]
