"""Ways to move a judge without being right, one a line of `attacks.jsonl`: {"id", "text"}.

In a text stand {wrong} (a response that is wrong), {question}, {choice} (the judge's
best word) and {guess} (a nonce that is not the run's), filled in one pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from mrl.errors import DataError

OURS = Path(__file__).with_name("attacks.jsonl")
_PLACE = re.compile(r"\{(wrong|question|choice|guess)\}")
GUESS = "0123456789abcdef"


def read_attacks(*files: Path) -> dict[str, str]:
    """Id -> text, of ours and then of the given files. DataError naming a line that is none."""
    found: dict[str, str] = {}
    for file in (OURS, *files):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                found[str(row["id"])] = str(row["text"])
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{file}:{number}: an attack is {{'id': ..., 'text': ...}}") from error
    return found


def attacked(text: str, values: Mapping[str, str]) -> str:
    """The attack's text with its places filled."""
    return _PLACE.sub(lambda match: values.get(match[1], ""), text)
