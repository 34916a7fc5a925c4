"""Elastic slots on real engines: they wake on the trainer's slots, share the work and give the slots back, and every token is of the
weights that its stamp names."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import ray

from mrl.errors import WorkerLost
from mrl.launch.commands.assemble import Parts, assembled
from mrl.launch.workers.elastic_pools import ElasticPools
from mrl.loops.checkpoints import Checkpoints
from mrl.loops.recorder import Recorder
from mrl.loops.stream import StreamLoop
from mrl.observe.metrics_log import read
from mrl.observe.run_folder import RunFolder
from mrl.pool.waking import Waking
from mrl.report.audit import audit, text
from mrl.samples import Group
from mrl.training.batch import ages, pack
from mrl.training.hf import export
from tests.launch.hybrid_runs import tiny_config
from tests.tiny_models import reference_logprobs

pytestmark = [pytest.mark.integration, pytest.mark.timeout(500)]

STEPS, MAX_AGE, AT_ONCE = 5, 2, 4
ELASTIC = (
    "training.layout={tp: 1, pp: 1, ep: 1, dp: 1}",
    "training.offload=always",
    "launch.engine_slots=1",
    "loop.schedule=stream",
    f"stream={{max_age: {MAX_AGE}, elastic_slots: true}}",
    f"rollout={{max_num_seqs: {AT_ONCE}, max_response_tokens: 24}}",
    "data.max_prompt_tokens=8",
    f"loop={{steps: {STEPS}, prompts_per_step: 12, samples_per_prompt: 8}}",
    "loop.validation={every_steps: 2, num_prompts: 4}",
    "loop.checkpoint={every_steps: 2}",
    f"reward={{kind: plugin, style: verl, path: {Path(__file__).parent}/rewards.py:even_digits}}",
)


class Eager(Waking):
    """Wakes where a step waits and requests wait for an engine, whatever the machine's speed."""

    def pays(self, now: float, unfinished: int) -> bool:
        return unfinished > AT_ONCE


MESSAGES = ("sync.transport=distributed", "training.layout={tp: 1, pp: 1, ep: 1, dp: 2}")


@pytest.mark.parametrize(
    "words", [(), pytest.param(MESSAGES, marks=pytest.mark.slow)], ids=["memory", "messages to two"]
)
def test_engines_wake_on_the_trainers_slots_and_every_token_is_of_its_stamp(
    words: tuple[str, ...], task: Path, tmp_path: Path
) -> None:
    config = tiny_config(task / "model", task, *ELASTIC, f"run.folder={tmp_path}", *words)
    folder, groups = RunFolder(config.run_folder), []
    with assembled(config, log_folder=tmp_path / "logs") as parts:
        recorder = Recorder(config, folder, parts.clock, first_step=0)
        loop = parts.loop(recorder, Checkpoints(config, folder))
        assert isinstance(loop, StreamLoop) and loop.elastic is not None
        loop.elastic.rule = Eager(own=1, sleepers=len(config.sleepers), at_once=AT_ONCE)
        loop.on_batch = groups.append
        loop.start()
        for version in loop.steps():
            shards = str(tmp_path / f"shards-{version}")
            parts.hybrid.train.on_all(lambda actor, shards=shards: actor.worker.save_weights(shards))
        assert loop.ended == "done"
        recorder.close()
        assert_a_sleeper_that_dies_is_named(parts)
    folder.close()
    rows = [row for row in read(folder.metrics) if row["step"] > 0]
    assert sum(row["stream/elastic_wakes"] for row in rows) > 1
    assert sum(row["stream/elastic_moved"] for row in rows) > AT_ONCE
    found = audit(tmp_path / config.run.name)
    assert found.holds, text(found)
    trained = [group for step in groups for group in step]
    indices = [group.prompt.index for group in trained]
    assert indices == list(range(STEPS * 12)), "each prompt once, in order"
    assert_each_age_is_bounded(groups)
    assert_who_answered(trained)
    assert_log_probs_are_of_the_stamps(trained, tmp_path, source=Path(config.model.path))


def assert_a_sleeper_that_dies_is_named(parts: Parts) -> None:
    """In a phase that asks nothing of it."""
    assert isinstance(parts.hybrid, ElasticPools)
    pid = ray.get(parts.hybrid.rollout.actors[1].__ray_call__.remote(lambda _: os.getpid()), timeout=60)
    os.kill(int(pid), signal.SIGKILL)  # type: ignore[arg-type] one actor, one answer
    with pytest.raises(WorkerLost, match="engine 1 died in phase"):
        idle_phases(parts, seconds=10)


def idle_phases(parts: Parts, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with parts.clock.phase("update"):
            time.sleep(0.1)


def assert_each_age_is_bounded(steps: Sequence[Sequence[Group]]) -> None:
    oldest = 0
    for version, groups in enumerate(steps):
        for sample in (sample for group in groups for sample in group.samples):
            found = version - sample.policy_versions
            assert found.min() >= 0 and found.max() <= MAX_AGE
            oldest = max(oldest, int(found.max()))
    assert oldest > 0, "nothing was generated ahead"


def assert_who_answered(groups: Sequence[Group]) -> None:
    """All engines, and one went on with what another had begun."""
    segments = [sample.segments for group in groups for sample in group.samples]
    engines = [{segment.engine for segment in each} for each in segments]
    assert any(0 not in found for found in engines), (
        "no engine on the trainer's slots answered anything alone"
    )
    assert any(len(found) > 1 for found in engines), "no response moved"


def assert_log_probs_are_of_the_stamps(groups: Sequence[Group], folder: Path, *, source: Path) -> None:
    """Each token's log-prob is that of the saved weights its stamp names, and not of those before."""
    batch, right, shifted = pack(groups), [], []
    sampled, number = batch.arrays["rollout_logprobs"], 0
    for version in range(STEPS):
        export.export_checkpoint(
            folder / f"shards-{version}", folder / f"export-{version}", source=source, dtype="float32"
        )
        known, _ = reference_logprobs(folder / f"export-{version}", batch)
        differences = np.abs(known - sampled)
        right.append(differences[batch.loss_mask & (ages(groups, version=version) == 0)])
        shifted.append(differences[batch.loss_mask & (ages(groups, version=version + 1) == 0)])
        number += len(right[-1])
    assert number == batch.loss_mask.sum() and sum(map(bool, map(len, right))) > 2
    known, other = np.concatenate(right), np.concatenate(shifted)
    assert np.quantile(known, 0.99) < 1e-4, "beyond what a router's near-ties explain"
    assert other.mean() > 10 * known.mean()
