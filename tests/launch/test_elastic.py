"""Elastic slots on real engines: they wake on the trainer's slots, share the work and give the slots back, and every token is of the
weights that its stamp names."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import ray

from mrl.config.root import Config
from mrl.errors import WorkerLost
from mrl.launch.commands.assemble import Parts, assembled
from mrl.launch.workers.elastic_pools import ElasticPools
from mrl.loops.checkpoints import Checkpoints
from mrl.loops.elastic import ElasticSlots
from mrl.loops.recorder import Recorder
from mrl.loops.stream import StreamLoop
from mrl.observe.metrics_log import read
from mrl.observe.run_folder import RunFolder
from mrl.pool.waking import Waking
from mrl.report.audit import audit, text
from mrl.samples import Group
from mrl.training.batch import ages, pack
from mrl.training.checkpoint.folder import take_latest
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


class Deadly(Eager):
    """Tells when all engines are at work."""

    def __init__(self, all_work: Callable[[], object], **more: int) -> None:
        super().__init__(**more)
        self._all_work = all_work

    def work(self, now: float, engines: int) -> None:
        super().work(now, engines)
        if engines == self._all:
            self._all_work()


MESSAGES = ("sync.transport=distributed", "training.layout={tp: 1, pp: 1, ep: 1, dp: 2}")


@pytest.mark.parametrize(
    "words", [(), pytest.param(MESSAGES, marks=pytest.mark.slow)], ids=["memory", "messages to two"]
)
def test_engines_wake_on_the_trainers_slots_and_every_token_is_of_its_stamp(
    words: tuple[str, ...], task: Path, tmp_path: Path
) -> None:
    config, groups = config_of(task, tmp_path, *words), []
    with elastic(config, tmp_path) as (parts, loop, slots):
        slots.rule = Eager(**rule_of(config))
        loop.on_batch = groups.append
        loop.start()
        for version in loop.steps():
            shards = str(tmp_path / f"shards-{version}")
            parts.hybrid.train.on_all(lambda actor, shards=shards: actor.worker.save_weights(shards))
        assert loop.ended == "done"
        assert_a_sleeper_that_dies_is_named(parts)
    rows = rows_of(config)
    assert sum(row["stream/elastic_wakes"] for row in rows) > 1
    assert sum(row["stream/elastic_moved"] for row in rows) > AT_ONCE
    found = audit(tmp_path / config.run.name)
    assert found.holds, text(found)
    trained = [group for step in groups for group in step]
    indices = [group.prompt.index for group in trained]
    assert indices == list(range(STEPS * 12)), "each prompt once, in order"
    assert_each_age_is_bounded(groups)
    assert_rates_are_of_all_slots(groups, rows, config)
    assert_who_answered(trained)
    assert_log_probs_are_of_the_stamps(trained, tmp_path, source=Path(config.model.path))


def test_an_engine_killed_while_awake_ends_the_run_and_no_prompt_is_lost(task: Path, tmp_path: Path) -> None:
    """In step 4, with a checkpoint of step 2; the resumed run wakes engines too, and has more steps to: in three it may need them once."""
    config, last = config_of(task, tmp_path), STEPS + 3
    with elastic(config, tmp_path) as (parts, loop, slots):
        pid = pid_of_sleeper(parts)
        kill = functools.partial(os.kill, pid, signal.SIGKILL)
        slots.rule = Deadly(lambda: loop.next_step == 4 and kill(), **rule_of(config))
        loop.start()
        with pytest.raises(WorkerLost, match="engine 1 died in phase generate"):
            list(loop.steps())
        assert loop.next_step == 4
    with elastic(config_of(task, tmp_path, f"loop.steps={last}"), tmp_path) as (_, loop, slots):
        slots.rule = Eager(**rule_of(config))
        assert loop.next_step == 3
        loop.start()
        list(loop.steps())
        assert loop.ended == "done"
    rows = rows_of(config)
    assert [row["step"] for row in rows] == list(range(1, last + 1))
    assert sum(row["stream/elastic_wakes"] for row in rows if row["step"] > 2) > 1
    found = audit(tmp_path / config.run.name)
    assert found.holds and found.attempts == 2, text(found)


def config_of(task: Path, folder: Path, *words: str) -> Config:
    return tiny_config(task / "model", task, *ELASTIC, f"run.folder={folder}", *words)


def rule_of(config: Config) -> dict[str, int]:
    return {"own": 1, "sleepers": len(config.sleepers), "at_once": AT_ONCE}


def rows_of(config: Config) -> list[dict[str, float]]:
    return [row for row in read(RunFolder(config.run_folder).metrics) if row["step"] > 0]


@contextlib.contextmanager
def elastic(config: Config, folder: Path) -> Iterator[tuple[Parts, StreamLoop, ElasticSlots]]:
    """A run's parts, its loop and its elastic slots, before its start; where there is a checkpoint, as it goes on from that."""
    own = RunFolder(config.run_folder)
    with contextlib.closing(own), assembled(config, log_folder=folder / "logs") as parts:
        _, state = take_latest(own.checkpoints, parts.hybrid.train.load_checkpoint)
        recorder = Recorder(config, own, parts.clock, first_step=int(state["next_step"]) if state else 0)
        with contextlib.closing(recorder):
            loop = parts.loop(recorder, Checkpoints(config, own))
            assert isinstance(loop, StreamLoop) and loop.elastic is not None
            if state:
                loop.restore(state)
            yield parts, loop, loop.elastic


def assert_rates_are_of_all_slots(
    groups: Sequence[Sequence[Group]], rows: Sequence[dict[str, float]], config: Config
) -> None:
    """Those of engines that have their own among them."""
    for step, row in zip(groups, rows, strict=True):
        samples = [sample for group in step for sample in group.samples]
        tokens = sum(len(sample.prompt_tokens) + len(sample.response_tokens) for sample in samples)
        rate = row["perf/tokens_per_second_per_device"]
        assert rate * row["time/step_seconds"] * config.num_slots == pytest.approx(tokens)


def pid_of_sleeper(parts: Parts) -> int:
    assert isinstance(parts.hybrid, ElasticPools)
    actor = parts.hybrid.rollout.actors[1]
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60))  # type: ignore[arg-type] one answer


def assert_a_sleeper_that_dies_is_named(parts: Parts) -> None:
    """In a phase that asks nothing of it."""
    os.kill(pid_of_sleeper(parts), signal.SIGKILL)
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
