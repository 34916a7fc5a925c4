"""Samples of a run as text, for a terminal: episodes turn by turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mrl.errors import DataError
from mrl.report.rows import Reading, rows
from mrl.report.terminal import plain, told


def samples_text(path: Path, *, step: int | None = None, kind: str | None = None, limit: int = 10) -> str:
    """The first `limit` samples of a run folder, or of a file of samples, of one step and kind where these are given. DataError
    where there are none."""
    file = path / "samples.jsonl" if path.is_dir() else path
    reading, shown, found = Reading(file.name), [], 0
    for row in rows(file, reading):
        if step in (None, row.get("step")) and kind in (None, row.get("kind")):
            found += 1
            if found <= limit:
                shown.append("\n".join(_lines(row)))
    if not shown:
        raise DataError(f"{file} has no such samples; {' '.join(reading.notes()) or f'{reading.lines} rows'}")
    more = [f"{found - limit} more; --limit shows them"] if found > limit else []
    return "\n\n".join([*shown, *more, *reading.notes()])


def _lines(row: dict[str, Any]) -> Iterator[str]:
    ended = f", ended by {row['ended_by']}" if "ended_by" in row else ""
    yield plain(
        f"step {row.get('step')}  {row.get('kind')}  sample {row.get('sample_id')}  reward {row.get('reward')}  "
        f"{row.get('status')}{ended}"
    )
    yield from told("prompt", row.get("opening") or row.get("prompt", ""))
    if "turns" not in row:
        yield from told("response", row.get("response", ""))
    turns = row.get("turns")
    for number, turn in enumerate(turns if isinstance(turns, list) else (), 1):
        turn = turn if isinstance(turn, dict) else {}
        value = turn.get("reward")
        reward = f" (reward {value:g})" if isinstance(value, int | float) else ""
        yield from told(f"turn {number}{reward}", turn.get("said", ""))
        if turn.get("observed"):
            yield from told("observed", turn["observed"])
    if row.get("reason"):
        yield from told("reason", row["reason"])
