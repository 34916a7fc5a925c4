"""Two hundred harnesses at once on two nodes, with kills of harnesses, sandboxes, a gateway and an engine."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import pytest

from mrl.observe.metrics_log import read
from tests.launch import acting_runs
from tests.launch.killed_runs import LASTS, Chain

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPTS, SAMPLES, STEPS = 13, 8, 4
AT_ONCE = 200
"""Of the 208 that a stream with max_staleness 1 has in flight."""


def test_counts_are_exact_after_kills_and_nothing_is_left(acting: Path, tmp_path: Path) -> None:
    """A harness and a sandbox of each prompt are killed; the rollout worker of node 1 has its gateway."""
    for name in ("starts", "kills"):
        (tmp_path / name).mkdir()
    rows = [
        {"prompt": [{"role": "user", "content": f"count {n}"}], "number": n} for n in range(PROMPTS * STEPS)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = Path(__file__).parent / "crowd_program.py"
    settings = (
        f"data.train={tmp_path}/train.jsonl",
        f"agent={{environment: '{file}:Crowd', options: {{folder: {tmp_path}, size: {AT_ONCE}}}, "
        "max_turn_tokens: 64, max_turns: 6, retries: 6}",
        f"loop={{steps: {STEPS}, prompts_per_step: {PROMPTS}, samples_per_prompt: {SAMPLES}}}",
        "loop.schedule=stream",
        "stream.max_staleness=1",
        "rollout={workers: node, max_replacements: 2}",
        "launch.engine_slots=2",
    )
    deadline = "loop.phase_deadline_seconds=900"
    chain = Chain(functools.partial(acting_runs.words, acting), tmp_path, *settings, *LASTS, deadline)
    try:
        output = chain.finish(fault="generate:rollouts-1:2,generate:engine-1:3", nodes="0,0,1")
    finally:
        chain.remove()
    assert "rollout worker of node 1 died in phase generate: " in output, output[-3000:]
    assert "engine 1 died in phase generate" in output, output[-3000:]
    steps = [row for row in read(chain.run_folder / "metrics.jsonl") if row["step"]]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    for row in steps:
        assert row["agent/episodes"] == row["agent/ended_by/env_done"] == PROMPTS * SAMPLES
        assert (row["agent/turns"], row["agent/conversations"]) == (3, 2)
        assert row["reward/no_reward_frac"] == 0 and row.get("policy/rollout_logprob_diff_max", 0.0) < 1e-4
    kills = [f"{kind}-{row['number']}" for kind in ("harness", "sandbox") for row in rows]
    assert sorted(os.listdir(tmp_path / "kills")) == sorted(kills)
