"""One Megatron rank: builds its part of the model, computes log-probs, updates, and hands its memory over.

A plain class; its Ray actor is elsewhere and thin. All methods except the memory ones are called on all ranks together.
Consumes TrainBatch (numpy), returns numpy and numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from torch import Tensor

from models.build import build_chunks
from models.families import family_of
from models.manifest import CheckpointTensor, LocalTensor
from mrl.config.model import ModelSection
from mrl.config.training import TrainingSection
from mrl.errors import ConfigError
from mrl.samples import TrainBatch
from mrl.training import checkpoint, hf_export, hf_folder
from mrl.training.metrics import reduce_metrics
from mrl.training.optimizer import Optimizer
from mrl.training.parallel import run_on_rank_zero, start_process_groups, stop_process_groups
from mrl.training.parameter_memory import ParameterMemory, exportable_allocations
from mrl.training.passes import Objective, Passes
from resharding.layout import Layout

Role = Literal["policy", "reference"]


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
    ) -> None:
        """Joins the other ranks, builds the model and, unless `load` is False, loads model.path."""
        self.model, self.training = model, training
        self.layout = Layout(**training.layout.model_dump())
        self.hf_config = hf_folder.read_config(model.path)
        self.family = family_of(self.hf_config)
        self.place = self.layout.place(rank)
        self.family.local_tensors(
            self.hf_config, self.layout, self.place
        )  # a layout that does not fit fails here
        self.device, _ = start_process_groups(
            self.layout,
            rank=rank,
            world_size=world_size,
            master_address=master_address,
            master_port=master_port,
            seed=seed,
            collective_seconds=collective_seconds,
        )
        if self.device.type == "cpu":
            torch.set_num_threads(training.num_threads)
        self.dtype = getattr(torch, training.dtype)
        self._chunks = build_chunks(
            self.hf_config, training, self.layout, max_length=model.max_length, device=self.device
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
        self._reference: list[Tensor] | None = None
        self._gather_plan: dict[str, list[hf_export.Part]] | None = None
        self._locals = self._match_names()
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
            for name, parameter in model.named_parameters()
        }
        table = self.family.local_tensors(self.hf_config, self.layout, self.place, dtype=self.training.dtype)
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

    def _load_parameters(self, path: str | Path) -> None:
        files = hf_folder.tensor_files(path)
        expected = self.family.checkpoint_tensors(self.hf_config)
        tied = bool(self.hf_config.get("tie_word_embeddings", False))
        hf_folder.check_names(files, expected, folder=path, tied=tied)
        shapes = {tensor.name: tuple(tensor.shape) for tensor in expected}
        hf_folder.load_pieces([(local, p.data) for local, p in self._locals], files, shapes)

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

        Returned by the ranks with tp 0 on the last pipeline stage, None elsewhere. Entropies are in nats. The router
        margin of a token is the smallest gap between the k-th and the next router logit over all layers and its prefix.
        """
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
        temperature: float = 1.0,
        lr: float | None = None,
    ) -> dict[str, float]:
        """One optimizer step over this data-parallel shard; the same metrics on all ranks.

        Losses and metrics are summed over microbatches and ranks (names ending in _max or _min: largest, smallest).
        A loss or gradient that is not finite, or a step without any token to train on, is skipped on all ranks: no
        parameter changes and `skipped` is 1.
        """
        for model in self._models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        parts = self._passes.forward_backward(batch, objective, denominators, temperature=temperature)
        metrics = reduce_metrics(parts if self.place.tp == 0 else [], device=self.device)
        result = self.optimizer.step(finite=bool(np.isfinite(metrics.get("loss", np.nan))), lr=lr)
        return metrics | {
            "grad_norm": result.grad_norm,
            "skipped": float(result.skipped),
            "lr": result.lr,
            "optimizer_steps": float(self.optimizer.steps),
        }

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

    def stream_full_tensors(self) -> Iterator[tuple[CheckpointTensor, Tensor | None]]:
        """Every full checkpoint tensor, one at a time, on rank 0 (None elsewhere); all ranks iterate together."""
        if self._gather_plan is None:
            self._gather_plan = hf_export.gather_plan(self.family, self.hf_config, self.layout)
        return hf_export.stream_full_tensors(
            self.family.checkpoint_tensors(self.hf_config),
            self._gather_plan,
            [(local, parameter.data) for local, parameter in self._locals],
            rank=self.place.rank,
            device=self.device,
        )

    def export_hf(self, path: str | Path, *, dtype: str | None = None) -> None:
        """Write a Hugging Face folder that transformers and vLLM load unedited; rank 0 writes, `path` must not exist.

        `dtype` is the type of the weights in the folder, training.dtype when absent.
        """
        kind = dtype or self.training.dtype
        if kind not in hf_export.SAFETENSORS_TYPES:
            raise ConfigError(f"export dtype {kind!r} is not one of {sorted(hf_export.SAFETENSORS_TYPES)}")
        path = Path(path)
        run_on_rank_zero(lambda: hf_export.prepare_folder(path))
        partial = path.with_name(path.name + ".partial")
        tensors = self.family.checkpoint_tensors(self.hf_config)
        writer = hf_export.FolderWriter(partial, tensors, dtype=kind) if self.place.rank == 0 else None
        for tensor, value in self.stream_full_tensors():
            if writer is not None and value is not None:
                writer.write(tensor, value)
        run_on_rank_zero(
            lambda: hf_export.finish(writer, partial, path, source=Path(self.model.path), dtype=kind)
        )

    def save_checkpoint(self, path: str | Path, extra: dict[str, Any]) -> None:
        """Model, optimizer, schedule, random states and `extra` (rank 0's), committed at once under `path`."""
        payload = {"user": extra, "optimizer_steps": self.optimizer.steps}
        checkpoint.save(Path(path), self._state(), extra=payload, about=self._about())

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint, also one of another layout; returns its `extra`. CheckpointError when damaged."""
        self.memory.require_unleased("load a checkpoint")
        payload = checkpoint.load(Path(path), self._state(), about=self._about())
        self.optimizer.steps = payload["optimizer_steps"]
        return payload["user"]

    def _state(self) -> checkpoint.TrainingState:
        return checkpoint.TrainingState(self._chunks.models, self.optimizer)

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

    def offload(self) -> None:
        """Free gradients, optimizer state and parameters on the device (on CPU: shared memory and gradients)."""
        self.memory.offload()
        self.optimizer.offload()

    def reload(self) -> None:
        """Undo offload(). What peers knew of the parameter memory before is stale."""
        self.memory.reload()
        self.optimizer.reload()

    def close(self) -> None:
        """Leave the process groups."""
        stop_process_groups()


def _sum_gradients(models: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's gradient reduction without its division by the number of tokens: our losses are already divided."""
    finalize_model_grads(models, None, **kwargs)
