"""Attacks that try to make a judge accept an incorrect response.

`attacks.jsonl` has one {"id", "text"} per line. A text may contain {wrong} (an incorrect response),
{question}, {choice} (the judge's best word) and {guess} (a nonce that is not the run's), filled in one pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from mrl.errors import DataError

BUILTIN_ATTACKS = Path(__file__).with_name("attacks.jsonl")
_PLACE = re.compile(r"\{(wrong|question|choice|guess)\}")
GUESS = "0123456789abcdef"


def read_attacks(*files: Path) -> dict[str, str]:
    """Return id -> text of our attacks, then of `files`. Raises DataError naming a malformed line."""
    attacks: dict[str, str] = {}
    for file in (BUILTIN_ATTACKS, *files):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                attacks[str(row["id"])] = str(row["text"])
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{file}:{number}: write an attack as {{'id': ..., 'text': ...}}") from error
    return attacks


def fill_attack(text: str, values: Mapping[str, str]) -> str:
    """Return the attack's text with its placeholders filled."""
    return _PLACE.sub(lambda match: values.get(match[1], ""), text)
