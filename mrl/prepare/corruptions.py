"""Worse responses made of a right one, each in a way that has a name. Pure: whoever uses them asks the rewards whether they are worse.

| name | what |
|---|---|
| off by one | the last number one more or one less |
| another digit | one digit of a number replaced |
| another row | the right response to another row |
| cut off | the first half |
| all answers | the right one among those of other rows |
| with a doubt | the right one, and another row's after it |
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

_NUMBER = re.compile(r"\d+")
_OTHERS = 4
"""Responses of other rows beside the right one, in `all answers`."""


def corrupted(right: str, others: Sequence[str], rng: random.Random) -> dict[str, str]:
    """Name -> response, those that can be made of this one and differ from it. `others`: right responses to other rows.

    >>> corrupted("7", [], random.Random(0))
    {'off by one': '6', 'another digit': '3'}
    """
    found = _numbers(right, rng)
    if len(right) > 1:
        found["cut off"] = right[: len(right) // 2]
    if others := [text for text in others if text != right]:
        other = rng.choice(others)
        several = [*rng.sample(others, min(_OTHERS, len(others))), right]
        rng.shuffle(several)
        found |= {
            "another row": other,
            "all answers": "\n".join(several),
            "with a doubt": f"{right}\n{other}",
        }
    return {name: text for name, text in found.items() if text != right}


def _numbers(right: str, rng: random.Random) -> dict[str, str]:
    numbers = list(_NUMBER.finditer(right))
    if not numbers:
        return {}
    last, any_ = numbers[-1], rng.choice(numbers)
    step = rng.choice((-1, 1)) if int(last[0]) else 1
    place = rng.randrange(len(any_[0]))
    least = "1" if place == 0 and len(any_[0]) > 1 else "0"
    digit = rng.choice([d for d in "0123456789" if d >= least and d != any_[0][place]])
    return {
        "off by one": _with(right, last, str(int(last[0]) + step)),
        "another digit": _with(right, any_, any_[0][:place] + digit + any_[0][place + 1 :]),
    }


def _with(text: str, match: re.Match[str], number: str) -> str:
    return text[: match.start()] + number + text[match.end() :]
