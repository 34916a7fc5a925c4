"""`mrl bench stream`: the load is the same whoever schedules it, and the figures are of it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from mrl.cli import main
from mrl.launch.commands.bench_load import LogNormalLengths, hashed
from mrl.rewards.contract import RewardRequest
from tests.launch.command import run
from tests.launch.tiny_runs import ROOT, words

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


def test_rewards_of_a_group_differ_whatever_was_said() -> None:
    rewards = [hashed(RewardRequest(f"{prompt}.{sample}", prompt, "", None)) for prompt, sample in SAMPLES]
    assert len(set(rewards)) == len(rewards) and min(rewards) >= 0 and max(rewards) < 1
    assert np.mean(rewards) == pytest.approx(0.5, abs=0.02)
    assert hashed(RewardRequest("0.0", 0, "other words", None)) == rewards[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--schedules", "on_policy,streams"], "loop.schedule"),
        (["--schedules", "stream:max_age=-1"], "stream.max_age"),
        (["--schedules", "stream:max_age=0", "launch.engine_slots=1"], "stream.max_age = 0"),
        (["--schedules", "on_policy,on_policy"], "twice"),
        (["--steps", "0"], "--steps 0"),
        (["--mean", "0"], "--mean 0"),
        (["agent={environment: guess}", "reward={kind: environment}", "--mean", "8"],
         "turns of the section agent"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_before_anything_starts(words, said, capsys) -> None:
    assert main(["bench", "stream", str(ROOT / "configs/quickstart.yaml"), *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(600)
def test_both_schedules_train_the_same_tokens(task: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    more = ("rollout.max_response_tokens=8", "--steps", "4", "--warm-up", "1", "--json")
    run("bench", "stream", *words(task, tmp_path, "bench", *more), log=log, seconds=500)
    text = log.read_text()
    figures = json.loads(text[text.index("\n{") :])
    assert list(figures) == ["on_policy", "stream:max_age=2"]
    plain, stream = figures.values()
    assert plain["tokens"] == stream["tokens"] and len(plain["tokens"]) == 4
    assert plain["tokens"][:2] == plain["tokens"][2:], "the second run has another load"
    assert plain["speed_up"] == plain["mean_speed_up"] == 1 and plain["age_max"] == 0
    assert 0 < stream["age_max"] <= 2
    assert not (tmp_path / "bench").exists(), "a measurement leaves no run folder"
