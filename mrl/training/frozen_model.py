"""A model of its own shape that only makes forward passes: a teacher unlike the policy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from mrl.config.sections.model import ModelSection
from mrl.config.sections.training import TrainingSection
from mrl.models.families import family_of
from mrl.models.layout import RankCoordinates
from mrl.training.hf import hf_folder
from mrl.training.loaded_model import LoadedModel
from mrl.training.passes import Passes
from mrl.training.platform.host_copies import HostCopies


class FrozenModel(LoadedModel):
    """Loaded weights without gradients or optimizer; on a GPU they are in host memory between passes."""

    def __init__(
        self,
        path: str | Path,
        training: TrainingSection,
        *,
        max_length: int,
        place: RankCoordinates,
        device: torch.device,
    ) -> None:
        """Build and load the folder's model on the policy's process groups."""
        model = ModelSection(path=str(path), max_length=max_length)
        hf_config = hf_folder.read_config(path)
        training = training.for_teacher(has_experts=bool(family_of(hf_config).num_experts(hf_config)))
        layout = training.layout.sizes()
        super().__init__(model, training, layout=layout, place=place, device=device)
        for chunk in self.chunks.models:
            chunk.requires_grad_(False)
        self.fill(path, self.match_names(training.dtype))
        self._passes = Passes(
            self.chunks, self.chunks.models, training=training, layout=layout, place=place, device=device
        )
        self._tensors = [tensor for chunk in self.chunks.models for tensor in _owned(chunk)]
        self._copies = None if device.type == "cpu" else HostCopies(device, keep=True)
        if self._copies is not None:
            self._copies.move_out(self._tensors)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[Passes]:
        """Bring the weights to the device and yield the passes; free the device's memory afterwards."""
        if self._copies is None:
            yield self._passes
            return
        self._copies.move_back(self._tensors)
        try:
            yield self._passes
        finally:
            self._copies.move_out(self._tensors)


def _owned(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return a module's parameters and buffers, each once."""
    return list({id(x): x.data for x in (*module.parameters(), *module.buffers())}.values())
