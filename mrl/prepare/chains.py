"""Sums of several digits, worked out one number at a time, with every step labelled: what a process reward model is trained on.

Row of steps and steps_validation:  {"prompt": "3+9+4=", "completions": ["3+9=12", "12+4=16"], "labels": [true, true], "tag": "right"}
Row of the supervised start:        {"prompt": "3+9+4=", "response": "3+9=12\\n12+4=16"}
Row of train and validation:        {"prompt": "3+9+4=", "answer": "16"}

Half of the labelled responses go wrong at a drawn step, in the way that the tag names: another result (`sum`), another number than the
step before came to (`copied`), or another one than the prompt has (`operand`). What follows is right by itself and goes on from there; its
labels are false, because the response no longer comes to the answer. All is a pure function of the seed, and no prompt of validation is in another file.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mrl.prepare.arithmetic_rows import write_rows

WAYS = ("sum", "copied", "operand")
LENGTHS = (3, 5)
"""Numbers of a prompt, least and most."""
MOST = 80_000
"""Prompts that are drawn; there are 111,000."""


def write_chains(
    folder: str | Path,
    *,
    num_steps: int = 20000,
    num_sft: int = 3000,
    num_train: int = 8000,
    num_validation: int = 512,
    seed: int = 0,
) -> Path:
    """Writes steps.jsonl, steps_validation.jsonl, sft.jsonl, train.jsonl and validation.jsonl; returns the folder."""
    folder, draw = Path(folder), random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = max(num_steps, num_sft + num_train)
    if wanted + num_validation > MOST:
        raise ValueError(f"{wanted} + {num_validation} rows are more than {MOST} chains to draw")
    chains = _different(draw)
    held_out = list(itertools.islice(chains, num_validation))
    known = list(itertools.islice(chains, wanted))
    write_rows(folder / "steps_validation.jsonl", [_labelled(chain, draw) for chain in held_out])
    write_rows(folder / "steps.jsonl", [_labelled(chain, draw) for chain in known[:num_steps]])
    sft, train = known[:num_sft], known[num_sft : num_sft + num_train]
    write_rows(
        folder / "sft.jsonl",
        ({"prompt": chain_prompt(chain), "response": "\n".join(worked(chain))} for chain in sft),
    )
    for name, rows in (("train", train), ("validation", held_out)):
        write_rows(
            folder / f"{name}.jsonl", ({"prompt": chain_prompt(row), "answer": str(sum(row))} for row in rows)
        )
    return folder


def chain_prompt(chain: Sequence[int]) -> str:
    """The question.

    >>> prompt((3, 9, 4))
    '3+9+4='
    """
    return "+".join(map(str, chain)) + "="


def worked(chain: Sequence[int]) -> list[str]:
    """The right steps.

    >>> worked((3, 9, 4))
    ['3+9=12', '12+4=16']
    """
    totals = itertools.accumulate(chain)
    return [f"{total}+{number}={total + number}" for total, number in zip(totals, chain[1:], strict=False)]


def _different(draw: random.Random) -> Iterator[tuple[int, ...]]:
    """Chains of digits, none of them twice."""
    seen = set[tuple[int, ...]]()
    while True:
        chain = tuple(draw.randrange(10) for _ in range(draw.randint(*LENGTHS)))
        if chain not in seen:
            seen.add(chain)
            yield chain


def _labelled(chain: Sequence[int], draw: random.Random) -> dict[str, Any]:
    steps, labels, wrong, tag = [], [], len(chain), "right"
    if draw.random() < 0.5:
        wrong, tag = draw.randrange(1, len(chain)), draw.choice(WAYS)
        if wrong == 1 and tag == "copied":
            tag = "operand"  # there is no step before
    total = chain[0]
    for place, number in enumerate(chain[1:], 1):
        if place == wrong:
            total, number, result = _gone_wrong(total, number, tag, draw)
        else:
            result = total + number
        steps.append(f"{total}+{number}={result}")
        labels.append(place < wrong)
        total = result
    return {"prompt": chain_prompt(chain), "completions": steps, "labels": labels, "tag": tag}


def _gone_wrong(total: int, number: int, way: str, draw: random.Random) -> tuple[int, int, int]:
    """What is added to what in a wrong step, and what it says that this gives."""
    if way == "sum":
        return total, number, _other(total + number, draw, most=total + number + 10)
    if way == "copied":
        total = _other(total, draw, most=total + 10)
    else:
        number = _other(number, draw, most=9)
    return total, number, total + number


def _other(number: int, draw: random.Random, *, most: int) -> int:
    """A number that is near and not this one."""
    return draw.choice([each for each in range(max(0, number - 10), most + 1) if each != number])
