"""Sends a Hugging Face folder's tensors to an engine, one sender per worker, as one trainer rank would."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from mrl.config.sections.sync import SyncSection
from mrl.models.families import family_of
from mrl.models.tensors import CheckpointTensor
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import Plan, PlanOptions, build_plan
from mrl.resharding.planner.topology import Topology
from mrl.resharding.transfer.sender import WeightSender
from mrl.resharding.transfer.session import Session
from mrl.training.hf.hf_folder import read_config
from tests.resharding.exchanges import holder_of
from tests.resharding.leasing import LeasedRank
from tests.support.image_folders import text_alone


def stacks(folder: Path) -> dict[str, CheckpointTensor]:
    """Return the transposed and stacked tensors of a folder by name."""
    hf = read_config(folder)
    return {t.name: t for t in family_of(hf).checkpoint_tensors(hf) if t.stack}


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Return a folder's tensors as trainer ranks have them: stacks are split into rows."""
    from safetensors.torch import load_file

    weights = text_alone(load_file(folder / "model.safetensors"))
    for name, tensor in stacks(folder).items():
        parts = weights[name]
        rows = parts.transpose(1, 2) if parts.ndim == 3 else parts
        weights[name] = rows.reshape(tensor.shape)
    return weights


def plan_of(weights: dict[str, torch.Tensor], bucket_bytes: int) -> Plan:
    """Return a plan from one rank with every tensor to an engine rank that loads each whole."""
    return build_plan(
        [holder_of(weights)],
        [RankManifest.of(0, (), weights)],
        Topology.shared(1),
        PlanOptions(bucket_bytes=bucket_bytes),
    )


class Feeder:
    def __init__(self, addresses: list[str], sync: SyncSection, *, full: bool = False) -> None:
        """`full`: sessions are proved; request the engine's manifest first."""
        self.sync, self._full = sync, full
        self.senders = [WeightSender(address, sync) for address in addresses]

    def session(self, weights: dict[str, torch.Tensor], start: int, end: int) -> Session:
        return Session.new(start, end, plan_of(weights, self.sync.bucket_bytes).digest, full=self._full)

    def send(self, session: Session, weights: dict[str, torch.Tensor]) -> Feeding:
        plan = plan_of(weights, self.sync.bucket_bytes)
        trainer = LeasedRank(plan.trainers[0].tensors, list(weights.values()))
        return Feeding(self.senders, session, plan, trainer, trainer.close)

    def close(self) -> None:
        for sender in self.senders:
            sender.close()


class Feeding:
    """One session with a thread per sender, so that the caller starts the engine; `end` waits."""

    def __init__(
        self,
        senders: Sequence[WeightSender],
        session: Session,
        plan: Plan,
        trainer: LeasedRank,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.stats: list[dict[str, float]] = []
        self.errors: list[Exception] = []
        self._close = close

        def run(sender: WeightSender) -> None:
            try:
                self.stats.append(trainer.send(sender, session, plan, 0, group=None, deadline_seconds=30.0))
            except Exception as error:
                traceback.clear_frames(error.__traceback__)  # they keep the memory that is closed at the end
                self.errors.append(error)

        self._threads = [threading.Thread(target=run, args=(s,), daemon=True) for s in senders]
        for thread in self._threads:
            thread.start()

    def end(self) -> Feeding:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a sender did not return"
        self._close()
        return self
