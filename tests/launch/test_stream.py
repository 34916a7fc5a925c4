"""The stream schedule on real engines: bit-exact at staleness 0, two versions ahead, killed, own slots."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrl.data.tokenise import decoder
from mrl.observe.metrics_log import read, without_volatile
from mrl.report.audit import audit, audit_text
from mrl.samples import Prompt, Status
from mrl.training.checkpoint.checkpoint_folder import read_extra
from mrl.trajectories.group_messages import decode_group
from tests.launch.command import Command, run
from tests.launch.tiny_runs import words

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

GAE = ("algorithm.estimator={name: gae}", "algorithm.minibatches=2", "critic={warmup_steps: 2}")


def trained(task: Path, folder: Path, name: str, *settings: str) -> list[dict[str, Any]]:
    run("train", *words(task, folder, name, *settings), log=folder / f"{name}.log", seconds=500)
    return read(folder / name / "metrics.jsonl")


@pytest.mark.slow
def test_without_age_twenty_steps_are_on_policy_to_the_bit(task: Path, tmp_path: Path) -> None:
    """Compare rows, samples and exported policy and critic; test_train.py has a shorter form."""
    exact = ("loop.deterministic=true", "loop.steps=20", "loop.checkpoint={every_steps: 20}")
    exact += ("export={every_steps: 20, keep: 1}", *GAE)
    plain = trained(task, tmp_path, "plain", *exact)
    stream = trained(task, tmp_path, "stream", *exact, "loop.schedule=stream", "stream.max_staleness=0")
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
    "own": (
        "launch.engine_slots=1",
        "rollout.tp=1",
        "training.layout={tp: 1, pp: 1, ep: 1, dp: 1}",
        "sync.transport=distributed",
    ),
}
"""Placements; engines on their own slots take new weights while they generate."""


LONG = ("model.max_length=32", "rollout={max_response_tokens: 24, max_num_seqs: 4}")
"""Settings of responses that a sync interrupts."""
BUSY = ("loop={prompts_per_step: 16, samples_per_prompt: 8}", "rollout.max_num_seqs=16")
"""Settings that keep an engine busy when a sync comes: it has ten times the work of an update."""
ALL_LOGGED = ("loop={prompts_per_step: 32, samples_per_prompt: 2}", "rollout.max_num_seqs=4")
"""Settings that log every sample, because samples.jsonl has the best and the worst of each group."""
STREAM_OF_SIX = (
    "loop.schedule=stream",
    "stream.max_staleness=2",
    "loop.steps=6",
    "loop.checkpoint={every_steps: 1, keep: 9}",
    "logging.samples_per_step=1000",
    *LONG,
)


def samples_of(run_folder: Path, *, after: int) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_folder / "samples.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"] > after and line["kind"] == "train"]


def test_kept_responses_are_trained_on(task: Path, tmp_path: Path) -> None:
    """Responses continue after each sync on the kept cache, over several versions, without prefill."""
    args = ("stream={max_staleness: 2, kv_cache: keep}", "loop.schedule=stream", "loop.steps=4", *LONG, *BUSY)
    args += ("logging.samples_per_step=1000",)
    rows = trained(task, tmp_path, "run", *args, *SPLITS["own"], "loop.max_rollout_mismatch=null")[1:]
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and all(row["optim/grad_norm"] > 0 for row in rows)
    assert sum(row["stream/interrupted"] for row in rows) > 0 and not any(
        row["stream/reprefill_tokens"] for row in rows
    )
    assert all("sync/transfer_seconds" in row for row in rows)
    versions = [set(line["policy_versions"]) for line in samples_of(tmp_path / "run", after=0)]
    assert max(map(len, versions)) > 1, "no response went on after a sync"


@pytest.mark.long
@pytest.mark.parametrize("split", ["shared", pytest.param("own", marks=pytest.mark.slow)])
def test_a_killed_stream_goes_on_with_what_it_had_begun(split: str, task: Path, tmp_path: Path) -> None:
    """Responses in the last checkpoint keep their first tokens: busy engines always have some."""
    gone_on = killed_and_resumed(task, tmp_path / "runs", *SPLITS[split])
    assert gone_on, "no response that was begun was trained on"
    for begun, line in gone_on:
        assert line["response"].startswith(begun)
        assert line["policy_versions"][0] < 3 <= line["policy_versions"][1]


def killed_and_resumed(task: Path, folder: Path, *settings: str) -> list[tuple[str, dict[str, Any]]]:
    """Kill the driver in its third sync and resume; return (checkpointed text, line in samples.jsonl).

    loop.max_rollout_mismatch checks that tokens of the current version agree with the trainer's to 1e-4."""
    all_settings = (*STREAM_OF_SIX, *BUSY, *ALL_LOGGED, *settings)
    folder.mkdir()
    with Command(
        "train",
        *words(task, folder, "run", *all_settings),
        log=folder / "killed.log",
        environment={"MRL_FAULT": "sync:driver:3"},
    ) as killed:
        assert killed.wait(seconds=400) == -signal.SIGKILL, killed.output[-3000:]
        killed.assert_nothing_left()
    begun = begun_in(folder / "run/checkpoints/step-000003", task)
    rows = trained(task, folder, "run", *all_settings)
    assert "resuming at step 4" in (folder / "run.log").read_text()
    assert [row["step"] for row in rows] == list(range(7))
    assert max(row["policy/staleness_max"] for row in rows[1:]) in (1.0, 2.0), "nothing ran ahead, or too far"
    assert all(row["optim/grad_norm"] > 0 for row in rows[1:])
    assert all(row["buffer/bytes"] > 0 for row in rows[1:])
    report = audit(folder / "run")
    assert report.passes and report.attempts == 2, audit_text(report)
    later = {line["sample_id"]: line for line in samples_of(folder / "run", after=3)}
    return [(text, later[name]) for name, text in begun.items() if name in later]


