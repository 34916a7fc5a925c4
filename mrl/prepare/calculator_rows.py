"""Write products that a small model cannot compute, for an environment with a calculator
(mrl/agents/envs/calculator.py).

Rows of train and validation:   {"prompt": [{"role": "user", "content": "37*58"}], "expression": "37*58"}
Rows of sft:                    {"prompt": rendered by tokenizer.CHAT_TEMPLATE, "response": the next turn}

Demonstrations show the form of a call and of an answer, and mostly answer without a call. So the starting
model calls sometimes, and RL has to learn which is better. Every product is in exactly one of the files.
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
"""Share of the demonstrated episodes with a call."""


def write_calculator(
    folder: str | Path,
    *,
    num_train: int = 4000,
    num_validation: int = 256,
    num_sft: int = 2000,
    seed: int = 0,
) -> Path:
    """Write train.jsonl, validation.jsonl and sft.jsonl, a pure function of the seed; return the folder."""
    rows = calculator_rows(num_train + num_validation + num_sft, seed=seed, digits=2, operators="*")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "train.jsonl", list(itertools.islice(rows, num_train)))
    write_rows(folder / "validation.jsonl", list(itertools.islice(rows, num_validation)))
    rng = random.Random(seed)
    write_rows(
        folder / "sft.jsonl", [turn for row in rows for turn in _demonstration(row["expression"], rng)]
    )
    return folder


def _demonstration(expression: str, rng: random.Random) -> Iterator[dict[str, str]]:
    left, right = map(int, expression.split("*"))
    prompt, answer = f"<user>{expression}{END}<assistant>", str(left * right)
    if rng.random() >= _CALLS:
        yield {"prompt": prompt, "response": answer}
        return
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}}, separators=(",", ":"))
    yield {"prompt": prompt, "response": call}
    yield {"prompt": f"{prompt}{call}{END}<tool>{answer}{END}<assistant>", "response": answer}
