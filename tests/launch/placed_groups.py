"""Prints which GPUs the workers of both groups see, as JSON; no device is touched.

Run `python -m tests.launch.placed_groups HEAD NODES STRATEGY SEED`. Only the GPUs are pretended.
SEED shuffles the slots, as another order of ranks would; 0 leaves them in order.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from typing import Any

import ray

from mrl.config.load import load
from mrl.launch.cluster.cluster import python_of_workers
from mrl.launch.preflight import wait_for_nodes
from mrl.launch.workers.actor_group import close_all
from mrl.launch.workers.placement import Placement, place
from mrl.launch.workers.rollout_actor import EngineRank
from mrl.launch.workers.rollout_group import RolloutGroup
from mrl.launch.workers.train_group import TrainGroup
from mrl.observe.phases import PhaseClock

SLOTS = 4
WORDS = (
    "run.name=r", "model.path=Qwen3-30B-A3B", "model.max_length=600", "data.train=/rows",
    "reward.kind=maths",
)  # fmt: skip
POOL = ("rollout.tp=2", f"launch.engine_slots={SLOTS // 2}")
"""Arguments of a run whose engines have the second half of the slots to themselves."""
PICKLED: list[str] = []


class Counted:
    """Counts how often it is pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        PICKLED.append("")
        return str, ()


def seen(actor: Any) -> dict[str, Any]:
    """Return an actor's visible devices and its node."""
    context = ray.get_runtime_context()
    names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS")
    return {name: os.environ.get(name) for name in names} | {"node": context.get_node_id()}


def main(head: str, num_nodes: int, strategy: str, seed: int) -> None:
    ray.init(address=head, log_to_driver=False, runtime_env=python_of_workers())
    wait_for_nodes(num_nodes, deadline_seconds=120)
    config = load([], [*WORDS, f"training.layout={{dp: {SLOTS}}}", "rollout.tp=2"])
    placement = place(SLOTS, gpus=True, deadline_seconds=120, strategy=strategy)
    slots = list(placement.slots)
    if seed:
        random.Random(seed).shuffle(slots)
        placement = Placement(placement.group, tuple(slots))
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"environment": {}, "log_folder": folder}
        train = TrainGroup(config, placement, PhaseClock(), **options)
        rollout = RolloutGroup(config, placement, PhaseClock(), sleeps=False, **options)
        report: dict[str, Any] = {
            "slots": [[slot.node, slot.gpu] for slot in slots],
            "bundles": [slot.bundle for slot in slots],
            "trainers": train.on_all(seen),
            "engines": rollout.on_all(seen),
        }
        ask = train.on_all
        train.on_all = lambda function, *args: report.update(nodes=args[-1].nodes) or ask(function, *args)  # type: ignore[method-assign]
        try:
            train.connect([EngineRank("", "", Counted())])  # type: ignore[arg-type] fails: no rank was started
        except Exception:
            report["pickled"] = len(PICKLED)
        close_all((rollout, train), deadline_seconds=20)
        pool_config = load([], [*WORDS, f"training.layout={{dp: {SLOTS // 2}}}", *POOL])
        pool = RolloutGroup(pool_config, placement, PhaseClock(), sleeps=False, **options)
        report["pool"] = pool.on_all(seen)
        close_all((pool,), deadline_seconds=20)
    placement.remove()
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
