"""Distributed checkpoints made of model folders, without ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save

from mrl.models.families import family_of
from mrl.models.layout import Layout
from mrl.models.tensors import LOCAL
from mrl.training.hf import hf_folder
from mrl.training.hf.read_values import box
from tests.support.image_folders import text_alone


def write_checkpoint(folder: Path, source: Path) -> None:
    """Write a model folder as a distributed checkpoint with a tensor per layer and expert width."""
    hf_config, weights = hf_folder.read_config(source), {}
    for file in set(hf_folder.tensor_files(source).values()):
        weights |= text_alone(load_file(file))
    for tensor in family_of(hf_config).checkpoint_tensors(hf_config):
        if tensor.stack:  # the folder stores transposed matrices
            held = weights[tensor.name]
            weights[tensor.name] = (held.transpose(1, 2) if held.ndim > 2 else held).reshape(tensor.shape)
    state: dict[str, Any] = {}
    experts: dict[str, list[torch.Tensor]] = {}
    for local in family_of(hf_config).local_tensors(hf_config, Layout(), Layout().coordinates(0), spec=LOCAL):
        value = torch.empty(local.shape)
        for piece in local.pieces:
            box(value, piece.local_start, piece.shape).copy_(
                box(weights[piece.tensor], piece.start, piece.shape)
            )
        if ".local_experts." in local.name:
            layer, _, suffix = local.name.partition(".local_experts.")
            experts.setdefault(f"{layer}.experts.{suffix.partition('.')[2]}", []).append(value)
        else:
            state[local.name] = value
    state |= {key: torch.stack(values) for key, values in experts.items()}
    save(state, checkpoint_id=folder, no_dist=True)
