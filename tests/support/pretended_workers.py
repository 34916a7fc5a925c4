"""A trainer rank and an engine whose tensors have sizes and no contents, in a device ledger.

What frees, copies and takes memory is the real code: MegatronWorker's, TrainedModel's, ParameterMemory's, Optimizer's and
RolloutEngine's. Pretended are Megatron's and vLLM's own work, by the bytes that the capacity estimate gives them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from mrl.algorithms.distillation_terms import TEACHER
from mrl.capacity.estimate import Estimate
from mrl.capacity.training_memory import StageMemory
from mrl.config.root import Config
from mrl.config.sections.critic import CriticSection
from mrl.config.sections.distillation import DistillationSection
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.kept import Kept
from mrl.rollout.part import Part
from mrl.samples import Role, TrainBatch
from mrl.training.optimizer import Optimizer
from mrl.training.pass_options import DEFAULTS, PassOptions
from mrl.training.platform.host_copies import HostCopies
from mrl.training.platform.parameter_memory import ParameterMemory
from mrl.training.trained_model import TrainedModel
from mrl.training.worker import MegatronWorker
from tests.support.device_ledger import Ledger
from tests.support.recorded_cuda import DEVICE


def sized(num_bytes: int) -> torch.Tensor:
    """A tensor of so many bytes that holds none."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)


