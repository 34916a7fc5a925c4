"""Solutions in the rows of a data set, used as responses that a verifier should pass."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mrl.rewards.trials.probes import Probe, TrialFinding
from mrl.samples import Prompt

SOLUTION = "a row's solution"
"""Name of a probe made from a row's solution."""
COLUMNS = ("solutions", "canonical_solution", "reference_solution", "solution")
"""Solution columns in data sets of programs and mathematics (APPS, TACO, CodeContests, HumanEval, MATH)."""
MAX_SOLUTIONS = 3
"""Number of solutions tried per row; some rows have hundreds."""
_OTHER_ANSWERS = ("answer", "ground_truth", "reward_model")
_PYTHON = frozenset({"3", "python", "python3", "py", "PYTHON3"})
"""Names of Python 3 in CodeContests."""


def solutions_of(prompt: Prompt) -> list[str]:
    """Return a row's first solutions; a column that is the row's ground truth does not count."""
    for column in COLUMNS:
        if column == "solution" and not any(prompt.metadata.get(name) for name in _OTHER_ANSWERS):
            continue
        if solutions := list(_texts(prompt.metadata.get(column))):
            return solutions[:MAX_SOLUTIONS]
    return []


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, str):
        yield from [value] if value.strip() else []
    elif isinstance(value, Mapping):  # CodeContests: a list of languages and one of texts
        texts, languages = value.get("solution") or (), value.get("language") or ()
        yield from (text for text, name in zip(texts, languages, strict=False) if str(name) in _PYTHON)
    elif isinstance(value, Sequence):
        yield from (text for text in value if isinstance(text, str) and text.strip())


def passes(probe: Probe) -> bool:
    """Return True if the verifier accepts the probe: its value is at least 1."""
    return probe.value is not None and probe.value >= 1.0


def finding_on_solutions(tried: Sequence[Probe], *, others_are_right: bool) -> TrialFinding | None:
    """Return a finding about the solutions that do not pass; None if all pass. It is an error if none passes,
    unless the verifier itself knows a correct response (`others_are_right`): then only the form differs."""
    failed = [probe for probe in tried if not passes(probe)]
    if not failed:
        return None
    reason = failed[0].verdict.reason if failed[0].verdict else "no verdict"
    return TrialFinding(
        len(failed) == len(tried) and not others_are_right,
        f"{len(failed)} of {len(tried)} solutions of the rows do not pass, "
        f"first in {failed[0].prompt.row}: {reason}",
    )
