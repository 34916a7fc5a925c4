"""Random worlds: bounded staleness, each prompt once, no deadlock; planted faults are seen."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mrl.errors import RolloutError
from mrl.rollout import engine_messages
from mrl.rollout.engine_client import EngineClient
from mrl.rollout.engine_pool import PauseTotals
from tests.mrl.loops.async_worlds import World, WorldBuffer, WorldPool


@pytest.mark.parametrize("count", [1500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_every_world_keeps_its_promises(count: int) -> None:
    trained = lost = 0
    for seed in range(count):
        world = World(seed)
        world.run()
        trained, lost = trained + len(world.trained), lost + world.num_lost
    assert trained > 5 * count and lost > count, "the worlds are too quiet to show anything"


class ForgetsSnapshots(WorldPool):
    """Takes a snapshot for the whole response and forgets earlier parts."""

    async def _pause(self, client: EngineClient, snapshot: bool) -> engine_messages.PauseDone | PauseTotals:
        done, parts = await client.pause(snapshot=snapshot)
        for part in parts:
            self._open[part.request_id].latest = part
        return done


class HearsNoDeath(WorldPool):
    """Sends requests to dead engines."""

    def _died(self, number: int, why: str) -> None: ...


class AdmitsMore(WorldBuffer):
    """Admits more groups than the staleness bound allows."""

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._admission = dataclasses.replace(
            self._admission, max_staleness=self._admission.max_staleness + 1
        )


class BeginsAnew(WorldBuffer):
    """Resumes a checkpoint's groups without their partial responses."""

    def restore(self, state: dict[str, Any], *, version: int) -> int:
        started = self._rollouts.start
        self._rollouts.start = lambda p, s, records=(): started(p, s)  # type: ignore[method-assign]
        return super().restore(state, version=version)


class AdmitsRarely(WorldBuffer):
    """Never reuses the slot of a filtered group."""

    def _admit(self) -> None:
        if not self._ledger.fruitless:
            super()._admit()


FAULTS: dict[str, tuple[dict[str, Any], type[Exception], str | None]] = {
    "snapshots without earlier parts": ({"pool": ForgetsSnapshots}, RolloutError, "ran other tokens"),
    "a death that is not heard": ({"pool": HearsNoDeath}, TimeoutError, None),
    "one slot too many": ({"buffer": AdmitsMore}, AssertionError, "too old"),
    "a checkpoint's tokens are drawn again": ({"buffer": BeginsAnew}, AssertionError, "drawn twice"),
    "a filtered group's slot is lost": ({"buffer": AdmitsRarely}, TimeoutError, None),
}


@pytest.mark.parametrize(("parts", "error", "message"), FAULTS.values(), ids=FAULTS)
def test_the_worlds_see_a_fault(parts: dict[str, Any], error: type[Exception], message: str | None) -> None:
    with pytest.raises(error, match=message):
        run_worlds(300, **parts)


def run_worlds(count: int, **parts: Any) -> None:
    for seed in range(count):
        World(seed, **parts).run()
