"""The solutions that rows of a data set hold beside their ground truth, as responses that a verifier should pass."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mrl.rewards.trials.probes import Probe, TrialFinding
from mrl.samples import Prompt

SOLUTION = "a row's solution"
"""Name of such a probe."""
COLUMNS = ("solutions", "canonical_solution", "reference_solution", "solution")
"""Where data sets of programs and of mathematics have them (APPS, TACO, CodeContests, HumanEval, MATH)."""
MOST = 3
"""Solutions of one row that are tried; some rows have hundreds."""
_OTHER_ANSWERS = ("answer", "ground_truth", "reward_model")
_PYTHON = frozenset({"3", "python", "python3", "py", "PYTHON3"})
"""Python 3 among the languages of CodeContests."""


def solutions_of(prompt: Prompt) -> list[str]:
    """Return the first few; none where a column of that name is the row's ground truth."""
    for column in COLUMNS:
        if column == "solution" and not any(prompt.metadata.get(name) for name in _OTHER_ANSWERS):
            continue
        if found := list(_texts(prompt.metadata.get(column))):
            return found[:MOST]
    return []


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, str):
        yield from [value] if value.strip() else []
    elif isinstance(value, Mapping):  # CodeContests: columns of the languages and of the texts
        texts, languages = value.get("solution") or (), value.get("language") or ()
        yield from (text for text, name in zip(texts, languages, strict=False) if str(name) in _PYTHON)
    elif isinstance(value, Sequence):
        yield from (text for text in value if isinstance(text, str) and text.strip())


def passes(probe: Probe) -> bool:
    """Whether a verifier takes it for right, as a sample that solves its prompt."""
    return probe.value is not None and probe.value >= 1.0


def remark(tried: Sequence[Probe], *, others_are_right: bool) -> TrialFinding | None:
    """What is wrong with those that do not pass. `others_are_right`: the verifier says itself what is right, so that solutions may only be
    written in another form than it asks for."""
    failed = [probe for probe in tried if not passes(probe)]
    if not failed:
        return None
    reason = failed[0].verdict.reason if failed[0].verdict else "no verdict"
    return TrialFinding(
        len(failed) == len(tried) and not others_are_right,
        f"{len(failed)} of {len(tried)} solutions of the rows do not pass, the first of {failed[0].prompt.row}: {reason}",
    )
