"""The stream schedule on real engines: on-policy without age, to the bit; ahead by two versions; on slots of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.observe.metric_names import undescribed
from mrl.observe.metrics_log import read, without_volatile
from tests.launch.command import run
from tests.launch.tiny_runs import words

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

GAE = ("algorithm.estimator={name: gae}", "algorithm.minibatches=2", "critic={warmup_steps: 2}")


def trained(task: Path, folder: Path, name: str, *more: str) -> list[dict[str, Any]]:
    """The rows of a run of the command."""
    run("train", *words(task, folder, name, *more), log=folder / f"{name}.log", seconds=500)
    return read(folder / name / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [(), GAE], ids=["grpo", "ppo"])
def test_without_age_twenty_steps_are_on_policy_to_the_bit(
    algorithm: tuple[str, ...], task: Path, tmp_path: Path
) -> None:
    """Rows, samples and the exported weights. The short form is in test_train.py."""
    exact = ("loop.deterministic=true", "loop.steps=20", "loop.checkpoint={every_steps: 20}")
    exact += ("export={every_steps: 20, keep: 1}", *algorithm)
    plain = trained(task, tmp_path, "plain", *exact)
    stream = trained(task, tmp_path, "stream", *exact, "loop.schedule=stream", "stream.max_age=0")
    assert len(plain) == 21
    for ours, theirs in zip(stream, plain, strict=True):
        expected = without_volatile(theirs)
        expected.pop("group/rounds", None)
        assert expected == {name: value for name, value in without_volatile(ours).items() if name in expected}
    texts = [(tmp_path / name / "samples.jsonl").read_text() for name in ("plain", "stream")]
    assert texts[0] == texts[1]
    weights = [load_all(tmp_path / name / "exports") for name in ("plain", "stream")]
    assert weights[0].keys() == weights[1].keys() and weights[0]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {
        f"{path.name}/{name}": tensor
        for path in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


SPLITS = {
    "shared": (),
    "own": ("launch.engine_slots=1", "rollout.tp=1", "training.layout={tp: 1, pp: 1, ep: 1, dp: 1}"),
}


@pytest.mark.parametrize("split", [pytest.param("shared"), pytest.param("own", marks=pytest.mark.slow)])
def test_a_stream_runs_ahead_within_its_age_and_trains_exact_log_probs(
    split: str, task: Path, tmp_path: Path
) -> None:
    """Tokens of today's version agree with the trainer's to 1e-4 (loop.max_rollout_mismatch ends the run else)."""
    more = (
        "loop.schedule=stream",
        "stream={max_age: 2, pool: {memory_bytes: 0}}",
        "loop.steps=6",
        "rollout.max_num_seqs=2",
    )
    rows = trained(task, tmp_path, "run", *more, *SPLITS[split])
    assert [row["step"] for row in rows] == list(range(7))
    ages = [row["policy/age_steps"] for row in rows[1:]]
    assert max(ages) in (1.0, 2.0), "nothing ran ahead, or too far"
    assert all(row["optim/grad_norm"] > 0 for row in rows[1:])
    assert sum(row["stream/parked"] for row in rows[1:]) > 0
    assert all(row["pool/spilled_bytes"] == row["pool/bytes"] > 0 for row in rows[1:])
    assert list((tmp_path / "run/pool").iterdir()) == [], "files outlived the run"
    assert not undescribed({name for row in rows for name in row})
