"""Truncated sampling trains on what the engine drew from: log-probs agree over the sampling masks."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.observe.metrics_log import read
from tests.launch import acting_runs, tiny_runs
from tests.launch.command import run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

TRUNCATION = "rollout={top_p: 0.8, top_k: 20, min_p: 0.01, temperature: 0.7}"
"""Of a random model's 16 tokens, which are all likely."""


def check(folder: Path) -> None:
    """Check the rows of a run that a mismatch above 1e-4 would have ended."""
    rows = [row for row in read(folder / "metrics.jsonl") if row["step"]]
    assert len(rows) == 3
    measured = [row for row in rows if "policy/rollout_logprob_diff_max" in row]
    assert measured and all(row["policy/rollout_logprob_diff_max"] < 1e-4 for row in measured)
    for row in rows:
        assert 1 < row["policy/kept_tokens_mean"] < row["policy/kept_tokens_max"] <= 20
        if not row["policy/staleness_max"]:
            assert abs(row["policy/ratio_mean"] - 1) < 1e-3  # one update per step


@pytest.mark.parametrize(
    "extra",
    [
        ("algorithm.kl={location: loss, coefficient: 0.1}",),
        pytest.param(("loop.schedule=stream", "stream.max_staleness=1"), marks=pytest.mark.slow),
        pytest.param(("rollout.workers=node", "loop.max_rollout_mismatch=1e-4"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_single_turns(extra: tuple[str, ...], task: Path, tmp_path: Path) -> None:
    updates = ("algorithm.minibatches=1", "loop.steps=3", "training.share_prefixes=false")
    words = tiny_runs.words(task, tmp_path, "run", TRUNCATION, *updates, *extra)
    run("train", *words, log=tmp_path / "log", seconds=400)
    check(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("extra", [(), (acting_runs.PROGRAM,)], ids=["environment", "program"])
def test_episodes(extra: tuple[str, ...], acting: Path, tmp_path: Path) -> None:
    words = acting_runs.words(acting, tmp_path, "run", "algorithm.minibatches=1", "loop.steps=3", *extra)
    truncation = [f"rollout.{name}" for name in ("top_p=0.8", "top_k=20", "min_p=0.01", "temperature=0.7")]
    run("train", *words, *truncation, log=tmp_path / "log", seconds=500)
    check(tmp_path / "run")
