"""Lists of samples, page by page, over one or several runs: by the index, and by text in the files."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from mrl.watch.index import Query, prompt_hash
from mrl.watch.run import LiveRun

PAGE = 100
"""Most samples of a list."""
SECONDS = 2.0
"""Longest search for a text in one answer; the next one goes on from there."""
SHORT = 200
"""Characters of a text in a list."""
SEARCHED = ("prompt", "response", "ground_truth", "reason")
LISTED = ("step", "kind", "domain", "reward", "response_tokens", "status")


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """How far a list was read: samples that came later are not in it, so that none shifts."""

    ends: tuple[int, ...]
    """Of each run: one past the number of its newest sample then."""
    skip: int = 0
    """Samples that were looked at."""

    @classmethod
    def newest(cls, runs: Mapping[str, LiveRun]) -> Place:
        """At the newest samples."""
        return cls(tuple(run.index.end for run in runs.values()))


def list_samples(
    runs: Mapping[str, LiveRun], query: Query, text: str, place: Place, *, seconds: float = SECONDS
) -> dict[str, Any]:
    """The next samples that fit, those of the latest steps first, as JSON values: `rows` in short, how many of `fitting` were
    `looked` at, and the `next` place, None at the end. `text`: in any case, in prompt, response, ground truth or reason."""
    order = _ordered(runs, query, place)
    names, deadline = list(runs), time.monotonic() + seconds
    found: list[dict[str, Any]] = []
    looked = place.skip
    with _readers(runs) as readers:
        for run, number in order[place.skip :].tolist():
            row = readers[names[run]](number)
            looked += 1
            if row is not None and text.lower() in _searched(row, text):
                found.append(_short(row, names[run], number))
            if len(found) == PAGE or time.monotonic() > deadline:
                break
    further = dataclasses.replace(place, skip=looked) if looked < len(order) else None
    return {
        "rows": found,
        "fitting": len(order),
        "looked": looked,
        "next": None if further is None else dataclasses.asdict(further),
    }


def same_prompt(runs: Mapping[str, LiveRun], name: str, number: int, *, limit: int) -> dict[str, Any]:
    """A sample and the others of its prompt, whole: `rows`, at most `limit`, the sample first, and how many there are in `total`."""
    with _readers(runs) as readers:
        row = readers[name](number)
        if row is None:
            return {"rows": [], "total": 0}
        others = list(_others(runs, name, number, prompt_hash(row)))
        rows = [_whole(row, name, number)]
        for other, its_number in others[: max(0, limit - 1)]:
            found = readers[other](its_number)
            if found is not None and found.get("prompt") == row.get("prompt"):
                rows.append(_whole(found, other, its_number))
        return {"rows": rows, "total": 1 + len(others)}


@contextlib.contextmanager
def _readers(runs: Mapping[str, LiveRun]) -> Iterator[dict[str, Callable[[int], dict[str, Any] | None]]]:
    with contextlib.ExitStack() as opened:
        yield {name: opened.enter_context(run.reader()) for name, run in runs.items()}


def _ordered(runs: Mapping[str, LiveRun], query: Query, place: Place) -> np.ndarray:
    """[n, 2]: the run's place and the sample's number."""
    parts, steps = [], []
    for number_of_run, (run, end) in enumerate(zip(runs.values(), place.ends, strict=True)):
        numbers, its_steps = run.index.find(query, end)
        parts.append(np.stack([np.full_like(numbers, number_of_run), numbers], axis=1))
        steps.append(its_steps)
    joined = np.concatenate(parts)
    return joined[np.argsort(-np.concatenate(steps), kind="stable")]


def _others(runs: Mapping[str, LiveRun], name: str, number: int, prompt: int) -> Iterator[tuple[str, int]]:
    for other, run in runs.items():
        for its_number in run.index.same_prompt(prompt, run.index.end).tolist():
            if (other, its_number) != (name, number):
                yield other, its_number


def _searched(row: Mapping[str, Any], text: str) -> str:
    return "\n".join(str(row.get(name) or "") for name in SEARCHED).lower() if text else ""


def _short(row: Mapping[str, Any], run: str, number: int) -> dict[str, Any]:
    texts = {name: str(row.get(name) or "")[:SHORT] for name in ("prompt", "response")}
    return {"run": run, "number": number, **{name: row.get(name) for name in LISTED}, **texts}


def _whole(row: Mapping[str, Any], run: str, number: int) -> dict[str, Any]:
    return {**row, "run": run, "number": number}
