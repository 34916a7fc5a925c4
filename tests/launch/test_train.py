"""`mrl train` as users run it: repeated, resumed, interrupted; real engines in separate processes."""

from __future__ import annotations

import gzip
import json
import os
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest

from mrl.config.load import load
from mrl.observe.metric_names import undescribed
from mrl.observe.metrics_log import read, without_volatile
from tests.launch import serve
from tests.launch.command import Command, run
from tests.launch.tiny_runs import words
from tests.support.listeners import is_private, listeners
from tests.support.once import once
from tests.tiny_models import batch_of_tokens, reference_logprobs

pytestmark = [pytest.mark.integration, pytest.mark.long]


EXACT = ("loop.deterministic=true", "loop.checkpoint={every_steps: 2}")


@pytest.fixture(scope="session")
def whole(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the session's four-step run, made without fork servers, as users run it."""
    settings = ("loop.steps=4", "export={every_steps: 2, keep: 1}", "launch.profile={steps: [2]}")

    def make(folder: Path) -> None:
        run("train", *words(task, folder, "whole", *EXACT, *settings), log=folder / "log", alone=True)

    return once(tmp_path_factory, "whole", make) / "whole"


FULL_AT_BYTES = 3000
"""Size limit of one rank's files, so that each of its tensor files fails to be written."""
OURS = ("CPU run: ", "data: ", "starting ", "all workers up", "step ", "waiting for ")


def test_every_line_on_the_screen_of_a_run_is_ours(whole: Path) -> None:
    """Megatron, Ray, torch and vLLM write to the logs only."""
    screen = (whole.parent / "log").read_text().splitlines()
    assert screen.pop() == f"{whole}: done after step 4"
    assert [line for line in screen if not line.startswith(OURS)] == []
    assert screen[0].startswith("data: rows") and any(line.startswith("step 4/4") for line in screen), screen
    assert any(line.startswith("CPU run: training in float32, engines in float32, eager ") for line in screen)
    assert any(log.stat().st_size for log in (whole / "logs" / "latest").iterdir())


def test_the_configuration_of_a_run_has_values_in_place_of_auto(whole: Path) -> None:
    config = load([whole / "config.yaml"])
    assert (config.training.dtype, config.rollout.dtype, config.rollout.enforce_eager) == (
        *["float32"] * 2,
        True,
    )
    assert config.rollout.kv_cache_bytes == 64 << 20


def rows(folder: Path) -> list[dict[str, object]]:
    return [without_volatile(row) for row in read(folder / "metrics.jsonl")]


def moved_otherwise(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{name: value for name, value in row.items() if not name.startswith("sync/")} for row in rows]


def test_a_stream_without_age_is_the_run_to_the_last_bit_and_so_is_a_resumed_one(
    whole: Path, task: Path, tmp_path: Path
) -> None:
    """Neither off-load nor the engines' slots change results. One run resumes the other's step 2."""
    rests = "training.optimizer.offload_fraction="
    stream = ("training.offload=always", f"{rests}0.5", "loop.schedule=stream", "stream.max_staleness=0")
    shutil.copytree(whole, tmp_path / "resumed", symlinks=True)
    shutil.rmtree(tmp_path / "resumed/checkpoints/step-000004")
    for name, where in (("stream", stream), ("resumed", ("launch.engine_slots=2", f"{rests}1"))):
        settings = (*EXACT, "loop.steps=4", *where)
        run("train", *words(task, tmp_path, name, *settings), log=tmp_path / f"{name}.log")
    assert [r["step"] for r in rows(whole)] == [0, 1, 2, 3, 4]
    trained = rows(whole)[1:]
    assert all(r["optim/grad_norm"] > 0 and r["reward/max"] > r["reward/min"] for r in trained), (
        "nothing was trained"
    )
    for ours, theirs in zip(rows(tmp_path / "stream"), rows(whole), strict=True):
        assert theirs.keys() - ours.keys() <= {"group/rounds"}, "a stream has no rounds"
        assert {name: ours[name] for name in ours.keys() & theirs.keys()} == {
            name: value for name, value in theirs.items() if name != "group/rounds"
        }
    assert moved_otherwise(rows(tmp_path / "resumed")) == moved_otherwise(rows(whole))
    assert "resuming at step 3" in (tmp_path / "resumed.log").read_text()
    samples = (whole / "samples.jsonl").read_text()
    for name in ("stream", "resumed"):
        assert samples and (tmp_path / name / "samples.jsonl").read_text() == samples


def test_some_samples_tell_their_tokens_one_by_one(whole: Path) -> None:
    lines = [json.loads(line) for line in (whole / "samples.jsonl").read_text().splitlines()]
    detailed = [line for line in lines if "tokens" in line]
    assert [line["step"] for line in detailed] == [step for step in (1, 2, 3, 4) for _ in range(4)]
    for line in detailed:
        tokens = line["tokens"]
        assert len(tokens["text"]) == line["response_tokens"]
        assert tokens["age"] == 0
        assert np.allclose(tokens["ratio"], 1, atol=1e-3), "engine and trainer at one version"
        assert np.all(np.array(tokens["logprob"]) <= 0) and "advantage" in tokens


def test_a_row_tells_tokens_operations_and_load(whole: Path) -> None:
    trained = read(whole / "metrics.jsonl")[1:]
    for row in trained:
        for quantity in ("tokens", "step_flops", "update_flops"):
            assert row[f"perf/{quantity}_per_second_per_device"] > 0
        assert 1 <= row["moe/load_max_over_mean"] <= row["moe/load_max_over_mean_max"]
        assert not any(name.endswith("_mfu") for name in row), "no peak of a CPU is known"
    layers = read(whole / "expert_load.jsonl")
    assert undescribed({name for row in (*trained, *layers) for name in row}) == []
    assert [row["step"] for row in layers] == [row["step"] for row in trained]


def test_a_row_tells_memory_and_a_profiled_step_has_its_phases(whole: Path) -> None:
    last = read(whole / "metrics.jsonl")[-1]
    for process in ("trainer", "engine"):
        for phase in ("generate", "update", "save", "sync"):
            assert last[f"mem/host_used/{process}/{phase}"] > 1 << 20
            assert last[f"mem/host_free/{process}/{phase}"] > 0
    (file,) = (whole / "profile").iterdir()
    assert file.name == "step-2-rank-0.json.gz"
    spans = {event["name"] for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert {"mrl/generate", "mrl/update", "mrl/sync"} <= spans
    assert any(name.startswith("aten::") for name in spans)


def test_a_checkpoint_is_exported_served_and_evaluated(whole: Path, task: Path, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    run("export", str(whole), "--out", str(folder), log=tmp_path / "export.log")
    (beside,) = (whole / "exports").iterdir()  # what the run made itself while it trained
    assert beside.name == "step-000004" and "val/reward" in (beside / "README.md").read_text()
    for file in folder.iterdir():
        assert file.read_bytes() == (beside / file.name).read_bytes(), file.name
    served = serve.start(folder, [[3, 4, 5], [6], [7, 8, 9, 10, 11]], log=tmp_path / "serve.log")
    reference, _ = reference_logprobs(folder, batch_of_tokens([tokens for tokens, _ in served]))
    logprobs = np.concatenate([[0.0, *result] for _, result in served])  # as there, 0 for a first token
    assert np.abs(reference - logprobs).max() < 1e-4
    args = (f"model.path={folder}", "loop.validation={num_prompts: 8, num_samples: 2}", "data.train=/nowhere")
    out = tmp_path / "evaluated"
    result = run("eval", *words(task, tmp_path, "eval", *args), "--out", str(out), log=tmp_path / "eval.log")
    greedy = [row["val/reward"] for row in rows(whole) if row["step"] == 4]
    assert f"val/reward {greedy[0]:.4f}" in result, result[-2000:]
    assert "val/avg@2" in result and "val/pass@2" in result
    assert all(line.startswith(("data: ", "eval: ", "val/")) for line in result.splitlines()), result
    summary = json.loads((out / "summary.json").read_text())
    # every sample, in the run's own form, gives the summary's metrics again
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert all(sample["score"] == sample["reward"] for sample in samples)
    kinds = [[s["score"] for s in samples if s["kind"] == kind] for kind in ("validation", "sampled")]
    assert [len(rewards) for rewards in kinds] == [8, 16] and len(samples) == 24
    metrics = summary["metrics"]
    assert metrics["val/reward"] == greedy[0] == pytest.approx(np.mean(kinds[0]))
    assert metrics["val/avg@2"] == pytest.approx(np.mean(kinds[1]))
    assert summary["settings"]["loop"]["validation"]["num_samples"] == 2
    assert len(summary["model"]["sha256"]) == 64


def test_sigterm_to_the_process_group_saves_and_leaves_nothing(task: Path, tmp_path: Path) -> None:
    """SIGTERM to the group, as by Slurm, saves; a rank that cannot write a checkpoint does not stop training.

    Meanwhile listeners are private to this user and machine, or check their peer, as the weight sync's do."""
    settings = ("loop.steps=1000", "loop.validation.every_steps=0", "training.offload=always")
    settings += ("loop.checkpoint={every_steps: 1, max_failed: 1000}",)
    saved = tmp_path / "run/checkpoints"
    with Command(
        "train", *words(task, tmp_path, "run", *settings), log=tmp_path / "log", under=["setsid"]
    ) as command:
        command.wait_for("step 1/1000", seconds=400)
        rank = command.worker(tmp_path / "run/logs/latest/train-1.log")
        rank.rlimit(psutil.RLIMIT_FSIZE, (FULL_AT_BYTES, resource.RLIM_INFINITY))
        command.wait_for("FAILED, training goes on: ", seconds=400)
        last_good = max(path.name for path in saved.iterdir() if not path.name.endswith(".partial"))
        family = command.family()
        parents = [process.parent() for process in family if "Actor" in " ".join(process.cmdline())]
        assert len(parents) == 4
        assert all(parent and "tests.forks.server" in parent.cmdline() for parent in parents)
        heard = listeners([psutil.Process(command.process.pid), *family])
        reached = [where for where in heard if not where.startswith("unix @mrl-") and not is_private(where)]
        assert len(heard) > 10 and not reached, heard
        command.wait_for(f"step {int(last_good[5:]) + 3}/1000", seconds=400)
        assert [path.name for path in saved.iterdir() if path.name > last_good + "."] == []
        assert (saved / last_good).is_dir()
        rank.rlimit(psutil.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        os.killpg(command.process.pid, signal.SIGTERM)
        assert command.wait(seconds=400) == 128 + signal.SIGTERM, command.output[-2000:]
        command.assert_nothing_left()
    message = next(line for line in command.output.splitlines() if "FAILED" in line)
    assert "rank 1" in message and "File too large" in message, message
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["ended"] == "SIGTERM"
    assert max(path.name for path in saved.iterdir()) == f"step-{summary['steps']:06d}"
