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
    branches = row.get("branches")
    conversations = [*(branches if isinstance(branches, list) else ()), row]
    if len(conversations) == 1:
        yield from terminal_text("prompt", row.get("opening") or row.get("prompt", ""))
        yield from _conversation(row)
    for number, one in enumerate(conversations if len(conversations) > 1 else (), 1):
        if isinstance(one, dict):
            yield from _branch(one, f"conversation {number} of {len(conversations)}")
    if row.get("reason"):
        yield from terminal_text("reason", row["reason"])


def _branch(row: dict[str, Any], name: str) -> Iterator[str]:
    """Show one of several conversations: of one that leaves another, only its own turns."""
    origin = row.get("continues")
    if not isinstance(origin, dict):
        yield name
        yield from terminal_text("prompt", row.get("opening") or row.get("prompt", ""))
        yield from _conversation(row)
        return
    yield plain(f"{name}, after turn {origin.get('turns')} of conversation {origin.get('conversation')}")
    yield from _conversation(row, origin.get("turns"))


def _conversation(row: dict[str, Any], skipped: object = 0) -> Iterator[str]:
    """Show turns after the first `skipped` ones."""
    if "turns" not in row:
        yield from terminal_text("response", row.get("response", ""))
    turns = row.get("turns")
    for number, turn in enumerate(turns if isinstance(turns, list) else (), 1):
        if isinstance(skipped, int) and number <= skipped:
            continue
        turn = turn if isinstance(turn, dict) else {}
        value = turn.get("reward")
        reward = f" (reward {value:g})" if isinstance(value, int | float) else ""
        yield from terminal_text(f"turn {number}{reward}", turn.get("said", ""))
        if turn.get("observed"):
            yield from terminal_text("observed", turn["observed"])
