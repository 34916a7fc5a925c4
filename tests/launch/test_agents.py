"""Episodes on real engines: the command trains, with an environment in separate processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from mrl.observe.metrics_log import read
from tests.launch.acting_runs import words
from tests.launch.command import Command, run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_episodes_are_trained_on_policy(acting: Path, tmp_path: Path) -> None:
    """A difference between generated and trained tokens, or in a log-prob, ends the run."""
    run("train", *words(acting, tmp_path, "run", "loop.steps=2"), log=tmp_path / "run.log", seconds=500)
    rows, samples = read(tmp_path / "run/metrics.jsonl"), rows_of(tmp_path / "run")
    assert len(rows) == 3
    for row in rows[1:]:
        assert row["agent/episodes"] == 16 and row["agent/turns"] > 1.2 and row["reward/mean"] > 0
        assert row["agent/retries"] == row["agent/restarted"] == row["reward/no_reward_frac"] == 0
        assert row["agent/ended_by/env_done"] >= 8, "most turns end by themselves"
    assert {s["kind"] for s in samples} == {"train", "validation"}
    for sample in samples:
        assert sample["turns"] and sample["reward"] == pytest.approx(
            sum(t["reward"] or 0 for t in sample["turns"])
        )
        for number, turn in enumerate(sample["turns"][:-1], 1):
            assert turn["observed"] == f"{number} é語👩 <|im_end|> {len(turn['said'])}"
    assert any(len(s["turns"]) > 2 for s in samples)


def test_rows_with_and_without_an_environment_in_one_stream(acting: Path, tmp_path: Path) -> None:
    """Train single responses and episodes of two environments in one stream, on two dp ranks."""
    file = Path(__file__).parent / "environments.py"
    sets = [
        f"{{path: {acting}/{name}.jsonl, domain: {domain}}}"
        for name in ("train", "validation")
        for domain in ("plain", "counted", "slow")
    ]
    slow = f"{{environment: '{file}:Counting', options: {{seconds: 0.1}}}}"
    args = words(acting, tmp_path, "run", "loop.schedule=stream", "stream.max_staleness=1", "loop.steps=2")
    args += [
        f"data={{train: [{', '.join(sets[:3])}], validation: [{', '.join(sets[3:])}], "
        "max_prompt_tokens: 64}",
        f"agent={{domains: {{plain: {{}}, slow: {slow}}}, max_environments: 4}}",
        f"reward={{kind: environment, domains: {{plain: {{kind: plugin, path: '{file}:letters'}}}}}}",
        "loop.prompts_per_step=6", "logging.samples_per_step=1000", "training.layout={ep: 1, dp: 2}",
        "rollout={dp: 2, expert_parallel: true}",
    ]  # fmt: skip
    run("train", *args, log=tmp_path / "run.log", seconds=500)
    rows = [row for row in read(tmp_path / "run/metrics.jsonl") if row["step"]]
    assert len(rows) == 2 and all(0 < row["agent/episodes"] < 24 for row in rows)
    assert all(row["reward/no_reward_frac"] == row["agent/retries"] == 0 for row in rows)
    samples = [sample for sample in rows_of(tmp_path / "run") if sample["kind"] == "train"]
    assert {sample["domain"] for sample in samples} == {"plain", "counted", "slow"}
    for sample in samples:
        assert bool(sample.get("turns")) == (sample["domain"] != "plain")


AHEAD = ("loop.schedule=stream", "stream.max_staleness=2", "loop.steps=6", "logging.samples_per_step=1000")
AHEAD += ("loop.checkpoint={every_steps: 1, keep: 9}", "rollout.max_num_seqs=6")


@pytest.mark.slow
def test_a_killed_stream_goes_on_with_its_episodes(acting: Path, tmp_path: Path) -> None:
    """A run killed in its third sync replays its episodes in fresh environments without difference."""
    args = words(acting, tmp_path, "run", *AHEAD, "agent.options={seconds: 0.2}")
    fault = {"MRL_FAULT": "sync:driver:3"}
    with Command("train", *args, log=tmp_path / "killed.log", environment=fault) as killed:
        assert killed.wait(seconds=400) == -signal.SIGKILL, killed.output[-3000:]
        killed.assert_nothing_left()
    run("train", *args, log=tmp_path / "run.log", seconds=500)
    assert "resuming at step 4" in (tmp_path / "run.log").read_text()
    rows = read(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(7))
    assert max(row["policy/staleness_max"] for row in rows[1:]) in (1.0, 2.0), "nothing ran ahead, or too far"
    assert sum(row["agent/restarted"] + row["agent/retries"] for row in rows[1:]) == 0
    later = [s for s in rows_of(tmp_path / "run") if s["step"] > 3 and s["kind"] == "train"]
    over = [s for s in later if s["policy_versions"][0] < 3 <= s["policy_versions"][1]]
    assert any(len(s["turns"]) > 1 for s in over), (
        "no episode was begun before the death and went on after it"
    )
