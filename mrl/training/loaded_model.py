"""This rank's part of a model whose weights come from a Hugging Face folder."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from mrl.config.sections.model import ModelSection
from mrl.config.sections.training import TrainingSection
from mrl.errors import ConfigError
from mrl.models.families import family_of
from mrl.models.layout import Layout, RankCoordinates
from mrl.models.megatron.build import build_chunks
from mrl.models.tensors import LocalTensor, Spec
from mrl.reward_labels import has_score, require_one_score, reward_model_config
from mrl.training.hf import hf_folder, read_values

log = logging.getLogger(__name__)

HEAD = "output_layer.weight"
"""Megatron's name of the output layer, which in a critic or reward model is the value head."""


class LoadedModel:
    """Model chunks of one rank, their parameters by name, and how to fill them from a folder."""

    def __init__(
        self,
        model: ModelSection,
        training: TrainingSection,
        *,
        layout: Layout,
        place: RankCoordinates,
        device: torch.device,
        has_value_head: bool = False,
        replays: bool = False,
    ) -> None:
        """Build this rank's part with random weights on existing process groups. With `replays` batches may
        contain routes."""
        self.layout, self.place, self.device = layout, place, device
        hf_config = hf_folder.read_config(model.path)
        if has_value_head:
            require_one_score(hf_config, source=model.path)
        self.hf_config = reward_model_config(hf_config) if has_value_head else hf_config
        self.family = family_of(self.hf_config)
        self.dtype = getattr(torch, training.dtype)
        self.has_value_head = has_value_head
        self.chunks = build_chunks(
            self.hf_config,
            training,
            layout,
            max_length=model.max_length,
            device=device,
            has_value_head=has_value_head,
            replays=replays,
        )

    def match_names(self, dtype: str) -> list[tuple[LocalTensor, Tensor]]:
        """Pair the name table's tensors with the real parameters; raise ConfigError for any difference."""
        real = {
            (chunk, name): parameter
            for chunk, model in enumerate(self.chunks.models)
            for name, parameter in model.weights().items()
        }
        table = self.family.local_tensors(
            self.hf_config,
            self.layout,
            self.place,
            dtype=dtype,
            spec=self.spec,
            drafts=self.chunks.has_drafts,
        )
        named = {(local.chunk, local.name): local for local in table}
        if real.keys() != named.keys():
            raise ConfigError(
                f"name table of {self.family.model_type} and Megatron disagree on rank {self.place.rank}: "
                f"only in the table {sorted(named.keys() - real.keys())[:4]}, "
                f"only in Megatron {sorted(real.keys() - named.keys())[:4]}"
            )
        for key, local in named.items():
            if tuple(real[key].shape) != local.shape:
                raise ConfigError(
                    f"{local.name}: shape {local.shape} in the table, {tuple(real[key].shape)} in Megatron"
                )
        return [(local, real[local.chunk, local.name]) for local in table]

    def fill(
        self, path: str | Path, located: list[tuple[LocalTensor, Tensor]], *, drafts: bool = False
    ) -> None:
        """Stream a Hugging Face folder into parameters, paired by match_names(); with `drafts` they include a
        draft head's."""
        hf_config = self.hf_config
        targets = [(local, parameter.data) for local, parameter in located]
        if self.has_value_head and not has_score(folder_config := hf_folder.read_config(path)):
            hf_config, targets = (
                folder_config,
                [(local, data) for local, data in targets if local.name != HEAD],
            )
        untrained = read_values.load_folder(path, self.family, hf_config, targets, drafts=drafts)
        if drafts:
            copies = tuple(f".{name}" for name in self.family.draft_copies)
            untrained = {name for name in untrained if not name.endswith(copies)}
        if untrained and self.place.rank == 0 and not self.has_value_head:
            prefixes = ", ".join((*self.family.draft_prefixes(self.hf_config), *self.family.copied_prefixes))
            log.warning("%s: %d tensors under %s are not trained", path, len(untrained), prefixes)

    @property
    def spec(self) -> Spec:
        """Layer spec that names the parameters."""
        return self.chunks.choice.spec
