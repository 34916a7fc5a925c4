"""`python -m benchmarks.schedules` gives every schedule the same load and measures that load."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.bench_load import LogNormalLengths, hashed
from benchmarks.schedules import COLUMNS, main, schedule_overrides, stream_table
from mrl.errors import ConfigError
from mrl.rewards.contract import RewardRequest
from tests.launch.tiny_runs import ROOT, words
from tests.support.runs import run_python

SAMPLES = [(prompt, sample) for prompt in range(1000) for sample in range(8)]


def test_lengths_are_log_normal_and_of_a_sample_alone() -> None:
    lengths = LogNormalLengths(mean=200.0, sigma=0.9, most=100_000, seed=3)
    drawn = np.array([lengths(*sample) for sample in SAMPLES])
    logs = np.log(drawn)
    assert logs.std() == pytest.approx(0.9, rel=0.05) and drawn.mean() == pytest.approx(200, rel=0.05)
    assert np.median(drawn) == pytest.approx(200 * np.exp(-0.405), rel=0.05)
    there = pickle.loads(pickle.dumps(lengths))  # an engine
    assert [there(*sample) for sample in SAMPLES[::-1]] == drawn[::-1].tolist()
    other = LogNormalLengths(200.0, 0.9, 100_000, seed=4)
    assert np.mean([other(*sample) == length for sample, length in zip(SAMPLES, drawn, strict=True)]) < 0.05


def test_lengths_are_at_least_one_and_at_most_what_is_allowed() -> None:
    drawn = {LogNormalLengths(2.0, 2.0, most=5, seed=0)(*sample) for sample in SAMPLES}
    assert drawn == {1, 2, 3, 4, 5}
    assert {LogNormalLengths(3.0, 0.0, most=5, seed=0)(*sample) for sample in SAMPLES} == {3}


def test_rewards_of_a_group_differ_whatever_was_said() -> None:
    rewards = [hashed(RewardRequest(f"{prompt}.{sample}", prompt, "", None)) for prompt, sample in SAMPLES]
    assert len(set(rewards)) == len(rewards) and min(rewards) >= 0 and max(rewards) < 1
    assert np.mean(rewards) == pytest.approx(0.5, abs=0.02)
    assert hashed(RewardRequest("0.0", 0, "other words", None)) == rewards[0]


def test_a_schedule_is_written_as_its_name_and_its_settings() -> None:
    assert schedule_overrides("on_policy") == ["loop.schedule=on_policy"]
    overrides = ["loop.schedule=stream", "stream.max_staleness=2", "stream.kv_cache=keep"]
    assert schedule_overrides("stream:max_staleness=2:kv_cache=keep") == overrides


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--schedules", "on_policy,streams"], "loop.schedule"),
        (["--schedules", "stream:max_staleness=-1"], "stream.max_staleness"),
        (["--schedules", "stream:max_staleness=0", "launch.engine_slots=1"], "stream.max_staleness = 0"),
        (["--steps", "0"], "--steps 0"),
        (["--mean", "0"], "--mean 0"),
        (
            ["agent={environment: tests.support.guess:Guess}", "reward={kind: environment}", "--mean", "8"],
            "turns of the section agent",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main([str(ROOT / "configs/quickstart.yaml"), *words])


def test_the_table_has_a_line_for_each_schedule() -> None:
    figures: dict[str, Any] = {figure: 2.0 for _, figure, _ in COLUMNS}
    figures |= dict.fromkeys(("interrupted", "pause_frac", "age_mean", "age_max", "driver_frac"), 0.25)
    lines = stream_table({"on_policy": {**figures, "steps": [2.0, 2.0]}, "stream": figures}).splitlines()
    assert [line.split()[0] for line in lines] == ["schedule", "on_policy", "stream", "step"]
    assert "25.0%" in lines[1] and "median of 2 steps" in lines[3]


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(600)
def test_both_schedules_train_the_same_tokens(task: Path, tmp_path: Path) -> None:
    options = ("rollout.max_response_tokens=8", "--steps", "4", "--warm-up", "1", "--json")
    arguments = words(task, tmp_path, "bench", *options)
    done = run_python("-m", "benchmarks.schedules", *arguments, seconds=500)
    assert done.returncode == 0, done.stderr[-3000:]
    text = done.stdout
    figures = json.loads(text[text.index("{") :])
    assert list(figures) == ["on_policy", "stream:max_staleness=2"]
    plain, stream = figures.values()
    assert plain["tokens"] == stream["tokens"] and len(plain["tokens"]) == 4
    assert plain["tokens"][:2] == plain["tokens"][2:], "the second run has another load"
    assert plain["speed_up"] == plain["mean_speed_up"] == 1 and plain["age_max"] == 0
    assert 0 < stream["age_max"] <= 2
    assert not (tmp_path / "bench").exists(), "a measurement leaves no run folder"
