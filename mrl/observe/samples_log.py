"""Write samples.jsonl: some of each step's samples as text with their verdicts, for people to read."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mrl.observe.metrics_log import append_lines
from mrl.observe.token_values import TokenValues
from mrl.samples import Group, Sample

_STEP = re.compile(rb'\{"step": (\d+)(?:, "kind": "(\w+)")?[,}]')
"""Start of a row."""
Row = Mapping[str, Any]
"""Object of samples.jsonl."""
COLUMNS = (
    *("step", "sample_id", "domain", "prompt", "response", "ground_truth", "reward", "verdict", "reason"),
    *("status", "response_tokens"),
)
"""Columns of the trackers' table."""


class SamplesLog:
    """Appends the first `limit` samples of a step, the best and worst of each group first; none on a full
    disk.

    The first `limit_tokens` of them include the values of their tokens, if those are given.
    """

    def __init__(self, path: Path, *, limit: int, limit_tokens: int = 0) -> None:
        self._path, self._limit, self._limit_tokens = path, limit, limit_tokens

    def resume_at(self, step: int, *, validated: bool = True) -> int:
        """Drop trailing rows of `step` and later, written by weights that no longer exist; return how many.

        If the step before is not `validated`, also drop its validation samples.
        """
        if not self._path.is_file():
            return 0
        end = dropped = 0
        first_of = {b"validation": step if validated else step - 1}
        with self._path.open("rb") as file:
            for line in file:
                match = _STEP.match(line)
                is_kept = line.endswith(b"\n") and (
                    match is None or int(match[1]) < first_of.get(match[2], step)
                )
                end, dropped = (file.tell(), 0) if is_kept else (end, dropped + 1)
        os.truncate(self._path, end)
        return dropped

    def write(
        self, step: int, groups: Sequence[Group], *, kind: str = "train", tokens: TokenValues | None = None
    ) -> list[Row]:
        """Write samples of a step and return their rows."""
        chosen = ((group, sample) for group in groups for sample in _extremes(group.samples))
        rows: list[Row] = []
        for place, (group, sample) in enumerate(itertools.islice(chosen, self._limit)):
            row = row_of(step, kind, group, sample)
            if tokens is not None and place < self._limit_tokens:
                row["tokens"] = tokens.values(sample)
            rows.append(row)
        append_lines(self._path, [json.dumps(row) + "\n" for row in rows])
        return rows


def write_named(path: Path, step: int, groups: Sequence[Group], names: Sequence[str], *, reason: str) -> None:
    """Append the samples with these ids, their tokens, and why they were written."""
    requested = set(names)
    with path.open("a", encoding="utf-8") as file:
        for group in groups:
            for sample in group.samples:
                if sample.sample_id in requested:
                    row = row_of(step, "bad", group, sample) | {"why": reason}
                    row["reward"] = str(row["reward"])  # JSON has no NaN
                    row["tokens"] = _tokens(sample)
                    if sample.branches:
                        row["branch_tokens"] = [_tokens(branch) for branch in sample.branches]
                    file.write(json.dumps(row) + "\n")


def _tokens(sample: Sample) -> list[int]:
    return [*sample.prompt_tokens.tolist(), *sample.response_tokens.tolist()]


def _extremes(samples: Sequence[Sample]) -> list[Sample]:
    """Return the best and the worst sample; one if the group has one."""
    ordered = sorted(samples, key=_value)
    return [ordered[-1], ordered[0]][: len(ordered)]


def _value(sample: Sample) -> float:
    verdict = sample.verdict
    return float("-inf") if verdict is None or verdict.value is None else verdict.value


def row_of(step: int, kind: str, group: Group, sample: Sample) -> dict[str, object]:
    """Return a sample as a row of samples.jsonl."""
    verdict = sample.verdict
    return {
        "step": step,
        "kind": kind,
        "sample_id": sample.sample_id,
        "prompt": group.prompt.text,
        "response": sample.response_text,
        "ground_truth": str(group.prompt.ground_truth),
        "domain": sample.domain,
        "tag": sample.tag,
        "status": sample.status.value,
        "prompt_tokens": len(sample.prompt_tokens),
        "response_tokens": len(sample.response_tokens),
        "policy_versions": _span(sample),
        "reward": verdict.value if verdict else None,
        "verdict": verdict.kind.value if verdict else None,
        "reason": verdict.reason if verdict else None,
        "parts": dict(verdict.parts) if verdict else {},
        **_episode(sample),
        **_conversations(sample),
    }


def _conversations(sample: Sample) -> dict[str, object]:
    """Return a program's earlier conversations, by their branches, and where the last one leaves another."""
    *branches, main = sample.sequences
    if not branches:
        return {}
    rows = [
        {
            "prompt_tokens": len(branch.prompt_tokens),
            "response_tokens": len(branch.response_tokens),
            "response": branch.response_text,
            **_episode(branch),
            **_origin(branch, branches[:place]),
        }
        for place, branch in enumerate(branches)
    ]
    return {"branches": rows, **_origin(main, branches)}


def _origin(sequence: Sample, earlier: Sequence[Sample]) -> dict[str, object]:
    """Return the number of the conversation of which a sequence has the first turns, and how many."""
    turns = sequence.transcript.turns if sequence.transcript is not None else ()
    shared = next((n for n, turn in enumerate(turns) if sequence.loss_mask[turn.start]), len(turns))
    if not shared:
        return {}
    tokens = _tokens(sequence)[: len(sequence.prompt_tokens) + turns[shared - 1].end]
    numbers = (n for n, other in enumerate(earlier, 1) if _tokens(other)[: len(tokens)] == tokens)
    return {"continues": {"conversation": next(numbers, None), "turns": shared}}


def _episode(sample: Sample) -> dict[str, object]:
    transcript = sample.transcript
    if transcript is None:
        return {}
    turns = [
        {"said": turn.text, "observed": turn.observation, "reward": turn.reward} for turn in transcript.turns
    ]
    return {"opening": transcript.opening, "turns": turns, "ended_by": transcript.ended_by}


def _span(sample: Sample) -> list[int] | None:
    """Return the smallest and largest version of the policy's tokens; None if there are none."""
    versions = np.concatenate([part.policy_versions[part.loss_mask] for part in sample.sequences])
    return [int(versions.min()), int(versions.max())] if len(versions) else None


def samples_table(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """Return the column names, and the rows' values in their order; None if a row has none."""
    return list(COLUMNS), [[row.get(name) for name in COLUMNS] for row in rows]
