"""Show samples of a run as text, for a terminal: episodes turn by turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mrl.errors import DataError
from mrl.report.log_rows import ReadSummary, read_log_rows
from mrl.report.terminal import plain, terminal_text


def samples_text(path: Path, *, step: int | None = None, kind: str | None = None, limit: int = 10) -> str:
    """Return the first `limit` samples of a run folder or file, filtered; raise DataError if none match."""
    file = path / "samples.jsonl" if path.is_dir() else path
    reading, shown, count = ReadSummary(file.name), [], 0
    for row in read_log_rows(file, reading):
        if step in (None, row.get("step")) and kind in (None, row.get("kind")):
            count += 1
            if count <= limit:
                shown.append("\n".join(_lines(row)))
    if not shown:
        raise DataError(f"{file} has no such samples; {' '.join(reading.notes()) or f'{reading.lines} rows'}")
    remaining = [f"{count - limit} more; --limit shows them"] if count > limit else []
    return "\n\n".join([*shown, *remaining, *reading.notes()])


def _lines(row: dict[str, Any]) -> Iterator[str]:
    ended = f", ended by {row['ended_by']}" if "ended_by" in row else ""
    yield plain(
        f"step {row.get('step')}  {row.get('kind')}  sample {row.get('sample_id')}  reward "
        f"{row.get('reward')}  {row.get('status')}{ended}"
    )
    yield from terminal_text("prompt", row.get("opening") or row.get("prompt", ""))
    yield from _conversation(row)
    branches = row.get("branches")
    for number, branch in enumerate(branches if isinstance(branches, list) else (), 2):
        if isinstance(branch, dict):
            yield f"conversation {number}"
            yield from _conversation(branch)
    if row.get("reason"):
        yield from terminal_text("reason", row["reason"])


def _conversation(row: dict[str, Any]) -> Iterator[str]:
    if "turns" not in row:
        yield from terminal_text("response", row.get("response", ""))
    turns = row.get("turns")
    for number, turn in enumerate(turns if isinstance(turns, list) else (), 1):
        turn = turn if isinstance(turn, dict) else {}
        value = turn.get("reward")
        reward = f" (reward {value:g})" if isinstance(value, int | float) else ""
        yield from terminal_text(f"turn {number}{reward}", turn.get("said", ""))
        if turn.get("observed"):
            yield from terminal_text("observed", turn["observed"])
