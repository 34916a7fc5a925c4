"""The metric names that runs have written."""

import json
from pathlib import Path


def written_names(folder: Path) -> set[str]:
    """Return the names in all metrics.jsonl and expert_load.jsonl below a folder; skip a torn last line."""
    files = [file for name in ("metrics.jsonl", "expert_load.jsonl") for file in folder.rglob(name)]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines(keepends=True)]
    return {name for line in lines if line.endswith("\n") for name in json.loads(line)}
