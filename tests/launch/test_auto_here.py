"""Commands give settings the values of this machine, name them in a line, and print them in the dry run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mrl.cli import main
from mrl.config.load import load
from mrl.launch.commands import auto_here, check
from mrl.launch.commands.auto_here import with_values
from tests.launch.tiny_runs import words

SMALLEST = ["run.name=a", "model.path=weights/Qwen3-30B-A3B", "data.train=rows.jsonl", "reward.kind=maths"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend a machine without GPUs that has 8 GiB available."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(auto_here, "own_gpus", lambda: 0)
    monkeypatch.setattr(check, "own_gpus", lambda: 0)
    monkeypatch.setattr(auto_here, "available_memory", lambda: 8 << 30)


def test_a_machine_without_gpus_decides(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config, lines = with_values(load([], SMALLEST))
    assert (config.training.dtype, config.rollout.kv_cache_bytes) == ("float32", 1 << 30)
    values = "training in float32, engines in float32, eager engines, KV cache of 1 GiB per engine rank"
    assert lines == [f"CPU run: {values}"]
    assert with_values(config) == (config, []), "a line without a choice"
    monkeypatch.setattr(auto_here, "own_gpus", lambda: 8)
    assert with_values(load([], SMALLEST))[0].training.dtype == "bfloat16"


def test_a_command_without_engines_leaves_theirs(machine: None) -> None:
    config, lines = with_values(load([], SMALLEST), engines=False)
    assert (config.training.dtype, config.rollout.dtype) == ("float32", "auto")
    assert lines == ["CPU run: training in float32"]


@pytest.mark.parametrize(
    ("address", "kind", "dtype"), [("", "CPU", "float32"), ("a cluster", "GPU", "bfloat16")]
)
def test_a_dry_run_prints_the_values_and_which_were_auto(
    address: str,
    kind: str,
    dtype: str,
    task: Path,
    tmp_path: Path,
    machine: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A cluster to join is not asked: as the other checks do, the dry run assumes that it has GPUs."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert main(["train", *words(task, tmp_path, "run", "rollout.dtype=float32"), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"# {kind} run: training in {dtype}, ")
    resolved = yaml.safe_load(printed)
    assert (resolved["training"]["dtype"], resolved["rollout"]["dtype"]) == (dtype, "float32")
    assert load([yaml.safe_load(printed)]).rollout.enforce_eager == (kind == "CPU")
