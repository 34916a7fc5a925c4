"""Every example is short and runs in a user's folder, next to packages with our packages' names."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.config.load import load
from mrl.observe.metrics_log import read
from mrl.training.checkpoint.checkpoint_folder import latest_checkpoint, step_of
from tests.support.own_folder import write_modules_named_as_pythons
from tests.support.source_tree import ROOT

EXAMPLES = sorted(
    path
    for path in (ROOT / "examples").rglob("*.*")
    if path.suffix in (".py", ".yaml") and path.is_file() and "repairs" not in path.parts
)

SCREEN = (
    r"data: rows: 180, validation_rows: 36, .*",
    r"CPU run: training in float32, engines in float32, eager engines, KV cache of 0\.062 GiB per .*",
    r"starting Ray, \d+ trainer ranks and \d+ engines on \d+ slots",
    r"all workers up and serving after [\d.]+ s \(.*\); logs in runs/reversed_words/logs/latest",
    r"step \d/9  .*\d s  \(\d+ min left\)", r"step [12]: reward 0.\d\d",
    r"runs/reversed_words: good enough after step 2", r"ended: good enough, in runs/reversed_words",
)  # fmt: skip
"""Allowed lines of a run that is stopped after two steps, with its program's own."""


@pytest.fixture
def folder(strange_folder: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "examples", strange_folder / "examples", ignore=ignored)
    return strange_folder


def python(folder: Path, *words: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT / "examples")))
def test_an_example_has_at_most_40_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 40


@pytest.mark.parametrize(
    ("base", "name"),
    [("calculator", "openai_agents"), ("smollm2", "code_agent"), ("quickstart", "mini_swe_agent")],
)
def test_a_programs_configuration_is_valid(base: str, name: str) -> None:
    files = [ROOT / f"configs/{base}.yaml", ROOT / f"examples/programs/{name}.yaml"]
    config = load(files, [])
    assert config.agent is not None and config.agent.python == ".programs/bin/python"
    assert {config.reward.kind, *(spec.kind for spec in config.reward.domains.values())} == {"environment"}


def test_answers_are_verified(folder: Path) -> None:
    lines = python(folder, "examples/verify_answers.py").splitlines()
    assert [line.split()[0] for line in lines] == ["1.0", "1.0", "1.0", "0.0", "0.0"]


def test_an_own_environment_is_played_by_hand(folder: Path) -> None:
    assert len((ROOT / "examples/own_environment.py").read_text().splitlines()) <= 31
    lines = python(folder, "examples/own_environment.py").splitlines()
    assert lines == [
        "Open the lock: three digits.",
        "171 0.0 False 2 right",
        "281 0.0 False 2 right",
        "271 1.0 True 3 right",
    ]


def test_advantages_and_losses_teach_without_engines(folder: Path) -> None:
    lines = python(folder, "examples/train_without_engines.py").splitlines()
    rewards = [float(line.split()[3]) for line in lines]
    assert len(rewards) == 5 and rewards[0] < 0.2 and rewards[-1] > 0.9


def test_a_weight_sync_is_planned(folder: Path) -> None:
    needed, crossing, bound, _ = python(folder, "examples/plan_weight_sync.py").splitlines()
    assert "engines need 244.4 GB" in needed
    assert crossing.rpartition(": ")[2] == bound.rpartition(": ")[2] == "212.1 GB"


def test_responses_are_scored_and_a_wrong_setting_is_named(folder: Path) -> None:
    *verdicts, wrong = python(folder, "examples/score_responses.py").splitlines()
    assert [line.split()[0] for line in verdicts] == ["1.0", "0.0", "0.0"]
    assert wrong == "loop.stepz: unknown key (mapping 2); did you mean 'steps'?"


@pytest.mark.integration
def test_own_data_model_and_reward_are_trained_with(folder: Path) -> None:
    """Run next to files named like Python modules, on one rank and engine instead of two."""
    write_modules_named_as_pythons(folder)
    python(folder, "examples/reversed_words/make_data.py", "work/reversed")
    python(folder, "examples/reversed_words/make_model.py", "work/reversed/model")
    words = (
        "training.layout={ep: 1, dp: 1}",
        "loop.steps=9",
        "loop.prompts_per_step=8",
        "loop.validation.every_steps=2",
    )
    screen = python(folder, "examples/train_from_python.py", *words).splitlines()
    rows = read(folder / "runs/reversed_words/metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all("reward/right_length" in row and 0 <= row["reward/mean"] <= 1 for row in rows[1:])
    assert rows[1]["optim/grad_norm"] > 0
    picture = (folder / "runs/reversed_words/rewards.html").read_text()
    points = json.dumps([row["reward/mean"] for row in rows[1:]], separators=(",", ":"))
    assert '"x":[1,2]' in picture and f'"y":{points}' in picture
    samples = [json.loads(line) for line in (folder / "runs/reversed_words/samples.jsonl").open()]
    assert any(sample["reward"] > 0 for sample in samples)
    saved = latest_checkpoint(folder / "runs/reversed_words/checkpoints")
    assert saved is not None and step_of(saved) == 2, "a stopped run resumes after its last step"
    strange = [line for line in screen if not any(re.fullmatch(p, line) for p in SCREEN)]
    assert not strange, "lines on the screen that are not ours"
