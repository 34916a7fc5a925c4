"""Products that a small model cannot compute, for an environment with a calculator (mrl/agents/envs/calculator.py).

Row of train and validation:    {"prompt": [{"role": "user", "content": "37*58"}], "expression": "37*58"}
Row of the supervised start:    {"prompt": rendered by tokenizer.CHAT_TEMPLATE, "response": the next turn}

Demonstrations show the form of a call and of an answer, and mostly answer without a call: so the start calls sometimes, and
which of the two is worth more is left to find out. Every product lies in exactly one of the files.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

from mrl.agents.envs.calculator import calculator_rows
from mrl.prepare.arithmetic_rows import write_rows
from mrl.prepare.tokenizer import END

_CALLS = 0.3
"""Share of the demonstrated episodes that make a call."""


def write_calculator(
    folder: str | Path,
    *,
    num_train: int = 4000,
    num_validation: int = 256,
    num_sft: int = 2000,
    seed: int = 0,
) -> Path:
    """Writes train.jsonl, validation.jsonl and sft.jsonl, a pure function of the seed; returns the folder."""
    made = calculator_rows(num_train + num_validation + num_sft, seed=seed, digits=2, operators="*")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "train.jsonl", list(itertools.islice(made, num_train)))
    write_rows(folder / "validation.jsonl", list(itertools.islice(made, num_validation)))
    rng = random.Random(seed)
    write_rows(
        folder / "sft.jsonl", [turn for row in made for turn in _demonstration(row["expression"], rng)]
    )
    return folder


def _demonstration(expression: str, rng: random.Random) -> Iterator[dict[str, str]]:
    left, right = map(int, expression.split("*"))
    asked, answer = f"<user>{expression}{END}<assistant>", str(left * right)
    if rng.random() >= _CALLS:
        yield {"prompt": asked, "response": answer}
        return
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}}, separators=(",", ":"))
    yield {"prompt": asked, "response": call}
    yield {"prompt": f"{asked}{call}{END}<tool>{answer}{END}<assistant>", "response": answer}
