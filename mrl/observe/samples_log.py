"""samples.jsonl: some of each step's samples as text with their verdicts, for people to read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mrl.observe.metrics_log import append_lines
from mrl.samples import Group, Sample


class SamplesLog:
    """Appends the first `limit` samples of a step, the best and the worst of each group first; none on a full disk."""

    def __init__(self, path: Path, *, limit: int) -> None:
        self._path, self._limit = path, limit

    def write(self, step: int, groups: Sequence[Group], *, kind: str = "train") -> None:
        chosen: list[dict[str, object]] = []
        for group in groups:
            ordered = sorted(group.samples, key=_value)
            for sample in dict.fromkeys((ordered[-1].sample_index, ordered[0].sample_index)):
                chosen.append(_row(step, kind, group, group.samples[_position(group, sample)]))
        append_lines(self._path, [json.dumps(row) + "\n" for row in chosen[: self._limit]])


def write_named(path: Path, step: int, groups: Sequence[Group], names: Sequence[str], *, reason: str) -> None:
    """Appends the samples of these ids, with their tokens and why they were written."""
    wanted = set(names)
    with path.open("a", encoding="utf-8") as file:
        for group in groups:
            for sample in group.samples:
                if sample.sample_id in wanted:
                    row = _row(step, "bad", group, sample) | {"why": reason}
                    row["reward"] = str(row["reward"])  # JSON has no NaN
                    row["tokens"] = [*sample.prompt_tokens.tolist(), *sample.response_tokens.tolist()]
                    file.write(json.dumps(row) + "\n")


def _position(group: Group, sample_index: int) -> int:
    return next(i for i, s in enumerate(group.samples) if s.sample_index == sample_index)


def _value(sample: Sample) -> float:
    verdict = sample.verdict
    return float("-inf") if verdict is None or verdict.value is None else verdict.value


def _row(step: int, kind: str, group: Group, sample: Sample) -> dict[str, object]:
    verdict = sample.verdict
    return {
        "step": step,
        "kind": kind,
        "sample_id": sample.sample_id,
        "prompt": group.prompt.text,
        "response": sample.response_text,
        "gold": str(group.prompt.gold),
        "domain": sample.domain,
        "tag": sample.tag,
        "status": sample.status.value,
        "prompt_tokens": len(sample.prompt_tokens),
        "response_tokens": len(sample.response_tokens),
        "policy_version": int(sample.policy_versions[0]) if len(sample.policy_versions) else None,
        "reward": verdict.value if verdict else None,
        "verdict": verdict.kind.value if verdict else None,
        "reason": verdict.reason if verdict else None,
        "parts": dict(verdict.parts) if verdict else {},
    }
