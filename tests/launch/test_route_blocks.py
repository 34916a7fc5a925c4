"""Routes between processes: the driver passes handles on, and each trainer rank reads the rows of its own samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import mrl.launch.workers.actor_log as actor_log
from mrl.config.load import load
from mrl.config.root import Config
from mrl.launch.workers.placement import Placement, Slot
from mrl.launch.workers.train_actor import TrainActor
from mrl.launch.workers.train_group import TrainGroup
from mrl.observe.phases import PhaseClock
from mrl.samples import TrainBatch
from mrl.training.pass_options import PassOptions
from tests.support.pretended_ray import PretendedRay, Reference
from tests.support.samples import make_batch

WORDS = [
    "run.name=r", "model.path=/m/Qwen3-30B-A3B", "data.train=/rows", "reward.kind=maths",
    "algorithm.minibatches=2",
]  # fmt: skip
SEEN: list[tuple[int, str, TrainBatch]] = []
"""(rank, call, batch) of each call of a worker."""


class Worker:
    """A rank that says a token's number is the expert that its position visits, in two layers."""

    def __init__(self, config: Config, rank: int) -> None:
        self._rank, self._place = rank, config.training.layout.sizes().place(rank)

    def forward(self, batch: TrainBatch, options: PassOptions) -> Any:
        SEEN.append((self._rank, "forward", batch))
        if self._place.tp:
            return None
        routes = np.repeat(batch.tokens.astype(np.uint8)[:, None, None], 2, axis=1)
        return {"logprobs": batch.tokens.astype(np.float32)} | (
            {"routes": routes} if options.record_routes else {}
        )

    def update(
        self, batch: TrainBatch, objective: Any, divisors: Any, options: PassOptions, **others: Any
    ) -> dict[str, float]:
        SEEN.append((self._rank, options.role, batch))
        return {}


class AnyWhere(Placement):
    """Slots without a cluster."""

    def strategies(self, ranks: Iterable[int]) -> list[Any]:
        return [None for _ in ranks]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> TrainGroup:
    """Two data-parallel shards of two tensor-parallel ranks each."""
    PretendedRay().install(monkeypatch)
    monkeypatch.setattr(actor_log, "redirect", lambda folder, name: None)
    layout = "training.layout={tp: 2, pp: 1, ep: 1, dp: 2}"
    config = load([], [*WORDS, layout, "routing.replay=trainer"])
    placement = AnyWhere(None, tuple(Slot(slot, 0, str(slot)) for slot in range(4)))
    group = TrainGroup(config, placement, PhaseClock(), environment={}, log_folder="")
    for rank in range(4):
        group.start_on(rank, prepare, Worker(config, rank))
    SEEN.clear()
    return group


def prepare(actor: TrainActor, worker: Any) -> None:
    actor.worker = worker
    actor._objectives |= {"policy": None, "critic": None}


def test_each_rank_reads_the_rows_of_its_samples_and_the_driver_none(group: TrainGroup) -> None:
    batch = make_batch([(2, 5), (1, 3), (4, 9), (1, 1), (3, 2), (2, 2)])
    arrays, recorded = group.forward_recording(batch, PassOptions())
    np.testing.assert_array_equal(arrays["logprobs"], batch.tokens)
    assert recorded.routes is not None
    assert [len(routes) for routes in recorded.routes] == (batch.lengths() - 1).tolist()
    pieces = [piece for routes in recorded.routes for piece in routes.pieces]
    assert all(isinstance(piece.block, Reference) for piece in pieces)
    assert len({id(piece.block) for piece in pieces}) == 2, "one block of each shard"
    SEEN.clear()
    group.update(recorded.select(np.array([5, 1, 2])), {}, PassOptions())
    seen = [
        (name, own.layers([1]))
        for _, _, part in SEEN
        for name, own in zip(part.sample_ids, part.routes or (), strict=True)
    ]
    assert sorted(name for name, _ in seen) == sorted(2 * [batch.sample_ids[b] for b in (5, 1, 2)])
    for name, rows in seen:
        sample = batch.sample_ids.index(name)
        tokens = batch.tokens[batch.cu_seqlens[sample] : batch.cu_seqlens[sample + 1] - 1]
        np.testing.assert_array_equal(rows[:, 0, 0], tokens)


def test_a_critic_is_given_none(group: TrainGroup) -> None:
    _, recorded = group.forward_recording(make_batch([(2, 5), (1, 3)]), PassOptions())
    SEEN.clear()
    group.update(recorded, {}, PassOptions(role="critic"))
    assert len(SEEN) == 4 and all(part.routes is None for _, _, part in SEEN)
