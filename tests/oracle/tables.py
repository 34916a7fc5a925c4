"""The oracle's committed tables: a JSON file per family, one line per tensor."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "tables"


def families() -> list[str]:
    """Return the families that have a table and a class in the bridge."""
    return sorted(path.stem for path in FOLDER.glob("*.json") if "unknown" not in read(path.stem))


def read(family: str) -> dict[str, Any]:
    """Return layout -> ranks; {"unknown": true} if the bridge lacks the family; {} without a table."""
    path = FOLDER / f"{family}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write(family: str, table: dict[str, Any]) -> None:
    text = json.dumps(table, indent=1)
    text = re.sub(
        r"\[[^\[\]{}]*\]",
        lambda match: " ".join(match[0].split()).replace("[ ", "[").replace(" ]", "]"),
        text,
    )
    text = re.sub(r"\[\s+(\[[^\[\]]*\]),\s+(\"\w+\")\s+\]", r"[\1, \2]", text)
    (FOLDER / f"{family}.json").write_text(text + "\n")
