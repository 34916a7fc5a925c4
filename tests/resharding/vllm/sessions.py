"""Sessions into a real engine, shared by tests of vLLM's side."""

from pathlib import Path
from typing import Any

from mrl.config.sections.sync import SyncSection
from mrl.models.tensors import CheckpointTensor
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.plan import Plan
from mrl.resharding.transfer.session import Session
from mrl.rollout.engine import RolloutEngine
from tests.engines import EngineHost
from tests.mrl.rollout import driving
from tests.resharding.feeding import Feeder, Feeding, read, stacks
from tests.resharding.leasing import LeasedRank

SYNC = SyncSection(bucket_bytes=64 << 10, deadline_seconds=90.0)
ASKED = driving.requests(12, seed=2, ignore_stop=True)


def sync_weights(host: EngineHost, feeder: Feeder, folder: Path, drop: str | None = None) -> Any:
    """Run one session; raise the engine's error, return the senders'."""
    weights = {name: w for name, w in read(folder).items() if name != drop}
    version = host.call(driving.version)
    session = feeder.session(weights, version, version + 1)
    feeding = feeder.send(session, weights)
    try:
        host.call(driving.receive, session)
    finally:
        feeding.end()
    return feeding


def manifests(engine: RolloutEngine, rows: list[tuple[str, tuple[int, ...], str, int]]) -> list[RankManifest]:
    return engine.engine_manifests([CheckpointTensor(*row) for row in rows])


def described(host: EngineHost, folder: Path) -> list[RankManifest]:
    stack = {name: tensor.stack for name, tensor in stacks(folder).items()}
    rows = [
        (name, tuple(w.shape), str(w.dtype).removeprefix("torch."), stack.get(name, 0))
        for name, w in read(folder).items()
    ]
    return host.call(manifests, rows)


def planned_session(host: EngineHost, trainer: LeasedRank, feeder: Feeder, plan: Plan) -> list[Exception]:
    """Run one planned session; raise the engine's error, return the senders'."""
    version = host.call(driving.version)
    session = Session.new(version, version + 1, plan.digest)
    feeding = Feeding(feeder.senders[:1], session, plan, trainer)
    try:
        host.call(driving.receive, session)
    finally:
        feeding.end()
    return feeding.errors
