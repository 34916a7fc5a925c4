"""Every engine sees exactly the GPUs of its slots, in any order of Ray's bundles, on one and two nodes.

Ray's GPUs are pretended (`ray start --num-gpus`); the groups and their actors are real.
"""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mrl.config.load import load
from mrl.errors import WeightSyncError
from mrl.launch.cluster.ray_node import head_address, own_address
from mrl.launch.workers.placement import Placement, Slot, order_slots
from mrl.launch.workers.rollout_actor import EngineRank
from mrl.launch.workers.train_actor import TrainActor
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.topology import Topology
from mrl.training.worker import MegatronWorker
from tests.launch.placed_groups import SLOTS, WORDS
from tests.launch.two_nodes import free_port_base, started
from tests.support.runs import run_python, until

TOKEN = "0123456789abcdef" * 4


@pytest.mark.parametrize("seed", range(5))
def test_slots_count_node_by_node_and_gpu_by_gpu_whatever_bundles_ray_gave(seed: int) -> None:
    where = [(node, gpu) for node in range(2) for gpu in range(12)]
    random.Random(seed).shuffle(where)
    slots = order_slots({n: node for n, (node, _) in enumerate(where)}, [str(gpu) for _, gpu in where])
    assert [(slot.node, int(slot.gpu)) for slot in slots] == sorted(where)
    assert [where[slot.bundle] for slot in slots] == sorted(where)


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        ((), (0, 0, 1, 1)),
        (("sync.transport=nixl",), (0, 0, 1, 1) * 2),
        (("training.layout.dp=1", "training.layout.ep=1", "launch.engine_slots=2"), (0, 0, 1, 1)),
    ],
)
def test_the_plan_is_told_the_slots_own_nodes(words: tuple[str, ...], nodes: tuple[int, ...]) -> None:
    """A slot mistaken for a neighbour would get data that belongs on the node's own links."""
    config = load([], [*WORDS, *words])
    placement = Placement(None, tuple(Slot(number, number // 2) for number in range(4)))
    assert placement.topology(config).nodes == nodes


def test_a_trainer_rank_whose_engine_rank_is_on_another_gpu_is_refused_before_anything_is_mapped() -> None:
    actor = object.__new__(TrainActor)  # its constructor takes the process's output
    actor._config, actor._rank = load([], WORDS), 1
    actor.worker = cast(MegatronWorker, SimpleNamespace(device=torch.device("cpu")))
    engines = [EngineRank("", device, RankManifest.of(r, [])) for r, device in enumerate(("cpu", "GPU-1f"))]
    with pytest.raises(WeightSyncError, match=r"trainer rank 1 is on cpu, the engine rank .* on GPU-1f"):
        actor.connect(engines, Topology.shared_slots([0, 0]))


def look(tmp_path: Path, *, nodes: int, strategy: str, seed: int = 0) -> dict[str, Any]:
    """Return the report of tests.launch.placed_groups on `nodes` nodes with SLOTS GPUs together."""
    base = str(free_port_base())
    head, gpus = head_address(own_address(), int(base)), str(SLOTS // nodes)
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    words = ["-m", "mrl.launch.cluster.ray_node", "--head", head, "--port-base", base]
    words += ["--slots", gpus, "--gpus", gpus, "--number"]
    with contextlib.ExitStack() as stack:
        for number in map(str, range(nodes)):
            log = tmp_path / f"{number}.log"
            stack.enter_context(started([*words, number], log=log, environment=environment))
            until(lambda log=log: "is up on" in log.read_text())
        program = ["-m", "tests.launch.placed_groups", head, str(nodes), strategy, str(seed)]
        done = run_python(*program, environment=environment, seconds=300)
        assert done.returncode == 0, done.stderr[-3000:] + "".join(
            log.read_text() for log in tmp_path.glob("*.log")
        )
        return json.loads(done.stdout.splitlines()[-1])


def check(report: dict[str, Any]) -> None:
    """Check that a trainer rank sees its slot's GPU, and an engine its two slots' on their node."""
    gpus = [gpu for _, gpu in report["slots"]]
    assert [trainer["CUDA_VISIBLE_DEVICES"] for trainer in report["trainers"]] == gpus
    pairs = list(zip(gpus[::2], gpus[1::2], strict=True))
    assert [engine["CUDA_VISIBLE_DEVICES"] for engine in report["engines"]] == [",".join(p) for p in pairs]
    assert report["nodes"] == [node for node, _ in report["slots"]], "what the plan's topology is made of"
    nodes = [trainer["node"] for trainer in report["trainers"]]
    assert [engine["node"] for engine in report["engines"]] == nodes[::2]
    assert report["pool"] == report["engines"][SLOTS // 4 :], (
        "a pool has the slots after the trainer's, and their GPUs"
    )


@pytest.mark.integration
@pytest.mark.parametrize("seed", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_every_engine_sees_its_slots_gpus_on_one_node(tmp_path: Path, seed: int) -> None:
    report = look(tmp_path, nodes=1, strategy="PACK", seed=seed)
    check(report)
    assert (report["slots"] == [[0, str(gpu)] for gpu in range(SLOTS)]) == (seed == 0)
    assert {t["CUDA_DEVICE_MAX_CONNECTIONS"] for t in report["trainers"]} == {"1"}
    assert {e["CUDA_DEVICE_MAX_CONNECTIONS"] for e in report["engines"]} == {None}
    assert report["pickled"] == 1, (
        "what trainer ranks must know of engines travels once, not once for each rank"
    )


@pytest.mark.integration
def test_every_engine_sees_its_slots_gpus_on_two_nodes(tmp_path: Path) -> None:
    """Bundles alternate, so that their order is neither the nodes' nor the GPUs'."""
    report = look(tmp_path, nodes=2, strategy="SPREAD")
    check(report)
    assert report["slots"] == [[node, str(gpu)] for node in range(2) for gpu in range(SLOTS // 2)]
    assert report["bundles"] != sorted(report["bundles"])
