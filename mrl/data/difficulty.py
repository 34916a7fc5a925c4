"""Choose training rows by solve rates, which `mrl eval --train` writes to rates.jsonl, one line per prompt.

If a prompt has two lines the later one counts, so files may be appended to each other.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mrl.config.sections.data import DifficultySection
from mrl.data.identity import prompt_id
from mrl.data.prompt_stream import Source
from mrl.errors import DataError
from mrl.samples import Prompt

FIELDS = ("id", "samples", "solved")
"""Fields of a line that are read; `row` is for people."""

Band = Literal["below", "inside", "above", "unknown"]
"""Where a solve rate lies relative to the band."""


class SolveRate(NamedTuple):
    """Counts of the responses to one prompt."""

    samples: int
    """Responses with a reward."""
    solved: int
    """Correct ones among them."""

    def band(self, section: DifficultySection) -> Band:
        """Return where the rate lies; it is unknown if no response has a reward."""
        if not self.samples:
            return "unknown"
        rate = self.solved / self.samples
        return "below" if rate < section.min else "above" if rate > section.max else "inside"


def rate_line(prompt: Prompt, scores: Sequence[float]) -> str:
    """Return a prompt's line; a sample solves it if its score is at least 1, as in pass@k."""
    solved = sum(score >= 1.0 for score in scores)
    values = {"id": prompt_id(prompt), "samples": len(scores), "solved": solved, "row": prompt.row}
    return json.dumps(values) + "\n"


def read_rates(path: str | Path) -> dict[str, SolveRate]:
    """Return `prompt_id` -> solve rate; an incomplete last line, which a kill leaves, is ignored.

    Raise DataError if the file cannot be read or a line does not describe a prompt."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DataError(
            f"data.difficulty.file {path} cannot be read ({error}); write it with "
            "`mrl eval --train --out FOLDER`"
        ) from error
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    return dict(_rate(path, number, line) for number, line in enumerate(lines, 1))


def filter_by_difficulty(
    sources: Sequence[Source], section: DifficultySection
) -> tuple[list[Source], Counter[Band], list[str]]:
    """Return the sources without rows outside the band, the number of rows per place, and notes on the file.

    Each dropped row is counted in its source's `left_out`. Raises DataError if the file has none of the rows.
    """
    known = read_rates(section.file)
    places, num_unmeasured, chosen = Counter[Band](), 0, []
    for source in sources:
        rows = []
        for prompt in source.rows:
            rate = known.get(prompt_id(prompt))
            num_unmeasured += rate is None
            place = "unknown" if rate is None else rate.band(section)
            places[place] += 1
            if rate is None or place in ("inside", "unknown"):
                rows.append(prompt)
                continue
            why = f"{rate.solved} of {rate.samples} samples solve it"
            source.left_out.add("difficulty", place=prompt.row, domain=prompt.domain, why=why)
        chosen.append(source.with_rows(rows))
    total = places.total()
    if total and num_unmeasured == total:
        raise DataError(
            f"data.difficulty.file {section.file} has none of the {total} training prompts that these rows "
            "and chat template (with arguments) make; measure them with `mrl eval --train`"
        )
    notes = [f"{section.file}: {num_unmeasured} of {total} training prompts are not in it and are kept"]
    return chosen, places, notes if num_unmeasured else []


def _rate(path: str | Path, number: int, line: bytes) -> tuple[str, SolveRate]:
    """Return a prompt's id and its solve rate from a line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}:{number}: not valid JSON ({error})") from error
    values: list[Any] = [row.get(field) for field in FIELDS] if isinstance(row, dict) else [None]
    name, *counts = values
    if not isinstance(name, str) or any(type(count) is not int for count in counts):
        shown = line[:80].decode(errors="replace")
        raise DataError(f"{path}:{number}: a prompt's line must have {', '.join(FIELDS)}, not {shown}")
    samples, solved = map(int, counts)
    if not 0 <= solved <= samples:
        raise DataError(f"{path}:{number}: {solved} solved of {samples} samples is impossible")
    return name, SolveRate(samples, solved)
