"""Runs with rollout workers: equal metrics, two nodes, episodes, and workers that are killed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.observe.metrics_log import read, without_volatile
from tests.launch import acting_runs
from tests.launch.command import run
from tests.launch.killed_runs import LASTS, Chain
from tests.launch.tiny_runs import words
from tests.support.pretended_nodes import VARIABLE

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

WORKERS = ("rollout.workers=node",)
TWO_NODES = {VARIABLE: "0,1"}


def trained(task: Path, folder: Path, name: str, *settings: str, **options: Any) -> list[dict[str, Any]]:
    run("train", *words(task, folder, name, *settings), log=folder / f"{name}.log", seconds=500, **options)
    return [without_volatile(row) for row in read(folder / name / "metrics.jsonl")]


def test_two_nodes_have_the_drivers_own_figures(task: Path, tmp_path: Path) -> None:
    """A prompt's engine, order and seeds do not depend on the submitter, so all rows are equal."""
    settings = ("loop.deterministic=true", "loop.steps=3", "logging.samples_per_step=1000")
    plain = trained(task, tmp_path, "plain", *settings)
    workers = trained(task, tmp_path, "workers", *settings, *WORKERS, environment=TWO_NODES)
    assert len(plain) == 4 and workers == plain
    texts = [(tmp_path / name / "samples.jsonl").read_text() for name in ("plain", "workers")]
    assert texts[0] == texts[1]
    logs = tmp_path / "workers/logs/latest"
    worker_logs = [(logs / f"rollouts-{node}.log").read_text() for node in (0, 1)]
    assert all("verdicts by kind: {'scored':" in text for text in worker_logs), "a worker had nothing to do"


@pytest.fixture
def chain(task: Path, tmp_path: Path) -> Iterator[Chain]:
    made = Chain(functools.partial(words, task), tmp_path, *LASTS, *WORKERS)
    yield made
    made.remove()


STREAM = ("loop.schedule=stream", "stream.max_staleness=1", "loop.steps=6", "training.layout={ep: 1, dp: 1}")
STREAM += ("launch.engine_slots=2",)


def test_a_stream_survives_the_loss_of_a_worker(chain: Chain) -> None:
    """Each prompt is trained once (`Chain.finish` audits)."""
    output = chain.finish(*STREAM, fault="generate:rollouts-1:3", nodes="0,0,1")
    assert "rollout worker of node 1 died in phase generate: " in output, output
    rows = read(chain.run_folder / "metrics.jsonl")
    assert [row["step"] for row in rows if row["step"]] == list(range(1, 7))
    assert rows[-1]["rollout/workers_lost"] == 1
    measured = [row[name] for row in rows if (name := "policy/rollout_logprob_diff_max") in row]
    assert measured and max(measured) < 1e-4


def test_a_policy_survives_the_loss_of_its_only_worker_and_not_that_of_an_engine(chain: Chain) -> None:
    """The engines share the trainer's slots; their unfinished responses are lost."""
    chain.ended("generate:rollouts-0:2,generate:engine-0:3")
    output = (chain.folder / "start-1.log").read_text()
    assert "rollout worker of node 0 died in phase generate: " in output, output
    row = read(chain.run_folder / "metrics.jsonl")[-1]
    assert row["step"] == 2 and (row["rollout/workers_lost"], row["rollout/started_over"]) == (1, 16)


def test_episodes_in_workers(acting: Path, tmp_path: Path) -> None:
    settings = (*WORKERS, "agent.max_environments=4", "loop.steps=2", "training.layout={ep: 1, dp: 2}")
    run(
        "train",
        *acting_runs.words(acting, tmp_path, "run", *settings),
        log=tmp_path / "run.log",
        seconds=500,
        environment=TWO_NODES,
    )
    rows = read(tmp_path / "run/metrics.jsonl")
    assert len(rows) == 3
    for row in rows[1:]:
        assert row["agent/episodes"] == 16 and row["agent/turns"] > 1.2 and row["reward/mean"] > 0
        assert row["agent/retries"] == row["agent/restarted"] == row["reward/no_reward_frac"] == 0
