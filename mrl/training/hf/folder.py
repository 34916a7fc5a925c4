"""Reads a Hugging Face folder into a rank's parameters, piece by piece.

The name tables say where each piece goes; memory holds at most one piece at a time. Writing is in export.py.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mrl.errors import ConfigError
from mrl.models import microscaling
from mrl.models.family import Family
from mrl.models.folder_form import FolderForm, Home
from mrl.models.hf_config import HfConfig, language_model, stored_block
from mrl.models.kernels.microscaling import widened
from mrl.models.tensors import SCALES, CheckpointTensor, LocalTensor, Piece
from mrl.resharding.planner import quantised
from mrl.resharding.planner.boxes import Box


def read_config(folder: str | Path) -> dict[str, Any]:
    """What config.json says of the model of text; ConfigError when it cannot be read or is not JSON."""
    path = Path(folder) / "config.json"
    try:
        return language_model(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give a folder in Hugging Face format") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error


def tensor_files(folder: str | Path) -> dict[str, Path]:
    """Tensor name -> its safetensors file, for sharded and single-file folders."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in _weight_map(index).items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ConfigError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
    with _opened(single) as file:
        return dict.fromkeys(file.keys(), single)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name; ConfigError for another file than such an index."""
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{index} is no index of safetensors files: {error!r}") from error
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise ConfigError(f"{index} is no index of safetensors files: its weight_map is not of names")
    return found


def _opened(path: Path) -> Any:
    """safetensors' reader of a file; ConfigError where it is damaged."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} is no readable safetensors file: {error}; download it again") from error


def load_folder(
    folder: str | Path, family: Family, hf_config: HfConfig, targets: Iterable[tuple[LocalTensor, Tensor]]
) -> set[str]:
    """Streams a folder of the family into one rank's parameters; returns the names that no rank trains.

    ConfigError unless the folder has exactly the tensors of `hf_config`, in its shapes.
    """
    files, left_out = check_folder(folder, family, hf_config)
    expected = family.checkpoint_tensors(hf_config)
    load_pieces(targets, files, expected, block=stored_block(read_config(folder)))
    return left_out


def check_folder(folder: str | Path, family: Family, hf_config: HfConfig) -> tuple[dict[str, Path], set[str]]:
    """(tensor name -> file, names that no rank trains) of a folder of the family; reads no weights.

    ConfigError unless the folder has exactly the tensors of `hf_config`, in files that are there.
    """
    files = tensor_files(folder)
    if absent := sorted({path.name for path in files.values() if not path.is_file()}):
        raise ConfigError(
            f"{folder} lacks {len(absent)} of the files its index names, first {absent[:3]}; download them again"
        )
    left_out = check_names(
        files,
        family.checkpoint_tensors(hf_config),
        folder=folder,
        tied=bool(hf_config.get("tie_word_embeddings", False)),
        untrained=(*family.untrained(hf_config), *family.carried),
        block=stored_block(read_config(folder)),
    )
    return files, left_out


def check_names(
    files: Mapping[str, Path],
    expected: Iterable[CheckpointTensor],
    *,
    folder: str | Path,
    tied: bool,
    untrained: tuple[str, ...] = (),
    block: int = 0,
) -> set[str]:
    """Requires every expected tensor and nothing else; a stored copy of a tied output layer is allowed.

    `block`: edge of the blocks that linear weights are quantised in, whose scales must then be there; 0 where
    none are. Returns the names that are left out because they begin with one of `untrained`.
    """
    form = FolderForm.of(files)
    names = {name for tensor in quantised.checkpoint(expected, block) for name in form.stored_names(tensor)}
    left_out = {name for name in files if name.startswith(untrained)}
    present = set(files) - left_out - ({"lm_head.weight"} if tied else set())
    if missing := sorted(names - present):
        raise ConfigError(f"{folder} lacks {len(missing)} of {len(names)} tensors, first {missing[:3]}")
    if unknown := sorted(present - names):
        raise ConfigError(f"{folder} has {len(unknown)} tensors the model does not know, first {unknown[:3]}")
    return left_out


def load_pieces(
    targets: Iterable[tuple[LocalTensor, Tensor]],
    files: Mapping[str, Path],
    expected: Iterable[CheckpointTensor],
    *,
    block: int = 0,
) -> None:
    """Copies every piece into its place; padding is set to 0. Shapes in the files must be the config's.

    `block`: edge of the blocks that linear weights are quantised in; they are made wide again.
    """
    pieces: list[tuple[Piece, Tensor]] = []
    for local, tensor in targets:
        covered = sum(math.prod(piece.shape) for piece in local.pieces)
        if covered != tensor.numel():
            tensor.zero_()
        pieces += [(piece, tensor) for piece in local.pieces]
    boxes = [(piece.tensor, (piece.start, piece.shape)) for piece, _ in pieces]
    for index, values in _stored_boxes(files, expected, boxes, block):
        piece, tensor = pieces[index]
        box(tensor, piece.local_start, piece.shape).copy_(values)


def read_boxes(
    folder: Path, family: Family, hf_config: HfConfig, dtype: torch.dtype, boxes: Sequence[tuple[str, Box]]
) -> Iterator[tuple[int, Tensor]]:
    """(index, values in `dtype`) of boxes of a folder's tensors, in the files' order; one is held at a time."""
    expected, block = family.checkpoint_tensors(hf_config), stored_block(read_config(folder))
    for index, values in _stored_boxes(tensor_files(folder), expected, boxes, block):
        yield index, values.to(dtype)


