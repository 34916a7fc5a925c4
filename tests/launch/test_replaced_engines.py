"""Engines that die during a stream: their requests move, a replacement starts, the run ends well."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.observe.metrics_log import read
from tests.launch import acting_runs
from tests.launch.killed_runs import LASTS, Chain
from tests.launch.tiny_runs import words

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

OWN = ("loop.schedule=stream", "stream.max_staleness=1", "rollout={tp: 1, max_replacements: 3}")
OWN += ("training.layout={tp: 1, pp: 1, ep: 1, dp: 1}",)
ONE, TWO = "launch.engine_slots=1", "launch.engine_slots=2"


@pytest.fixture
def chain(task: Path, tmp_path: Path) -> Iterator[Chain]:
    made = Chain(functools.partial(words, task), tmp_path, *OWN, *LASTS)
    yield made
    made.remove()


def finished(chain: Chain, steps: int, fault: str, *settings: str) -> tuple[str, list[dict[str, Any]]]:
    """Return output and rows of a start that ends well despite the faults, with a clean audit."""
    output = chain.finish(f"loop.steps={steps}", *settings, fault=fault)
    rows = read(chain.run_folder / "metrics.jsonl")
    assert [row["step"] for row in rows if row["step"]] == list(range(1, steps + 1))
    measured = [row[name] for row in rows if (name := "policy/rollout_logprob_diff_max") in row]
    assert measured and max(measured) < 1e-4
    return output, rows


def test_a_run_waits_for_the_one_in_the_place_of_its_only_engine(chain: Chain) -> None:
    output, rows = finished(chain, 5, "generate:engine-0:3", ONE)
    assert "engine 0 died in phase generate" in output
    assert re.search(r"engine 0 serves again, at version [23]\n", output), (
        "as the third step's groups were there or not"
    )
    assert [row.get("rollout/engines_lost") for row in rows] == [None, None, 1, 1, 1]
    assert rows[-1]["rollout/engines"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "lost"),
    [("sync:engine-1:3,pause:engine-0:12", 2), ("generate:engine-0:3,update:engine-0:4,sync:engine-0:6", 3)],
    ids=["in a weight sync and in a pause", "while it joins"],
)
def test_two_engines_of_which_some_die(chain: Chain, fault: str, lost: int) -> None:
    _, rows = finished(chain, 40, fault, TWO)
    assert rows[-1]["rollout/engines_lost"] == lost


@pytest.mark.slow
@pytest.mark.parametrize("at", ["transfer:engine-1:3", "pause:engine-1:3", "sync:engine-1:3"])
def test_an_engine_dies_while_or_after_it_takes_new_weights(at: str, chain: Chain) -> None:
    """The other one gets them directly, and both take later ones while they generate."""
    _, rows = finished(chain, 12, at, TWO, "sync.transport=distributed")
    assert rows[-1]["rollout/engines_lost"] == 1
    switched = ["sync/steps_meanwhile" in row for row in rows[1:]]
    assert not all(switched), "no sync sent the weights anew"
    assert switched.count(True) >= 8


@pytest.mark.slow
def test_the_only_engine_dies_in_a_weight_sync_and_in_a_validation(chain: Chain) -> None:
    section = "loop.validation={every_steps: 2, num_prompts: 8, before_training: true}"
    output, rows = finished(chain, 6, "sync:engine-0:2,generate:engine-0:1", ONE, section)
    assert rows[-1]["rollout/engines_lost"] == 2 and "engine 0 died in phase sync" in output


@pytest.mark.slow
def test_a_worker_of_an_engine_of_two_ends_the_whole_engine(chain: Chain) -> None:
    output, rows = finished(chain, 5, "generate:vllm-0:3", TWO, "rollout={tp: 2, max_replacements: 2}")
    assert "lost its process VllmWorker" in output
    assert rows[-1]["rollout/engines_lost"] == 1


@pytest.mark.slow
def test_a_stopped_engine_is_lost_at_its_deadline(chain: Chain) -> None:
    settings = (ONE, "rollout={tp: 1, max_replacements: 1, step_deadline_seconds: 20}")
    output, rows = finished(chain, 3, "generate:engine-0:1:stop@0.01", *settings)
    assert "engine 0 made no step within rollout.step_deadline_seconds = 20 s in phase" in output
    assert rows[-1]["rollout/engines_lost"] == 1


@pytest.mark.slow
def test_the_loss_after_the_last_that_is_replaced_ends_the_run(chain: Chain) -> None:
    settings = ("loop.steps=1000", ONE, "rollout={tp: 1, max_replacements: 1}")
    with chain.start(*settings, fault="generate:engine-0:3,update:engine-0:5") as command:
        assert command.wait(seconds=600) == 1
        assert "rollout.max_replacements = 1 engines were replaced before" in command.output
        chain.assert_nothing_left(command)


@pytest.mark.slow
def test_episodes_go_on_elsewhere(acting: Path, tmp_path: Path) -> None:
    chain = Chain(functools.partial(acting_runs.words, acting), tmp_path, *OWN, *LASTS)
    try:
        _, rows = finished(chain, 8, "generate:engine-0:3", TWO)
        assert rows[-1]["rollout/engines_lost"] == 1
    finally:
        chain.remove()
