"""Three small tasks for a run over several domains: sums, tiny functions, and instructions about words.

    sums    {"prompt": "37+58=", "answer": "95"}
    code    {"prompt": "f=a*3+b:", "answer": {"entry_point": "f", "cases": [...]}}      wants  def f(a,b):return a*3+b
    style   {"prompt": "3 words no e:", "answer": [{"check": "num_words", ...}, ...]}   wants  sun sky moon

Every prompt lies in exactly one of a domain's training file, its validation file and sft.jsonl; all are a
pure function of the seed.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

from mrl.prepare.arithmetic_rows import Sum, write_rows

WORDS = "sun sky moon tree bird fish hill rain wind snow leaf lake star rock sand fog owl fox cat dog ant bee".split()  # noqa: SIM905
_OPERATORS = {"+": "plus", "-": "minus", "*": "times"}
_SFT_ROWS = {"sums": 450, "code": 120, "style": 80}
"""Demonstrations of each domain: enough that the start is right sometimes, too few that it is right always."""
_INPUTS = ((2, 5), (7, 3), (0, 1), (4, 9))


@dataclasses.dataclass(frozen=True, slots=True)
class _Task:
    """A prompt, what its verifier wants, and one response that is right."""

    prompt: str
    answer: Any
    response: str
    tag: str


def write_domains(folder: str | Path, *, num_validation: int = 40, seed: int = 0) -> Path:
    """Write {sums,code,style}.jsonl, the same with _validation, and sft.jsonl; return the folder."""
    rng = random.Random(seed)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sft: list[dict[str, Any]] = []
    for name, tasks in (("sums", _sums()), ("code", _functions()), ("style", _instructions(rng))):
        rng.shuffle(tasks)
        num_sft = _SFT_ROWS[name]
        validation, rest = tasks[:num_validation], tasks[num_validation:]
        write_rows(folder / f"{name}_validation.jsonl", [_question(task) for task in validation])
        write_rows(folder / f"{name}.jsonl", [_question(task) for task in rest[num_sft:]])
        sft += [{"prompt": task.prompt, "response": task.response} for task in rest[:num_sft]]
    rng.shuffle(sft)
    write_rows(folder / "sft.jsonl", sft)
    return folder


def _sums() -> list[_Task]:
    sums = [Sum(a, b) for a in range(32) for b in range(32)]
    return [_Task(s.prompt, s.answer, s.answer, s.tag) for s in sums]


def _functions() -> list[_Task]:
    """f = a OP n OP b for all operators and small n, and with the names exchanged."""
    tasks = []
    for first, second in ("ab", "ba"):
        for left in _OPERATORS:
            for right in _OPERATORS:
                for number in range(1, 40):
                    body = f"{first}{left}{number}{right}{second}"
                    cases = [{"args": list(args), "expected": _value(body, args)} for args in _INPUTS]
                    answer = {"entry_point": "f", "cases": cases}
                    tasks.append(
                        _Task(
                            f"f={body}:",
                            answer,
                            f"def f(a,b):return {body}",
                            f"{_OPERATORS[left]}_{_OPERATORS[right]}",
                        )
                    )
    return tasks


def _value(body: str, args: tuple[int, int]) -> int:
    return eval(body, {"__builtins__": {}}, {"a": args[0], "b": args[1]})  # our own text, from above


def _instructions(rng: random.Random) -> list[_Task]:
    """So many words, perhaps without a letter, perhaps in capitals."""
    tasks = []
    for count in range(1, 6):
        for letter in ["", *"abcdefghiklmnorstuwxy"]:
            for capitals in (False, True):
                allowed = [word for word in WORDS if not letter or letter not in word]
                words = " ".join(rng.sample(allowed, count))
                checks: list[dict[str, Any]] = [{"check": "num_words", "relation": "exactly", "count": count}]
                checks.append({"check": "all_upper_case" if capitals else "all_lower_case"})
                if letter:
                    checks.append(
                        {"check": "letter_frequency", "letter": letter, "relation": "at_most", "count": 0}
                    )
                prompt = f"{count} {'WORDS' if capitals else 'words'}{' no ' + letter if letter else ''}:"
                tag = "letter" if letter else "count"
                tasks.append(_Task(prompt, checks, words.upper() if capitals else words, tag))
    return tasks


def _question(task: _Task) -> dict[str, Any]:
    return {"prompt": task.prompt, "answer": task.answer, "tag": task.tag}
