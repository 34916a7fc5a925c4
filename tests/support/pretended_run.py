"""A run on pretended GPUs: the real hybrid engine, groups, actors and loop over the device ledger, from start to checkpoint and export."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import mrl.launch.workers.actor_log as actor_log
import mrl.launch.workers.train_actor as train_actor
import mrl.loops.exports as exports
import mrl.training.platform.device_memory as device_memory
import mrl.training.platform.host_copies as host_copies
import mrl.training.worker as worker
from mrl.capacity.estimate import Estimate
from mrl.launch.workers.colocated import Hybrid
from mrl.launch.workers.placement import Placement, Slot
from mrl.launch.workers.rollout_actor import RolloutActor
from mrl.launch.workers.rollout_group import RolloutGroup
from mrl.launch.workers.train_actor import TrainActor
from mrl.launch.workers.train_group import TrainGroup
from mrl.launch.workers.two_pools import TwoPools
from mrl.loops.checkpoints import Checkpoints
from mrl.loops.exports import Exports
from mrl.loops.group_supply import Supplied
from mrl.loops.on_policy import OnPolicyLoop
from mrl.loops.produce import StepGroups
from mrl.loops.stream import StreamLoop
from mrl.observe.ledger_log import Standing
from mrl.observe.phases import PhaseClock
from mrl.observe.run_folder import RunFolder
from mrl.samples import Group
from tests.support.device_ledger import Ledger
from tests.support.pretended_ray import PretendedRay
from tests.support.pretended_workers import PretendedEngine, PretendedWorker, SizedSlab
from tests.support.recorded_cuda import RecordedCuda
from tests.support.samples import make_groups, make_sample, verdict_of


class PretendedRun:
    """Groups and ledger of a configuration on its hardware; nothing is started yet."""

    def __init__(self, estimate: Estimate, monkeypatch: pytest.MonkeyPatch) -> None:
        self.estimate, self.config, self.clock = estimate, estimate.config, PhaseClock()
        slots = self.config.num_slots
        ray, cuda = PretendedRay(), RecordedCuda()
        self.ledger = Ledger(slots, estimate.hardware.memory_bytes, moment=lambda: self.clock.current)
        for recorder in (ray, cuda):
            recorder.install(monkeypatch)
        ray.after_call = _observe
        cuda.on_empty_cache = lambda: self._give_back(ray.running)
        self._workers: dict[int, PretendedWorker] = {}
        self.exported: dict[int, str] = {}
        """Step whose export was started -> the GPUs that its process sees."""
        self._pretend(monkeypatch)
        per_node = estimate.hardware.gpus_per_node
        placement = AnyWhere(
            None, tuple(Slot(slot, slot // per_node, str(slot % per_node)) for slot in range(slots))
        )
        options: dict[str, Any] = {"environment": {}, "log_folder": ""}
        kind = TwoPools if self.config.launch.engine_slots else Hybrid
        self.hybrid = kind(
            self.config,
            TrainGroup(self.config, placement, self.clock, **options),
            RolloutGroup(self.config, placement, self.clock, sleeps=estimate.sleeps, **options),
            self.clock,
            offloads=estimate.offloads,
        )

    def _pretend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts what has sizes in the place of Megatron, vLLM and the transport between them."""
        estimate, ledger = self.estimate, self.ledger

        def start_engine(actor: RolloutActor, meeting: Any) -> None:
            actor.engine = PretendedEngine(estimate.config, estimate, ledger, part=actor.part)

        def trace(actor: RolloutActor) -> list[tuple[str, str, str]]:
            actor.engine.trace()  # type: ignore[attr-defined]
            return [("address", "device", "digest")] * estimate.config.rollout.tp

        def connect(actor: TrainActor, *arguments: Any) -> str:
            actor.worker.connect()  # type: ignore[attr-defined]
            return "plan"

        def send(actor: TrainActor, session: Any, absent: Any) -> dict[str, float]:
            actor.worker.send()  # type: ignore[attr-defined]
            return {"bytes": 0.0}

        def build(*arguments: Any, rank: int, **options: Any) -> PretendedWorker:
            self._workers[rank] = PretendedWorker(estimate, ledger, rank=rank)
            return self._workers[rank]

        monkeypatch.setattr(RolloutActor, "start", start_engine)
        monkeypatch.setattr(RolloutActor, "prepare_sync", trace)
        monkeypatch.setattr(RolloutActor, "manifests", lambda actor, digests: dict.fromkeys(digests))
        monkeypatch.setattr(RolloutGroup, "_require_whole_experts", lambda group, ranks: None)
        monkeypatch.setattr(TrainActor, "connect", connect)
        monkeypatch.setattr(TrainActor, "send", send)
        monkeypatch.setattr(worker, "MegatronWorker", build)
        monkeypatch.setattr(host_copies, "Slab", SizedSlab)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(actor_log, "redirect", lambda folder, name: None)
        monkeypatch.setattr(Exports, "_start", lambda own, step: self._note_export(step))
        for module in (train_actor, device_memory):  # hundreds of ranks in this one process
            monkeypatch.setattr(
                module,
                "gc",
                SimpleNamespace(
                    collect=lambda: 0, freeze=lambda: None, disable=lambda: None, enable=lambda: None
                ),
            )

    def _give_back(self, process: str) -> None:
        """torch.cuda.empty_cache in a trainer rank: what its tensors no longer hold goes too."""
        kind, _, number = process.rpartition(" ")
        if kind == "trainer rank":
            self._workers[int(number)].observe()
        self.ledger.give_back(process)

    def _note_export(self, step: int) -> None:
        self.exported[step] = exports._environment().get("CUDA_VISIBLE_DEVICES", "all")

    def start(self, folder: Path, *, resumes: bool) -> OnPolicyLoop | StreamLoop:
        """As launch/commands/train.py does: workers, reference, checkpoint, first weight sync. `folder`: of the run."""
        self.hybrid.start()
        with self.clock.phase("restore"):
            self.hybrid.train.keep_frozen()
            if resumes:
                self.hybrid.train.load_checkpoint(Path("checkpoint"))
        streams = self.config.loop.schedule == "stream"
        schedule, supply = (StreamLoop, StreamSupply) if streams else (OnPolicyLoop, Supply)
        loop = schedule(
            self.config,
            self.hybrid,
            None,  # type: ignore[arg-type] the supply asks nobody
            supply(self.hybrid, self.clock, self.estimate.layout.dp),  # type: ignore[arg-type]
            [],
            Recorder(self.clock),  # type: ignore[arg-type]
            Checkpoints(self.config, RunFolder(folder), Exports(self.config.export, folder, run_name="r")),
        )
        with self.clock.phase("first_sync"):
            loop.start()
        return loop