class SizedSlab:
    """Host memory for off-loaded tensors, without contents."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self.buffer = sized(num_bytes)

    def free(self) -> None:
        self.buffer = sized(0)


class PretendedWorker(MegatronWorker):
    """Rank `rank`, with the memory that the estimate gives its pipeline stage."""

    def __init__(self, estimate: Estimate, ledger: Ledger, *, rank: int) -> None:
        self.training, self.layout = estimate.config.training, estimate.layout
        self.place, self.device = self.layout.place(rank), DEVICE
        self._estimate, self._ledger, self._rank = estimate, ledger, rank
        self._stage = estimate.stages[self.place.pp]
        self._hold("trainer process", estimate.hardware.trainer_process_bytes)
        self.policy, self.critic, self._frozen = _trained_model(self._stage.policy), None, {}
        self._save = None
        self.observe()

    def add_critic(self, section: CriticSection) -> None:
        self.critic = _trained_model(self._stage.critic)
        self.observe()

    def observe(self) -> None:
        """Tells the ledger how large the tensors' storages are; freed ones first."""
        tensors = {
            f"{name}{part}": own
            for name, model in zip(("", "critic's "), self._models(), strict=False)
            for part, own in _tensors(model).items()
        }
        sizes = {part: sum(t.untyped_storage().size() for t in own) for part, own in tensors.items()}
        for part, size in sorted(sizes.items(), key=lambda item: item[1]):
            self._hold(part, size)

    def connect(self) -> None:
        """The buffers that it shares with its engine rank, or its own half of them."""
        self._hold("buckets", self._estimate.slot.buckets // _sides(self._estimate.config))

    def send(self) -> None:
        """Lends the parameters for a session."""
        self.policy.memory.lease()
        self._ledger.mark("weights sent", self._rank)
        self.policy.memory.release()

    def forward(self, batch: TrainBatch, options: PassOptions = DEFAULTS) -> Any:
        role = options.role
        if options.with_reference:
            self.forward(batch, PassOptions(role="reference"))
        acting = contextlib.nullcontext() if role == "critic" else self._acting_as(role, options.teacher)
        with acting:
            self._work("log-probs", {"working": self._estimate.slot.log_prob_working})
        if self.place.tp or self.place.cp or self.place.pp < self.layout.pp - 1:
            return None
        if role == "critic":
            return {"values": np.zeros(batch.num_tokens, np.float32)}
        found = {
            "logprobs": batch.arrays["rollout_logprobs"],
            "entropy": np.ones(batch.num_tokens, np.float32),
        }
        if options.with_reference:
            found["ref_logprobs"] = batch.arrays["rollout_logprobs"]
        return found | {"router_margin": np.ones(batch.num_tokens, np.float32)}

    def update(
        self, batch: TrainBatch, objective: Any, denominators: Any, options: PassOptions, **others: Any
    ) -> dict[str, float]:
        self.accumulate(batch, objective, denominators, options)
        return self._stepped(options.role)

    def accumulate(
        self,
        batch: TrainBatch,
        objective: Any,
        denominators: Any,
        options: PassOptions,
        distillation: DistillationSection | None = None,
    ) -> Any:
        kept, section = self._stage.activations, distillation
        for path in () if section is None else section.folders:
            assert (batch.samples[TEACHER] >= 0).all()
            self.forward(batch, PassOptions(role="teacher", teacher=path))
        lessons = 0 if section is None else self._estimate.slot.lessons
        self._work("update", {"activations": kept.kept, "working": kept.working, "teachers": lessons})
        return {"loss": 0.0}, self.forward(batch, options)

    def step(self, **options: Any) -> dict[str, float]:
        return self._stepped("policy")

    def _stepped(self, role: Role) -> dict[str, float]:
        model, stage = self._trained(role), getattr(self._stage, role)
        model.note_change()
        part = model.optimizer.parts()[0].optimizer
        (master,) = part.param_groups[0]["params"]
        part.state.setdefault(master, {"moments": sized(stage.optimizer - master.nbytes)})
        return {"loss": 0.0, "grad_norm": 1.0, "skipped": 0.0, "lr": 0.0, "optimizer_steps": 1.0}

    def save_checkpoint(self, path: str | Path, extra: dict[str, Any], *, beside: bool) -> None:
        self._work("save", {})

    def checkpoint_is_written(self) -> bool:
        return True

    def commit_checkpoint(self) -> None: ...

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        self._stepped("policy")
        if self.critic is not None:
            self._stepped("critic")
        self._work("load", {})
        return {}

    def reload(self) -> None:
        super().reload()
        self.observe()
        self._ledger.mark("trainer back", self._rank)

    def offload(self, *, keep_parameters: bool = False) -> None:
        super().offload(keep_parameters=keep_parameters)
        self.observe()
        left = "gradients, optimizer and critic left" if keep_parameters else "trainer weights left"
        self._ledger.mark(left, self._rank)

    def memory_use(self) -> dict[str, float]:
        return {"gpu_free": float(self._ledger.free(self._rank))}

    def close(self) -> None: ...

    def _work(self, event: str, parts: dict[str, int]) -> None:
        """Takes memory for a pass and frees it; all of the trainer must be on the device."""
        buffers = [buffer for model in self._models() for buffer in model.memory.buffers]
        gone = any(t.untyped_storage().size() == 0 for b in buffers for t in (b.param_data, b.grad_data))
        assert not gone, f"trainer rank {self._rank} has parameters or gradients off-loaded in {event}"
        self.observe()
        for part, size in parts.items():
            self._hold(part, size)
        self._ledger.mark(event, self._rank)
        for part in parts:
            self._hold(part, 0)

    def _hold(self, part: str, num_bytes: int) -> None:
        self._ledger.hold(f"trainer rank {self._rank}", self._rank, part, num_bytes)


def nothing(*arguments: Any) -> None:
    """A folder's weights have no contents here."""


def _trained_model(stage: StageMemory) -> TrainedModel:
    model = TrainedModel.__new__(TrainedModel)
    buffer = SimpleNamespace(
        param_data=sized(stage.weights), grad_data=sized(stage.gradients), param_index_map={}
    )
    chunk = SimpleNamespace(
        buffers=[buffer], expert_parallel_buffers=[], module=SimpleNamespace(weights=dict)
    )
    model.load_parameters = nothing  # type: ignore[method-assign]
    model.memory, model.optimizer = ParameterMemory([chunk], device=DEVICE), Optimizer.__new__(Optimizer)
    model._folder = model.adapters = None
    own, master = model.optimizer, sized(stage.optimizer // 3)
    own._device, own._copies, own._away = DEVICE, HostCopies(DEVICE, keep=True), []
    own.megatron = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{"params": [master]}], state={}))
    return model


def _tensors(model: TrainedModel) -> dict[str, list[torch.Tensor]]:
    """Part -> what a model has of it."""
    (buffer,), part = model.memory.buffers, model.optimizer.parts()[0].optimizer
    moments = [t for state in part.state.values() for t in state.values()]
    state = [*part.param_groups[0]["params"], *moments]
    return {"weights": [buffer.param_data], "gradients": [buffer.grad_data], "optimizer": state}


