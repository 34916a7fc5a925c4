"""Reads a Hugging Face folder into a rank's parameters, piece by piece.

Consumes the name tables; holds at most one piece at a time. Writing is in hf_export.py.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from models.manifest import CheckpointTensor, LocalTensor, Piece
from mrl.errors import ConfigError


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json as a dict; ConfigError when absent or not JSON."""
    path = Path(folder) / "config.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist; model.path must be a folder in Hugging Face format"
        ) from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error


def tensor_files(folder: str | Path) -> dict[str, Path]:
    """Tensor name -> its safetensors file, for sharded and single-file folders."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    single = folder / "model.safetensors"
    if not single.exists():
        raise ConfigError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def check_names(
    files: Mapping[str, Path],
    expected: Iterable[CheckpointTensor],
    *,
    folder: str | Path,
    tied: bool,
    untrained: tuple[str, ...] = (),
) -> set[str]:
    """Every expected tensor is there and nothing else; a stored copy of a tied output layer is allowed.

    Returns the names that are left out because they begin with one of `untrained`.
    """
    wanted = {tensor.name for tensor in expected}
    left_out = {name for name in files if name.startswith(untrained)}
    present = set(files) - left_out - ({"lm_head.weight"} if tied else set())
    if missing := sorted(wanted - present):
        raise ConfigError(f"{folder} lacks {len(missing)} of {len(wanted)} tensors, first {missing[:3]}")
    if unknown := sorted(present - wanted):
        raise ConfigError(f"{folder} has {len(unknown)} tensors the model does not know, first {unknown[:3]}")
    return left_out


def load_pieces(
    targets: Iterable[tuple[LocalTensor, Tensor]],
    files: Mapping[str, Path],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Copy every piece into its place; padding is set to 0. Shapes in the files must be those of the config."""
    by_file: dict[Path, list[tuple[Piece, Tensor]]] = defaultdict(list)
    for local, tensor in targets:
        covered = sum(_volume(piece.shape) for piece in local.pieces)
        if covered != tensor.numel():
            tensor.zero_()
        for piece in local.pieces:
            by_file[files[piece.tensor]].append((piece, tensor))
    for path, wanted in by_file.items():
        with safe_open(path, framework="pt") as file:
            for piece, tensor in sorted(wanted, key=lambda item: item[0].tensor):
                stored = file.get_slice(piece.tensor)
                if tuple(stored.get_shape()) != shapes[piece.tensor]:
                    raise ConfigError(
                        f"{piece.tensor} in {path} is {stored.get_shape()}, config.json says {list(shapes[piece.tensor])}"
                    )
                box(tensor, piece.local_start, piece.shape).copy_(stored[_slices(piece.start, piece.shape)])


def box(tensor: Tensor, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """The view tensor[start : start + shape]."""
    return tensor[_slices(start, shape)]


def _slices(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def _volume(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
