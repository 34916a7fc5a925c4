"""Make worse responses of a correct one, each by a named change. Pure: the caller checks with the rewards if
they are worse.

| name | change |
|---|---|
| off by one | the last number plus or minus one |
| another digit | one digit of a number replaced |
| another row | the correct response to another row |
| cut off | the first half |
| all answers | the correct response among those of other rows |
| with a doubt | the correct response, followed by another row's |
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

_NUMBER = re.compile(r"\d+")
_OTHERS = 4
"""Responses of other rows in `all answers`, besides the correct one."""


def corrupted(right: str, others: Sequence[str], rng: random.Random) -> dict[str, str]:
    """Return name -> response for each change that is possible and has an effect. `others`: correct responses
    to other rows.

    >>> corrupted("7", [], random.Random(0))
    {'off by one': '6', 'another digit': '3'}
    """
    responses = _numbers(right, rng)
    if len(right) > 1:
        responses["cut off"] = right[: len(right) // 2]
    if others := [text for text in others if text != right]:
        other = rng.choice(others)
        several = [*rng.sample(others, min(_OTHERS, len(others))), right]
        rng.shuffle(several)
        responses |= {
            "another row": other,
            "all answers": "\n".join(several),
            "with a doubt": f"{right}\n{other}",
        }
    return {name: text for name, text in responses.items() if text != right}


def _numbers(right: str, rng: random.Random) -> dict[str, str]:
    numbers = list(_NUMBER.finditer(right))
    if not numbers:
        return {}
    last, chosen = numbers[-1], rng.choice(numbers)
    step = rng.choice((-1, 1)) if int(last[0]) else 1
    place = rng.randrange(len(chosen[0]))
    least = "1" if place == 0 and len(chosen[0]) > 1 else "0"
    digit = rng.choice([d for d in "0123456789" if d >= least and d != chosen[0][place]])
    return {
        "off by one": _with(right, last, str(int(last[0]) + step)),
        "another digit": _with(right, chosen, chosen[0][:place] + digit + chosen[0][place + 1 :]),
    }


def _with(text: str, match: re.Match[str], number: str) -> str:
    return text[: match.start()] + number + text[match.end() :]
