"""The file of `mrl difficulty`: how often a model solves each training prompt; and the choice of rows by it.

The first line says what was measured and how, each further one what is known of a prompt; of two lines of one prompt the
later one counts, so that a measurement is written by appending and goes on where it was ended.
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
"""Of a line, what is read again; the others are for people."""

Place = Literal["below", "inside", "above", "unknown"]
"""Where a rate lies, seen from a band."""


@dataclasses.dataclass(frozen=True, slots=True)
class SolveRate:
    """What the responses to one prompt say."""

    samples: int
    """Responses that have a reward."""
    solved: int
    """Of these, the correct ones."""

    def place(self, section: DifficultySection) -> Place:
        """Return where the rate lies; it is unknown if no response has a reward."""
        if not self.samples:
            return "unknown"
        rate = self.solved / self.samples
        return "below" if rate < section.min else "above" if rate > section.max else "inside"


@dataclasses.dataclass(slots=True)
class RateFile:
    """The file's contents."""

    about: Mapping[str, Any]
    """The model's digest and how samples were drawn; figures of other models or sampling are no part of it."""
    prompts: dict[str, SolveRate]
    """By `prompt_id`."""

    @classmethod
    def read(cls, path: str | Path, *, damaged: list[bytes] | None = None) -> Self:
        """DataError where it is not such a file; a last line without its end, which a kill leaves, is no line.

        With `damaged` lines that are none of a prompt go there; without, the first one is a DataError.
        """
        try:
            if not Path(path).is_file():
                raise FileNotFoundError("no such file")
            data = Path(path).read_bytes()
        except OSError as error:
            raise DataError(
                f"data.difficulty.file {path} cannot be read ({error}); `mrl difficulty` writes it"
            ) from error
        first, *lines = data[: data.rfind(b"\n") + 1].split(b"\n")[:-1] or [b""]
        about = _line(path, 1, first).get("about")
        if not isinstance(about, dict):
            raise DataError(f"{path}:1: not what `mrl difficulty` writes; its first line has `about`")
        prompts = {}
        for number, line in enumerate(lines, 2):
            try:
                name, rate = _rate(path, number, line)
            except DataError as error:
                if damaged is None:
                    raise DataError(f"{error}; `mrl difficulty` sets the line aside and goes on") from error
                damaged.append(line)
                continue
            prompts[name] = rate
        return cls(about, prompts)

    def line(self, prompt: Prompt, section: DifficultySection) -> str:
        """What is known of a prompt."""
        rate = self.prompts[prompt_id(prompt)]
        row = {"id": prompt_id(prompt), **dataclasses.asdict(rate)}
        return json.dumps(row | {"place": rate.place(section), "row": prompt.row}) + "\n"

    def write(self, path: str | Path, prompts: Iterable[Prompt], section: DifficultySection) -> None:
        """One line for each of these prompts, in place of what was there."""
        lines = [json.dumps({"about": self.about}) + "\n", *(self.line(p, section) for p in prompts)]
        replace_durably(Path(path), "".join(lines).encode())


def choose(
    sources: Sequence[Source], section: DifficultySection
) -> tuple[list[Source], Counter[Place], list[str]]:
    """The sources without the rows whose rates lie outside; how many rows lie where; sentences about the file.

    Each row that goes is counted in its source's `left_out`. DataError where the file has none of the rows.
    """
    known = RateFile.read(section.file).prompts
    places, num_unmeasured, chosen = Counter[Place](), 0, []
    for source in sources:
        rows = []
        for prompt in source.rows:
            rate = known.get(prompt_id(prompt))
            num_unmeasured += rate is None
            place = "unknown" if rate is None else rate.place(section)
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
            f"data.difficulty.file {section.file} has none of the {total} training prompts, as these rows, this chat template and its "
            "arguments make them; `mrl difficulty` measures them"
        )
    notes = [f"{section.file}: {num_unmeasured} of {total} training prompts are not in it, and are kept"]
    return chosen, places, notes if num_unmeasured else []


def _rate(path: str | Path, number: int, line: bytes) -> tuple[str, SolveRate]:
    """A prompt's id and what a line says of it."""
    row = _line(path, number, line)
    values: list[Any] = [row.get(field) for field in FIELDS]
    name, *counts = values
    if not isinstance(name, str) or any(type(count) is not int for count in counts):
        raise DataError(f"{path}:{number}: a line of a prompt has {', '.join(FIELDS)}, not {_shown(line)}")
    samples, solved = map(int, counts)
    if not 0 <= solved <= samples:
        raise DataError(f"{path}:{number}: {solved} of {samples} samples is impossible")
    return name, SolveRate(samples, solved)


def _line(path: str | Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}:{number}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}:{number}: {_shown(line)} is not an object")
    return row


def _shown(line: bytes) -> str:
    return line[:80].decode(errors="replace")
