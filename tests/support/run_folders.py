"""Folders like those of a finished run, without a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def sample_row(step: int, number: int, index: int = 0, **fields: Any) -> dict[str, Any]:
    """Return a row of samples.jsonl for this prompt; `fields` override the defaults."""
    row = {
        "step": step, "kind": "train", "sample_id": f"{number}.{index}", "prompt": f"question {number}",
        "response": f"answer {index} of step {step}", "ground_truth": "42",
        "domain": "maths" if number % 2 else "code", "tag": "", "status": "finished", "prompt_tokens": 3,
        "response_tokens": 5 + number, "policy_versions": [step - 1, step - 1], "reward": float(index),
        "verdict": "scored", "reason": f"'{number}', not '42'", "parts": {},
    }  # fmt: skip
    return row | fields


def metrics_row(step: int, **fields: float | str) -> dict[str, Any]:
    times = {f"time/{name}_seconds": 0.5 for name in ("generate", "reward", "update", "sync")}
    return {
        "step": step, "reward/mean": step / 10, "time/step_seconds": 2.0, "sync/seconds": 0.4, **times,
    } | fields  # fmt: skip


def write_run(
    folder: Path,
    *,
    metrics: Iterable[Mapping[str, Any]] = (),
    samples: Iterable[Mapping[str, Any]] = (),
    config: str | None = "run: {name: base}\n",
) -> Path:
    folder.mkdir(parents=True)
    for name, rows in (("metrics", metrics), ("samples", samples)):
        if lines := [json.dumps(row) + "\n" for row in rows]:
            (folder / f"{name}.jsonl").write_text("".join(lines))
    if config is not None:
        (folder / "config.yaml").write_text(config)
    return folder
