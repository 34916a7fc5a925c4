"""The oracle's tables as they are committed: a file of JSON for each family, one line for each tensor."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "tables"


def families() -> list[str]:
    """Those that have a table and that the bridge has a class for."""
    return sorted(path.stem for path in FOLDER.glob("*.json") if "unknown" not in read(path.stem))


def read(family: str) -> dict[str, Any]:
    """Layout -> ranks; {"unknown": true} of a family that the bridge has no class for; {} without a table."""
    path = FOLDER / f"{family}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write(family: str, table: dict[str, Any]) -> None:
    """Writes a family's table anew."""
    text = json.dumps(table, indent=1)
    text = re.sub(
        r"\[[^\[\]{}]*\]",
        lambda found: " ".join(found[0].split()).replace("[ ", "[").replace(" ]", "]"),
        text,
    )
    text = re.sub(r"\[\s+(\[[^\[\]]*\]),\s+(\"\w+\")\s+\]", r"[\1, \2]", text)
    (FOLDER / f"{family}.json").write_text(text + "\n")