def _sides(config: Config) -> int:
    """On slots of their own trainer ranks and engines have a half of the buckets each."""
    return 2 if config.launch.engine_slots else 1


class PretendedEngine(RolloutEngine):
    """An engine, or a dp rank of one, whose vLLM is the ledger's."""

    def __init__(self, config: Config, estimate: Estimate, ledger: Ledger, *, part: Part) -> None:
        self.part, self._rollout, self._sync = part, config.rollout, config.sync
        number = part.engine * part.dp + part.dp_rank
        devices = config.engine_slots[number * config.rollout.tp : (number + 1) * config.rollout.tp]
        self._engine: Any = PretendedVllm(f"engine {number}", devices, estimate, ledger)
        self.policy_version, self._not_serving, self._running = -1, "it never received weights", {}
        self._awake, self._kept = {"weights", "kv_cache"}, Kept()

    def trace(self) -> None:
        """Where its weights lie, which is read from mapped modules."""
        assert "weights" in self._awake, f"{self.part.name} is asked for its manifest while it sleeps"
        self._engine.connect()

    def serve(self) -> None:
        """A round of generation."""
        self._require_serving()
        self._engine.generate()

    def close(self) -> None: ...


class PretendedVllm:
    """What vLLM takes and gives back of its devices: at its start, asleep (level 2), awake, and while weights arrive."""

    def __init__(self, name: str, devices: Sequence[int], estimate: Estimate, ledger: Ledger) -> None:
        """ValueError where less is free than gpu_memory_utilization asks for (vllm.v1.worker.utils.request_memory)."""
        slot = estimate.slot
        self._name, self._devices, self._ledger = name, devices, ledger
        self._parts = {"weights": slot.engine_weights, "kv_cache": slot.kv_cache}
        self._working, self._staging = slot.engine_working, slot.staging
        self._buckets = slot.buckets // 2 if estimate.config.launch.engine_slots else 0
        share, memory = estimate.config.rollout.gpu_memory_utilization, estimate.hardware.memory_bytes
        for device in devices:
            self._hold(device, "engine process", estimate.hardware.engine_process_bytes)
            if (free := ledger.free(device)) < (asked := math.ceil(share * memory)):
                raise ValueError(
                    f"{name}: {free / 1e9:.1f} GB are free on device {device} at its start, less than the "
                    f"{asked / 1e9:.1f} GB of gpu_memory_utilization = {share}"
                )
        self.wake_up(list(self._parts))
        self.generate()  # vLLM profiles the largest batch

    def connect(self) -> None:
        """Its half of the buckets, where the trainer of its slot does not have all."""
        for device in self._devices:
            self._hold(device, "buckets", self._buckets)

    def generate(self) -> None:
        for device in self._devices:
            self._hold(device, "engine working", self._working)
            self._ledger.mark("generate", device)
            self._hold(device, "engine working", 0)

    def sleep(self, level: int) -> None:
        assert level == 2, "weights that are synced need no copy"
        for device in self._devices:
            for part in self._parts:
                self._ledger.drop(self._name, device, part)
            self._ledger.give_back(self._name)
            self._ledger.mark("engine asleep", device)

    def wake_up(self, tags: list[str]) -> None:
        """vLLM's allocator gives torch's cache back before it maps anything, and so what a weight sync left there."""
        self._ledger.give_back(self._name)
        for device in self._devices:
            for tag in tags:
                self._ledger.map(self._name, device, tag, self._parts[tag])
            if tags == ["weights"]:
                self._ledger.mark("rollout weights woke", device)

    def collective_rpc(self, call: str, timeout: float, args: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
        if call == "mrl_receive":
            for device in self._devices:
                self._hold(device, "staging", self._staging)
                self._ledger.mark("sync", device)
                self._hold(device, "staging", 0)  # torch's cache keeps it until the KV cache wakes
        answer = {"num_tensors": 0, "num_bytes": 0, "seconds": 0.0}
        return [answer | {"use": {"gpu_free": float(self._ledger.free(device))}} for device in self._devices]

    def reset_prefix_cache(self) -> bool:
        return True

    def set_weight_version(self, version: str) -> None: ...

    def _hold(self, device: int, part: str, num_bytes: int) -> None:
        self._ledger.hold(self._name, device, part, num_bytes)
