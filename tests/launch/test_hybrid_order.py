"""Who has a slot's memory when: the order of the hybrid engine's calls to both groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from mrl.config.load import load
from mrl.launch.workers.colocated import Hybrid
from mrl.launch.workers.rollout_group import RolloutGroup
from mrl.launch.workers.train_group import TrainGroup
from mrl.launch.workers.two_pools import TwoPools
from mrl.observe.phases import PhaseClock


class Group:
    """A group without workers that records its calls."""

    def __init__(self, name: str, events: list[str]) -> None:
        self._name, self._events = name, events

    def __getattr__(self, call: str) -> Callable[..., Any]:
        def asked(*arguments: Any, **options: Any) -> Any:
            words = [str(value) for value in (*arguments, *options.values()) if isinstance(value, str | bool)]
            self._events.append(" ".join([self._name, call, *words]))
            return {"dead": [], "connect": "plan"}.get(call, {})

        return asked


def hybrid(events: list[str], clock: PhaseClock, kind: type[Hybrid] = Hybrid) -> Hybrid:
    config = load(
        [], ["run.name=r", "model.path=/m", "model.max_length=600", "data.train=/rows", "reward.kind=maths"]
    )
    train, rollout = Group("train", events), Group("rollout", events)
    return kind(config, cast(TrainGroup, train), cast(RolloutGroup, rollout), clock, offloads=kind is Hybrid)


def test_engines_measure_an_empty_slot_and_sleep_before_a_trainer_is_there() -> None:
    events: list[str] = []
    hybrid(events, PhaseClock()).start()
    assert [event for event in events if "dead" not in event] == [
        "rollout start",
        "rollout wait_for_start",
        "rollout engine_ranks",  # traced while the weights are mapped
        "rollout sleep",
        "train start",
        "train wait_for_start",
        "train connect",
    ]


def test_a_step_never_has_the_kv_cache_beside_the_trainers_memory() -> None:
    events: list[str] = []
    engine = hybrid(events, PhaseClock())
    engine.start()
    events.clear()
    engine.sync(0)
    engine.end_generation()
    assert [event for event in events if "dead" not in event] == [
        "train offload True",
        "rollout wake weights",
        "train send",
        "rollout receive",
        "train wait",
        "train offload False",
        "rollout wake kv_cache",
        "rollout sleep",
        "train reload",
    ]


def test_two_pools_start_at_once_and_wait_for_nobodys_memory() -> None:
    events: list[str] = []
    pools = hybrid(events, PhaseClock(), TwoPools)
    pools.start()
    assert [event for event in events if "dead" not in event] == [
        "rollout start",
        "train start",
        "train wait_for_start",
        "rollout engine_ranks",
        "train connect",
    ]
    events.clear()
    pools.sync(0)
    pools.end_generation()
    assert not [event for event in events if "load" in event]