class AnyWhere(Placement):
    """Slots without a cluster."""

    def strategies(self, ranks: Iterable[int]) -> list[Any]:
        return [None for _ in ranks]


def _observe(actor: Any) -> None:
    if isinstance(getattr(actor, "worker", None), PretendedWorker):
        actor.worker.observe()


class Supply:
    """Groups for a step, after the engines have served a round."""

    def __init__(self, hybrid: Hybrid, clock: PhaseClock, num_groups: int) -> None:
        self._hybrid, self._clock, self._num_groups = hybrid, clock, max(4, num_groups)

    def take(self, collector: Any, *, version: int) -> Supplied:
        with self._clock.phase("generate"):
            return Supplied(self._serve(version), version, {})

    def _serve(self, version: int) -> list[Group]:
        self._hybrid.rollout.on_all(lambda actor: actor.engine.serve())  # type: ignore[attr-defined]
        versions = np.full(3, version, np.int32)
        samples = [
            make_sample(prompt, index, verdict=verdict_of(float(index)), policy_versions=versions)
            for prompt in range(self._num_groups)
            for index in range(2)
        ]
        return make_groups(samples)

    def take_standing(self) -> Standing:
        return Standing((), 0)

    def state(self) -> dict[str, Any]:
        return {}


class StreamSupply(Supply):
    """The same for a stream, whose engines go on serving until they are parked, also beside the trainer."""

    stranded = False

    def take(self, version: int) -> StepGroups:  # type: ignore[override]
        return StepGroups(self._serve(version), version, {})

    def pump(self, timeout_seconds: float = 0.0) -> list[Any]:
        self._serve(0)
        return []

    def sync_due(self, *, shared: bool) -> bool:
        return True

    def waiting_for(self) -> str:
        return "nothing is waited for"

    def commit(self, version: int) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Recorder:
    """Writes nothing."""

    def __init__(self, clock: PhaseClock) -> None:
        self.clock = clock

    def start(self, *arguments: Any, **options: Any) -> dict[str, float]:
        return {}

    def prompts(self, *arguments: Any) -> None: ...

    def samples(self, *arguments: Any, **options: Any) -> None: ...

    def row(self, *arguments: Any) -> None: ...
