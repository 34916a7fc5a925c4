"""Read and write the file of `mrl difficulty`, the solve rate of each training prompt, and choose rows by it.

The first line describes the measurement, each further line one prompt. If a prompt has two lines the later
one counts, so a measurement is written by appending and resumes where it stopped.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from mrl.config.sections.data import DifficultySection
from mrl.data.identity import prompt_id
from mrl.data.prompt_stream import Source
from mrl.errors import DataError
from mrl.files import replace_durably
from mrl.samples import Prompt

FIELDS = ("id", "samples", "solved")
"""Fields of a line that are read again; the others are for people."""

Band = Literal["below", "inside", "above", "unknown"]
"""Where a solve rate lies relative to the band."""


@dataclasses.dataclass(frozen=True, slots=True)
class SolveRate:
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


@dataclasses.dataclass(slots=True)
class RateFile:
    """Contents of the file."""

    about: Mapping[str, Any]
    """The model's digest and the sampling settings; the file has no figures of other models or settings."""
    prompts: dict[str, SolveRate]
    """`prompt_id` -> solve rate."""

    @classmethod
    def read(cls, path: str | Path, *, damaged: list[bytes] | None = None) -> Self:
        """Read a file; an incomplete last line, which a kill leaves, is ignored.

        Raises DataError if it is not such a file. Lines that do not describe a prompt go to `damaged`; if
        that is None the first one raises DataError.
        """
        try:
            if not Path(path).is_file():
                raise FileNotFoundError("no such file")
            data = Path(path).read_bytes()
        except OSError as error:
            raise DataError(
                f"data.difficulty.file {path} cannot be read ({error}); write it with `mrl difficulty`"
            ) from error
        first, *lines = data[: data.rfind(b"\n") + 1].split(b"\n")[:-1] or [b""]
        about = _line(path, 1, first).get("about")
        if not isinstance(about, dict):
            raise DataError(f"{path}:1: not a file of `mrl difficulty`, whose first line has `about`")
        prompts = {}
        for number, line in enumerate(lines, 2):
            try:
                name, rate = _rate(path, number, line)
            except DataError as error:
                if damaged is None:
                    raise DataError(f"{error}; run `mrl difficulty` to set the line aside") from error
                damaged.append(line)
                continue
            prompts[name] = rate
        return cls(about, prompts)

    def line(self, prompt: Prompt, section: DifficultySection) -> str:
        """Return a prompt's line."""
        rate = self.prompts[prompt_id(prompt)]
        row = {"id": prompt_id(prompt), **dataclasses.asdict(rate)}
        return json.dumps(row | {"place": rate.band(section), "row": prompt.row}) + "\n"

    def write(self, path: str | Path, prompts: Iterable[Prompt], section: DifficultySection) -> None:
        """Replace the file's lines by one per prompt."""
        lines = [json.dumps({"about": self.about}) + "\n", *(self.line(p, section) for p in prompts)]
        replace_durably(Path(path), "".join(lines).encode())


def filter_by_difficulty(
    sources: Sequence[Source], section: DifficultySection
) -> tuple[list[Source], Counter[Band], list[str]]:
    """Return the sources without rows outside the band, the number of rows per place, and notes on the file.

    Each dropped row is counted in its source's `left_out`. Raises DataError if the file has none of the rows.
    """
    known = RateFile.read(section.file).prompts
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
            "and chat template (with arguments) make; measure them with `mrl difficulty`"
        )
    notes = [f"{section.file}: {num_unmeasured} of {total} training prompts are not in it and are kept"]
    return chosen, places, notes if num_unmeasured else []


def _rate(path: str | Path, number: int, line: bytes) -> tuple[str, SolveRate]:
    """Return a prompt's id and its solve rate from a line."""
    row = _line(path, number, line)
    values: list[Any] = [row.get(field) for field in FIELDS]
    name, *counts = values
    if not isinstance(name, str) or any(type(count) is not int for count in counts):
        raise DataError(f"{path}:{number}: a prompt's line must have {', '.join(FIELDS)}, not {_shown(line)}")
    samples, solved = map(int, counts)
    if not 0 <= solved <= samples:
        raise DataError(f"{path}:{number}: {solved} solved of {samples} samples is impossible")
    return name, SolveRate(samples, solved)


def _line(path: str | Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}:{number}: not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}:{number}: {_shown(line)} is not an object")
    return row


def _shown(line: bytes) -> str:
    return line[:80].decode(errors="replace")
