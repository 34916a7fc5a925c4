"""One Megatron rank: builds its part of the model, computes log-probs, updates, and hands its memory over.

With a critic (add_critic) a second worker of the same class, with a value head, lives in the same process on the same
process groups. A plain class; its Ray actor is elsewhere and thin. All methods except the memory ones are called on all ranks together.
Consumes TrainBatch (numpy), returns numpy and numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from torch import Tensor

from mrl.config.sections.critic import CriticSection
from mrl.config.sections.model import ModelSection
from mrl.config.sections.training import TrainingSection
from mrl.errors import ConfigError
from mrl.models.families import family_of
from mrl.models.megatron.build import build_chunks
from mrl.models.tensors import LocalTensor
from mrl.resharding.transfer.proof import ReadBoxes
from mrl.samples import Role, TrainBatch
from mrl.training.checkpoint import saving
from mrl.training.hf import folder
from mrl.training.metrics import reduce_metrics
from mrl.training.optimizer import Optimizer
from mrl.training.passes import Objective, Passes
from mrl.training.platform.parallel import start_process_groups, stop_process_groups
from mrl.training.platform.parameter_memory import ParameterMemory, exportable_allocations

log = logging.getLogger(__name__)

HEAD = "output_layer.weight"
"""Megatron's name of the output layer; a critic has its value head there, which no checkpoint of a policy holds."""


