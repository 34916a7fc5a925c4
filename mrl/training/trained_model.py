"""One model of a trainer rank: its part of the parameters, their memory, the optimizer and the passes.

A worker has one for the policy and, with PPO, one for the critic, on the same process groups.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
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

from mrl.algorithms.losses import gradient_frac
from mrl.config.sections.model import ModelSection
from mrl.config.sections.training import TrainingSection
from mrl.models.adapters import adapters
from mrl.models.family import DRAFTS
from mrl.models.layout import Layout, RankCoordinates
from mrl.models.megatron.lora_parameters import LowRankPair, add_adapters
from mrl.models.tensors import LocalTensor
from mrl.resharding.transfer.proof import ReadBoxes
from mrl.resharding.wire.exportable import exportable_allocations
from mrl.samples import TrainBatch
from mrl.training.adapters import Adapters
from mrl.training.checkpoint.training_state import TrainingState
from mrl.training.hf import read_values
from mrl.training.loaded_model import LoadedModel
from mrl.training.optimizer import Optimizer
from mrl.training.pass_options import PassOptions
from mrl.training.passes import Objective, ParameterSwap, Passes
from mrl.training.platform.parallel import reduce_metrics
from mrl.training.platform.parameter_memory import ParameterMemory
from mrl.training.reduction import OverlappedReduction
from mrl.training.teacher_targets import TargetsOfTeachers

log = logging.getLogger(__name__)


class TrainedModel(LoadedModel):
    """A trained model: the policy, or with a value head a critic or a reward model. The head starts at 0, or
    as the score of a loaded reward model."""

    def __init__(
        self,
        model: ModelSection,
        training: TrainingSection,
        *,
        layout: Layout,
        place: RankCoordinates,
        device: torch.device,
        has_value_head: bool = False,
        seed: int = 0,
        replays: bool = False,
    ) -> None:
        """Build this rank's part with random weights on existing process groups. `seed` is for adapters; with
        `replays` batches may contain routes."""
        super().__init__(
            model,
            training,
            layout=layout,
            place=place,
            device=device,
            has_value_head=has_value_head,
            replays=replays,
        )
        self._bucket_size = training.summed_bucket()
        pairs = [] if has_value_head else self._add_adapters(training, seed)
        with exportable_allocations():
            self._models = [self._wrap(chunk, number) for number, chunk in enumerate(self.chunks.models)]
            self.memory = ParameterMemory(self._models, device=device)
        self._reduction = None if self._bucket_size is None else OverlappedReduction(self._models)
        self.chunks.config.finalize_model_grads_func = self._sum_gradients
        if self._reduction is not None:
            self.chunks.config.no_sync_func = self._reduction.no_sync()
        self.optimizer = Optimizer(
            self._models,
            training.optimizer,
            dtype=self.dtype,
            device=device,
            has_drafts=self.chunks.has_drafts,
        )
        on_gradient = None if self._reduction is None else self._reduction.take
        self.adapters = Adapters(pairs, self.memory, device=device, taken=on_gradient) if pairs else None
        """Trained adapters if training.lora is set; the parameters have them merged."""
        self.passes = Passes(
            self.chunks, self._models, training=training, layout=layout, place=place, device=device
        )
        self._loss = float("nan")
        """Loss of the gradients that wait for step(); NaN without any."""
        self._located = self.match_names(training.dtype)
        self._folder: Path | None = None
        """Hugging Face folder whose weights the parameters still equal."""

    def _wrap(self, chunk: Any, number: int) -> Any:
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=self._bucket_size is not None,
            bucket_size=self._bucket_size,
        )
        return DistributedDataParallel(self.chunks.config, config, chunk, disable_bucketing=number > 0)

    def _add_adapters(self, training: TrainingSection, seed: int) -> list[LowRankPair]:
        lora = training.lora
        if lora is None:
            return []
        table = adapters(
            self.family, self.hf_config, self.layout, self.place, lora, dtype=training.dtype, spec=self.spec
        )
        return add_adapters(self.chunks.models, table, scale=lora.scale, seed=seed)

    @torch.no_grad()
    def load_hf(self, path: str | Path) -> None:
        """Stream a Hugging Face folder into this rank's parameters and master weights."""
        self.note_change()
        self.fill(path, self._located, drafts=self.chunks.has_drafts)
        self.optimizer.take_parameters()
        if self.adapters is not None:
            self.adapters.keep_base()
        self._folder = Path(path)

    def load_parameters(self, path: str | Path) -> None:
        """Stream a Hugging Face folder into this rank's parameters only, without a draft head."""
        self.fill(path, self._model_tensors())

    def loaded_boxes(self) -> ReadBoxes | None:
        """Return a reader of the folder whose weights the parameters equal; None after any change."""
        if self._folder is None:
            return None
        return functools.partial(
            read_values.read_boxes, self._folder, self.family, self.hf_config, self.dtype
        )

    def local_tensors(self) -> list[tuple[LocalTensor, Tensor, int, int]]:
        """Return (description, parameter view, buffer index, byte offset there) of what engines get, in the
        table's order."""
        return [
            (local, parameter.data, *self.memory.locate(parameter))
            for local, parameter in self._model_tensors()
        ]

    def _model_tensors(self) -> list[tuple[LocalTensor, Tensor]]:
        """Return the located tensors without those of a draft head."""
        return [(local, tensor) for local, tensor in self._located if not local.name.startswith(DRAFTS)]

    def state(self) -> TrainingState:
        """Return the state that a checkpoint saves and restores."""
        return TrainingState(self.chunks.models, self.optimizer)

    def note_change(self) -> None:
        """Record that parameters change, so neither the loaded folder nor the host copies match them."""
        self._folder = None
        self.memory.note_change()

    def accumulate(
        self,
        batch: TrainBatch,
        objective: Objective,
        denominators: Mapping[str, Any],
        options: PassOptions,
        *,
        taught: TargetsOfTeachers | None = None,
        reference: ParameterSwap | None = None,
    ) -> tuple[dict[str, float], dict[str, np.ndarray] | None]:
        """Accumulate gradients for step(); return metrics, and a forward pass's arrays by these weights."""
        for model in self._models:
            model.zero_grad_buffer()
        if self._reduction is not None:
            self._reduction.begin()
        self.optimizer.zero_grad()
        parts, arrays = self.passes.forward_backward(
            batch, objective, denominators, options, taught=taught, reference=reference
        )
        parts = parts if self.place.tp == self.place.cp == 0 else []
        metrics = gradient_frac(reduce_metrics(parts, device=self.device))
        if not self.has_value_head:
            metrics |= self.passes.expert_load.metrics()
        if batch.routes is not None and not self.has_value_head:
            metrics |= self.passes.replay.metrics()
        self._loss = metrics.get("loss", float("nan"))
        return metrics, arrays

    def step(self, *, lr: float | None = None) -> dict[str, float]:
        """Take one optimizer step along the accumulated gradients if they are finite; return metrics."""
        self.note_change()
        result = self.optimizer.step(finite=bool(np.isfinite(self._loss)), lr=lr)
        self.merge()
        self._loss = float("nan")
        return {
            "grad_norm": result.grad_norm,
            "skipped": float(result.skipped),
            "lr": result.lr,
            "optimizer_steps": float(self.optimizer.steps),
        }

    def merge(self) -> None:
        """Recompute the parameters from changed adapters; does nothing without adapters."""
        if self.adapters is not None:
            self.adapters.merge()

    def offload(self, *, keep_parameters: bool = False) -> None:
        """Free gradients, optimizer state and, unless `keep_parameters`, parameters."""
        if keep_parameters:
            self.memory.free_gradients()
        else:
            self.memory.offload()
        self.optimizer.offload()
        self.memory.start_copy()

    def reload(self) -> None:
        """Undo offload()."""
        self.memory.reload()
        self.optimizer.reload()

    def _sum_gradients(self, models: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
        """Run Megatron's gradient reduction without its division by tokens: losses are already divided."""
        if self._reduction is not None:
            self._reduction.finish()
        finalize_model_grads(models, None, **kwargs)
