"""Which rollout worker has which engines, and its share of open environments."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mrl.config.load import load
from mrl.errors import ConfigError
from mrl.launch.workers.rollout_group import RolloutGroup
from mrl.launch.workers.rollout_workers import WorkerPlace, worker_places
from mrl.rollout.engine_process import schedulers

WORDS = ["run.name=r", "model.path=/m/Qwen3-30B-A3B", "data.train=/rows", "reward.kind=maths"]
WORDS += ["rollout.workers=node", "model.max_length=8192"]
ACTS = "agent={environment: tests.support.guess:Guess, max_environments: %d}"


def places(nodes: Sequence[int], *words: str) -> list[WorkerPlace]:
    config = load([], [*WORDS, *words])
    assert config.num_slots == len(nodes)
    parts = schedulers(config, nodes)
    group: Any = SimpleNamespace(
        parts=parts,
        placement=SimpleNamespace(nodes=nodes),
        numbers=lambda: range(len(parts)),
        name=lambda number: parts[number].name,
    )
    return worker_places(config, cast(RolloutGroup, group), by_index=True)


LAYOUTS: dict[str, tuple[Sequence[int], tuple[str, ...], list[tuple[int, int, tuple[int, ...]]]]] = {
    "one node": ([0, 0], ("training.layout={ep: 1, dp: 2}",), [(0, 0, (0, 1))]),
    "two nodes": ([3, 3, 5, 5], ("training.layout={ep: 1, dp: 4}",), [(3, 0, (0, 1)), (5, 2, (2, 3))]),
    "own slots, trainer elsewhere": (
        [0, 1, 2, 2],
        ("training.layout={ep: 1, dp: 1}", "launch.engine_slots=3", "loop.schedule=stream"),
        [(1, 1, (0,)), (2, 2, (1, 2))],
    ),
    "an engine over nodes": (
        [0, 0, 1, 1],
        ("training.layout={ep: 1, dp: 4}", "rollout.tp=4"),
        [(0, 0, (0,))],
    ),
    "dp ranks over nodes": (
        [0, 0, 1, 1],
        ("training.layout={ep: 1, dp: 4}", "rollout={dp: 4, expert_parallel: true}"),
        [(0, 0, (0, 1, 2, 3))],
    ),
}
"""Nodes of the slots, words, and (node, slot, engines) of each worker."""


@pytest.mark.parametrize(("nodes", "words", "expected"), LAYOUTS.values(), ids=LAYOUTS)
def test_each_engine_has_the_worker_of_the_node_that_it_begins_on(
    nodes: Sequence[int], words: tuple[str, ...], expected: list[tuple[int, int, tuple[int, ...]]]
) -> None:
    made = places(nodes, *words)
    assert [(place.node, place.slot, place.engines) for place in made] == expected
    assert all(len(place.names) == sum(len(other.engines) for other in made) for place in made)


def test_open_environments_are_shared_out() -> None:
    three = ([0, 1, 2], "training.layout={ep: 1, dp: 3}", "loop.prompts_per_step=3")
    shares = [place.max_environments for place in places(*three, ACTS % 8)]
    assert sorted(shares, key=str) == [2, 3, 3]
    with pytest.raises(
        ConfigError,
        match=r"agent.max_environments = 2 with rollout.workers = node: .*; "
        "set agent.max_environments to 3 or more",
    ):
        places(*three, ACTS % 2)