@pytest.mark.slow
def test_a_stream_takes_the_routes_of_its_engines(task: Path, tmp_path: Path) -> None:
    """Tokens of the current version agree to 1e-5 without skipped near-ties, also after a resume.

    Small steps keep an older version's choices valid. The short form is in test_live_hybrid.py."""
    settings = ("loop.schedule=stream", "stream.max_staleness=2", "routing.replay=engine")
    settings += ("loop.checkpoint={every_steps: 4}", "loop.max_rollout_mismatch=1e-5", *LONG, *BUSY)
    settings += ("training.optimizer={lr: 1e-4}", *SPLITS["own"])
    rows = trained(task, tmp_path, "run", *settings, "loop.steps=4")[1:]
    rows += trained(task, tmp_path, "run", *settings, "loop.steps=6")[5:]
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert sum(row["stream/interrupted"] for row in rows) > 0, "no response has several segments"
    assert max(row["policy/staleness_max"] for row in rows) in (1.0, 2.0)
    assert all(row["routing/rows_missing"] == row["policy/rollout_logprob_near_ties"] == 0 for row in rows)
    assert all(row["routing/agreement"] > 0.9 for row in rows)
    assert all(row["optim/grad_norm"] > 0 for row in rows)


def begun_in(checkpoint: Path, task: Path) -> dict[str, str]:
    """Return sample -> text of the responses in a checkpoint."""
    from transformers import AutoTokenizer

    supply = read_extra(checkpoint)["user"]["supply"]
    no_tokens = np.zeros(1, np.int32)
    groups = [
        decode_group(data, lambda index: Prompt(index, no_tokens, "", None)) for data in supply["making"]
    ]
    samples = [s for group in groups for s in group.samples if s.status is Status.INTERRUPTED]
    samples = [sample for sample in samples if len(sample.response_tokens)]
    texts = decoder(AutoTokenizer.from_pretrained(task / "model"))([s.response_tokens for s in samples])
    return dict(zip((sample.sample_id for sample in samples), texts, strict=True))