class MegatronWorker:
    """Rank `rank` of a training group."""

    def __init__(
        self,
        model: ModelSection,
        training: TrainingSection,
        *,
        rank: int,
        world_size: int,
        master_address: str,
        master_port: int,
        seed: int = 0,
        collective_seconds: float = 600.0,
        load: bool = True,
        beside: MegatronWorker | None = None,
    ) -> None:
        """Joins the other ranks, builds the model and, unless `load` is False, loads model.path.

        `beside` makes this the critic of that policy: a value head that starts at 0, on the process groups there are.
        """
        self.model, self.training = model, training
        self.layout = training.layout.sizes()
        self.hf_config = folder.read_config(model.path)
        self.family = family_of(self.hf_config)
        self.place = self.layout.place(rank)
        self.family.local_tensors(
            self.hf_config, self.layout, self.place
        )  # a layout that does not fit fails here
        self._is_critic = beside is not None
        self.critic: MegatronWorker | None = None
        """The value model's worker, once add_critic() was called."""
        self.device = (
            beside.device
            if beside is not None
            else start_process_groups(
                self.layout,
                rank=rank,
                world_size=world_size,
                master_address=master_address,
                master_port=master_port,
                seed=seed,
                collective_seconds=collective_seconds,
            )[0]
        )
        if self.device.type == "cpu":
            torch.set_num_threads(training.num_threads)
        self.dtype = getattr(torch, training.dtype)
        self._chunks = build_chunks(
            self.hf_config,
            training,
            self.layout,
            max_length=model.max_length,
            device=self.device,
            value_head=self._is_critic,
        )
        self._chunks.config.finalize_model_grads_func = _sum_gradients
        with exportable_allocations(self.device):
            self._models = [self._wrap(chunk, number) for number, chunk in enumerate(self._chunks.models)]
            self.memory = ParameterMemory(self._models, device=self.device)
        self.optimizer = Optimizer(self._models, training.optimizer, dtype=self.dtype, device=self.device)
        self._passes = Passes(
            self._chunks,
            self._models,
            training=training,
            layout=self.layout,
            place=self.place,
            device=self.device,
        )
        self._loss = float("nan")
        """Of the gradients that wait for step(); not a number while none do."""
        self._reference: list[Tensor] | None = None
        self._locals = self._match_names()
        self._folder: Path | None = None
        """Of the weights that the parameters still are."""
        if load:
            self.load_hf(model.path)

    def _wrap(self, chunk: Any, number: int) -> Any:
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
        )
        return DistributedDataParallel(self._chunks.config, config, chunk, disable_bucketing=number > 0)

    def _match_names(self) -> list[tuple[LocalTensor, Tensor]]:
        """The name table's tensors beside the real parameters; any difference is an error."""
        real = {
            (chunk, name): parameter
            for chunk, model in enumerate(self._chunks.models)
            for name, parameter in model.weights().items()
            if not (self._is_critic and name == HEAD)
        }
        table = self.family.local_tensors(self.hf_config, self.layout, self.place, dtype=self.training.dtype)
        table = [local for local in table if not (self._is_critic and local.name == HEAD)]
        named = {(local.chunk, local.name): local for local in table}
        if real.keys() != named.keys():
            raise ConfigError(
                f"name table of {self.family.model_type} and Megatron disagree on rank {self.place.rank}: only in the "
                f"table {sorted(named.keys() - real.keys())[:4]}, only in Megatron {sorted(real.keys() - named.keys())[:4]}"
            )
        for key, local in named.items():
            if tuple(real[key].shape) != local.shape:
                raise ConfigError(
                    f"{local.name}: the table says {local.shape}, Megatron {tuple(real[key].shape)}"
                )
        return [(local, real[local.chunk, local.name]) for local in table]

    # -- weights ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load_hf(self, path: str | Path) -> None:
        """Stream a Hugging Face folder into this rank's parameters and master weights."""
        self._load_parameters(path)
        self.optimizer.take_parameters()
        self._folder = Path(path)

    def loaded_boxes(self) -> ReadBoxes | None:
        """Reads boxes of the folder whose weights the parameters are; None once they were updated or come from a checkpoint."""
        if self._folder is None:
            return None
        return functools.partial(folder.read_boxes, self._folder, self.family, self.hf_config, self.dtype)

    def _load_parameters(self, path: str | Path) -> None:
        targets = [(local, parameter.data) for local, parameter in self._locals]
        left_out = folder.load(path, self.family, self.hf_config, targets)
        if left_out and self.place.rank == 0 and not self._is_critic:
            prefixes = ", ".join(self.family.untrained(self.hf_config))
            log.warning("%s: %d tensors under %s are not trained", path, len(left_out), prefixes)

    # -- passes -------------------------------------------------------------------------------------------------

    def forward(
        self,
        batch: TrainBatch,
        *,
        role: Role = "policy",
        temperature: float = 1.0,
        with_router_margins: bool = False,
    ) -> dict[str, np.ndarray] | None:
        """Log-probs and entropy [N] of this data-parallel shard (and `router_margin`), at the sampling temperature.

        The critic gives `values` [N]: entry t is the value of the state before token t, 0 for a segment's first token.
        Returned by the ranks with tp 0 and cp 0 on the last pipeline stage, None elsewhere. Entropies are in nats. The router
        margin of a token is the smallest gap in a router's choice (RecordingRouter) over all layers and its prefix.
        """
        if role == "critic":
            return self._with_critic().forward(batch)
        with self._acting_as(role):
            return self._passes.forward(
                batch, temperature=temperature, with_router_margins=with_router_margins
            )

    def update(
        self,
        batch: TrainBatch,
        objective: Objective,
        denominators: Mapping[str, Any],
        *,
        role: Role = "policy",
        temperature: float = 1.0,
        lr: float | None = None,
    ) -> dict[str, float]:
        """One optimizer step of the policy or the critic over this data-parallel shard; the same metrics on all ranks.

        Losses and metrics are summed over microbatches and ranks (names ending in _max or _min: largest, smallest). Where
        the model has experts, `moe/...` says how evenly this update's tokens were spread (expert_load.py).
        A loss or gradient that is not finite, or a step without any token to train on, is skipped on all ranks: no
        parameter changes and `skipped` is 1. The critic's objective is called with values=[n].
        """
        if role == "critic":
            return self._with_critic().update(batch, objective, denominators, lr=lr)
        metrics, _ = self.accumulate(batch, objective, denominators, temperature=temperature)
        return metrics | self.step(lr=lr)

    def accumulate(
        self,
        batch: TrainBatch,
        objective: Objective,
        denominators: Mapping[str, Any],
        *,
        temperature: float = 1.0,
        with_router_margins: bool = False,
    ) -> tuple[dict[str, float], dict[str, np.ndarray] | None]:
        """The first half of update(), which changes no parameter: gradients that step() applies, and their metrics.

        Beside them what forward() returns, by the same weights, with 0 for tokens that are not trained on.
        """
        for model in self._models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        parts, arrays = self._passes.forward_backward(
            batch, objective, denominators, temperature=temperature, with_router_margins=with_router_margins
        )
        metrics = reduce_metrics(parts if self.place.tp == self.place.cp == 0 else [], device=self.device)
        if not self._is_critic:
            metrics |= self._passes.expert_load.metrics()
        self._loss = metrics.get("loss", float("nan"))
        return metrics, arrays

    def step(self, *, lr: float | None = None) -> dict[str, float]:
        """The second half of update(): one optimizer step along the gradients that wait."""
        self._folder = None
        result = self.optimizer.step(finite=bool(np.isfinite(self._loss)), lr=lr)
        self._loss = float("nan")
        return {
            "grad_norm": result.grad_norm,
            "skipped": float(result.skipped),
            "lr": result.lr,
            "optimizer_steps": float(self.optimizer.steps),
        }

    def device_name(self) -> str:
        """What CUDA calls this rank's device; "cpu" without one."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    # -- critic -------------------------------------------------------------------------------------------------

    def add_critic(self, section: CriticSection) -> None:
        """Build the critic beside this policy, from section.path or else from the policy's starting point."""
        model = self.model.model_copy(update={"path": section.path or self.model.path})
        self.critic = MegatronWorker(
            model,
            self.training.model_copy(update={"optimizer": section.optimizer}),
            rank=self.place.rank,
            world_size=self.layout.world_size,
            master_address="",
            master_port=0,
            beside=self,
        )
        if self.critic.hf_config["vocab_size"] != self.hf_config["vocab_size"]:
            raise ConfigError(
                f"critic.path = {model.path} has a vocabulary of {self.critic.hf_config['vocab_size']} tokens, the "
                f"policy {self.hf_config['vocab_size']}; the critic reads the policy's tokens"
            )

    def _with_critic(self) -> MegatronWorker:
        if self.critic is None:
            raise ConfigError("there is no critic on this worker; call add_critic() first")
        return self.critic

    # -- reference ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def snapshot_reference(self, path: str | Path | None = None) -> None:
        """Keep a frozen reference policy in plain memory: today's parameters, or a Hugging Face folder's."""
        if path is None:
            self._reference = self.memory.copies()
            return
        self.memory.require_unleased("load the reference")
        policy = self.memory.copies()
        try:
            self._load_parameters(path)
            self._reference = self.memory.copies()
        finally:
            self.memory.fill(policy)

    @contextlib.contextmanager
    def _acting_as(self, role: Role) -> Iterator[None]:
        """The reference's parameters in place of the policy's, for the length of a forward pass."""
        if role == "policy":
            yield
            return
        if self._reference is None:
            raise ConfigError("there is no reference policy on this worker; call snapshot_reference() first")
        self.memory.require_unleased("swap the reference in")
        with torch.no_grad():
            policy = self.memory.copies()
            self.memory.fill(self._reference)
            try:
                yield
            finally:
                self.memory.fill(policy)

    # -- files --------------------------------------------------------------------------------------------------

    def save_weights(self, path: str | Path) -> None:
        """Write the policy's parameters alone to the new folder `path`, in the format of checkpoints; hf_export.export reads it."""
        saving.save_weights(Path(path), self._states()[""])

    def save_checkpoint(self, path: str | Path, extra: dict[str, Any]) -> None:
        """Model, optimizer, schedule, random states, the critic's likewise, and `extra` (rank 0's), committed at once."""
        steps = {name: worker.optimizer.steps for name, worker in self._saved_workers().items()}
        payload = {"user": extra, "optimizer_steps": steps[""], "critic_steps": steps.get("critic")}
        saving.save(Path(path), self._states(), extra=payload, about=self._about())

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint, also one of another layout; returns its `extra`. CheckpointError when damaged."""
        self.memory.require_unleased("load a checkpoint")
        self._folder = None
        payload = saving.load(Path(path), self._states(), about=self._about())
        self.optimizer.steps = payload["optimizer_steps"]
        if self.critic is not None:
            self.critic.optimizer.steps = payload["critic_steps"]
        return payload["user"]

    def _saved_workers(self) -> dict[str, MegatronWorker]:
        """The workers of a checkpoint by their folder in it."""
        return {"": self} if self.critic is None else {"": self, "critic": self.critic}

    def _states(self) -> dict[str, saving.TrainingState]:
        return {
            name: saving.TrainingState(worker._chunks.models, worker.optimizer)
            for name, worker in self._saved_workers().items()
        }

    def _about(self) -> dict[str, Any]:
        return {
            "model_type": self.family.model_type,
            "dtype": self.training.dtype,
            "layout": dataclasses.asdict(self.layout),
        }

    # -- memory -------------------------------------------------------------------------------------------------

    def parameter_memory(self) -> list[tuple[int, int]]:
        """(fd, bytes) of each parameter buffer; a peer opens /proc/<our pid>/fd/<fd>."""
        return self.memory.export()

    def local_tensors(self) -> list[tuple[LocalTensor, Tensor, int, int]]:
        """(description, view of the parameter, buffer index, byte offset in the buffer), in the table's order."""
        return [(local, parameter.data, *self.memory.locate(parameter)) for local, parameter in self._locals]

    def lease(self) -> int:
        """A peer starts to read the parameter memory; returns its generation."""
        return self.memory.lease()

    def release(self) -> None:
        """The peer has unmapped."""
        self.memory.release()

    def offload(self, *, keep_parameters: bool = False) -> None:
        """Free gradients, optimizer state, the critic and parameters on the device (on CPU: shared memory and gradients).

        With `keep_parameters` the policy's stay, for a weight sync that reads them; a second call then frees those.
        """
        self.memory.free_gradients() if keep_parameters else self.memory.offload()
        self.optimizer.offload()
        if self.critic is not None:
            self.critic.offload()

    def reload(self) -> None:
        """Undo offload(). What peers knew of the parameter memory before is stale."""
        self.memory.reload()
        self.optimizer.reload()
        if self.critic is not None:
            self.critic.reload()

    def close(self) -> None:
        """Leave the process groups."""
        stop_process_groups()


def _sum_gradients(models: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's gradient reduction without its division by the number of tokens: our losses are already divided."""
    finalize_model_grads(models, None, **kwargs)