def _stored_boxes(
    files: Mapping[str, Path],
    expected: Iterable[CheckpointTensor],
    boxes: Sequence[tuple[str, Box]],
    block: int,
) -> Iterator[tuple[int, Tensor]]:
    """(index, stored values, made wide where they are quantised), file by file and by name."""
    form, expected = FolderForm.of(files), list(expected)
    homes, tensors = form.homes(expected), {tensor.name: tensor for tensor in expected}
    by_file: dict[Path, list[int]] = defaultdict(list)
    for index in sorted(range(len(boxes)), key=lambda n: boxes[n][0]):
        by_file[files[form.stored_names(tensors[boxes[index][0]])[0]]].append(index)
    for indices in by_file.values():
        with _OpenFiles(files) as opened:
            for index in indices:
                name, (start, shape) = boxes[index]
                if form.is_microscaled(tensors[name]):
                    yield (
                        index,
                        _microscaled(opened, form.stored_names(tensors[name]), tensors[name], start, shape),
                    )
                    continue
                home = homes[name]
                values = _values(opened.slice(home.tensor.name, home.tensor.shape), home, start, shape)
                if block and quantised.quantises(name):
                    scales = opened.slice(home.tensor.name + SCALES)
                    values = _widened(values, scales, start, shape, block)
                yield index, values


def describe(files: Mapping[str, Path]) -> list[CheckpointTensor]:
    """These tensors as the files have them; reads no weights."""
    with _OpenFiles(files) as opened:
        stored = {name: opened.slice(name) for name in files}
        return [
            CheckpointTensor(name, tuple(s.get_shape()), str(s[:0].dtype).removeprefix("torch."))
            for name, s in stored.items()
        ]


def read_whole(files: Mapping[str, Path]) -> dict[str, Tensor]:
    """These tensors, to the last bit."""
    with _OpenFiles(files) as opened:
        return {name: opened.slice(name)[:] for name in files}


class _OpenFiles(ExitStack):
    """A folder's files, each opened when first asked for: a tensor and its scales may be in two."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        super().__init__()
        self._files = files
        self._opened: dict[Path, Any] = {}

    def slice(self, name: str, shape: tuple[int, ...] | None = None) -> Any:
        """safetensors' slice of a tensor, which must have the shape, where one is given."""
        path = self._files[name]
        if path not in self._opened:
            self._opened[path] = self.enter_context(_opened(path))
        stored = self._opened[path].get_slice(name)
        if shape is not None and tuple(stored.get_shape()) != shape:
            raise ConfigError(f"{name} in {path} is {stored.get_shape()}, config.json says {list(shape)}")
        return stored


def _values(stored: Any, home: Home, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """A box of a checkpoint tensor from safetensors' slice of what the folder has."""
    if home.tensor.packed:
        return stored[home.box(start, shape)][0]
    tensor = home.tensor.parts[0][0]
    if not tensor.stack:
        return stored[_slices(start, shape)]
    columns, rows = _slices(start[1:], shape[1:]), []
    for part, own in _parts(tensor, start[0], shape[0]):
        values = stored[(slice(part, part + 1), *columns, own)][0]
        rows.append(values.t() if columns else values)
    return torch.cat(rows)


def _microscaled(
    opened: _OpenFiles,
    names: Sequence[str],
    tensor: CheckpointTensor,
    start: tuple[int, ...],
    shape: tuple[int, ...],
) -> Tensor:
    """A box [rows, columns] float32 of a stacked checkpoint tensor from its mxfp4 blocks and scales."""
    blocks, scales = (
        opened.slice(name, stored)
        for name, stored in zip(names, microscaling.stored_shapes(tensor), strict=True)
    )
    groups = slice(start[1] // microscaling.BLOCK, -(-(start[1] + shape[1]) // microscaling.BLOCK))
    rows = [
        widened(blocks[part : part + 1, own, groups][0], scales[part : part + 1, own, groups][0])
        for part, own in _parts(tensor, start[0], shape[0])
    ]
    return torch.cat(rows).narrow(1, start[1] - groups.start * microscaling.BLOCK, shape[1])


def _parts(tensor: CheckpointTensor, first: int, count: int) -> Iterator[tuple[int, slice]]:
    """The parts of a stack that hold `count` rows from `first`, with their own rows."""
    share, end = tensor.shape[0] // tensor.stack, first + count
    for part in range(first // share, -(-end // share)):
        yield part, slice(max(first - part * share, 0), min(end - part * share, share))


def _widened(
    values: Tensor, scales: Any, start: tuple[int, ...], shape: tuple[int, ...], block: int
) -> Tensor:
    """[rows, cols] float32 from float8 values and the safetensors slice of their tensor's scales."""
    ends = [at + size for at, size in zip(start, shape, strict=True)]
    outer = [at // block for at in start]
    own = scales[tuple(slice(a, -(-end // block)) for a, end in zip(outer, ends, strict=True))].float()
    for axis in range(own.ndim):
        wide = own.repeat_interleave(block, axis)
        own = wide.narrow(axis, start[axis] - outer[axis] * block, shape[axis])
    return values.float() * own


def box(tensor: Tensor, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """The view tensor[start : start + shape]."""
    return tensor[_slices(start, shape)]


def _slices(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
