"""Read the values of a Hugging Face folder into a rank's parameters, piece by piece.

The name tables map each piece to its place; memory contains at most one piece at a time. export_folder.py
writes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.errors import ConfigError
from mrl.models import int4, mxfp4
from mrl.models.family import Family
from mrl.models.folder_format import FolderFormat, FolderLocation
from mrl.models.hf_config import HfConfig
from mrl.models.kernels import float8
from mrl.models.kernels.mxfp4 import dequantise_microscaled
from mrl.models.tensors import BLOCK, SCALES, CheckpointTensor, LocalTensor, TensorSlice
from mrl.resharding.planner.boxes import Box
from mrl.training.hf.hf_folder import (
    check_files,
    open_safetensors,
    require_shape,
    require_type,
    scales_shape,
    tensor_files,
)


def load_folder(
    folder: str | Path,
    family: Family,
    hf_config: HfConfig,
    targets: Iterable[tuple[LocalTensor, Tensor]],
    *,
    drafts: bool = False,
) -> set[str]:
    """Stream a folder of the family into one rank's parameters, with `drafts` also a draft head's; return the
    names that no rank trains. Raise ConfigError unless the folder has exactly the tensors of `hf_config`, in
    its shapes."""
    expected = family.checkpoint_tensors(hf_config, drafts=drafts)
    files, left_out = check_files(folder, family, hf_config, expected)
    load_pieces(targets, files, expected)
    return left_out


def load_pieces(
    targets: Iterable[tuple[LocalTensor, Tensor]],
    files: Mapping[str, Path],
    expected: Iterable[CheckpointTensor],
) -> None:
    """Copy every piece to its place, dequantised if needed; padding becomes 0. Shapes must match."""
    pieces: list[tuple[TensorSlice, Tensor]] = []
    for local, tensor in targets:
        covered = sum(math.prod(piece.shape) for piece in local.pieces)
        if covered != tensor.numel():
            tensor.zero_()
        pieces += [(piece, tensor) for piece in local.pieces]
    boxes = [(piece.tensor, (piece.start, piece.shape)) for piece, _ in pieces]
    for index, values in _stored_boxes(files, expected, boxes):
        piece, tensor = pieces[index]
        box(tensor, piece.local_start, piece.shape).copy_(values)


def read_boxes(
    folder: Path, family: Family, hf_config: HfConfig, dtype: torch.dtype, boxes: Sequence[tuple[str, Box]]
) -> Iterator[tuple[int, Tensor]]:
    """Yield (index, values in `dtype`) of boxes of a folder's tensors, in the files' order, one at a time."""
    expected = family.checkpoint_tensors(hf_config)
    for index, values in _stored_boxes(tensor_files(folder), expected, boxes):
        yield index, values.to(dtype)


def _stored_boxes(
    files: Mapping[str, Path], expected: Iterable[CheckpointTensor], boxes: Sequence[tuple[str, Box]]
) -> Iterator[tuple[int, Tensor]]:
    """Yield (index, stored values, dequantised if needed), file by file and by name."""
    form, expected = FolderFormat.of(files), list(expected)
    homes, tensors = form.locations(expected), {tensor.name: tensor for tensor in expected}
    by_file: dict[Path, list[int]] = defaultdict(list)
    for index in sorted(range(len(boxes)), key=lambda n: boxes[n][0]):
        by_file[files[form.stored_names(tensors[boxes[index][0]])[0]]].append(index)
    for indices in by_file.values():
        with _OpenFiles(files) as opened:
            for index in indices:
                name, (start, shape) = boxes[index]
                stored = form.stored_names(tensors[name])
                if form.is_microscaled(tensors[name]):
                    values = _microscaled(opened, stored, tensors[name], start, shape)
                elif len(stored) == len(int4.SUFFIXES):
                    values = _int4(opened, stored, tensors[name], start, shape)
                else:
                    values = _values(opened, stored, homes[name], start, shape)
                yield index, values


def describe_tensors(files: Mapping[str, Path], dtype: str) -> list[CheckpointTensor]:
    """Describe these tensors as read_whole() returns them, without the scales of float8 tensors; reads no
    weights."""
    with _OpenFiles(files) as opened:
        stored = {name: opened.slice(name) for name in files if not _is_scale_of(name, files)}
        return [
            CheckpointTensor(
                name,
                tuple(s.get_shape()),
                dtype if name + SCALES in files else str(s[:0].dtype).removeprefix("torch."),
            )
            for name, s in stored.items()
        ]


def read_whole(
    files: Mapping[str, Path], names: Iterable[str] | None = None, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return tensors of a folder by name (default: all), exact to the bit; with `dtype` float8 tensors are
    dequantised to it."""
    with _OpenFiles(files) as opened:
        values = {name: opened.slice(name)[:] for name in (files if names is None else names)}
        for name in [name for name in values if dtype is not None and name + SCALES in files]:
            scales = opened.slice(name + SCALES, scales_shape(tuple(values[name].shape)))[:]
            values[name] = float8.dequantise_float8(values[name], scales, (0, 0)).to(dtype)
        return values


def _is_scale_of(name: str, files: Mapping[str, Path]) -> bool:
    return name.endswith(SCALES) and name.removesuffix(SCALES) in files


class _OpenFiles(ExitStack):
    """A folder's files, each opened on first use: a tensor and its scales may be in two."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        super().__init__()
        self._files = files
        self._opened: dict[Path, Any] = {}

    def path(self, name: str) -> Path:
        """Return a tensor's file."""
        return self._files[name]

    def slice(self, name: str, shape: tuple[int, ...] | None = None) -> Any:
        """Return safetensors' slice of a tensor; check its shape if one is given."""
        path = self.path(name)
        if path not in self._opened:
            self._opened[path] = self.enter_context(open_safetensors(path))
        stored = self._opened[path].get_slice(name)
        if shape is not None:
            require_shape(name, path, stored.get_shape(), shape)
        return stored

    def slices(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        """Return the slices of several stored tensors, in order."""
        return [self.slice(name, shape) for name, shape in zip(names, shapes, strict=True)]


def _values(
    opened: _OpenFiles,
    names: Sequence[str],
    home: FolderLocation,
    start: tuple[int, ...],
    shape: tuple[int, ...],
) -> Tensor:
    """Read a box of a checkpoint tensor; `names` are the stored tensor and, for float8, its scales."""
    stored = opened.slice(names[0], home.tensor.shape)
    require_type(names[0], opened.path(names[0]), stored.get_dtype(), is_float8=len(names) > 1)
    if home.tensor.packed:
        values = _values_of(opened, names, home.tensor.shape, home.box(start, shape))[0]
        return values.t() if home.tensor.turned else values
    tensor = home.tensor.parts[0][0]
    if not tensor.stack:
        return _values_of(opened, names, tensor.shape, _slices(start, shape))
    columns, rows = _slices(start[1:], shape[1:]), []
    for part, rows_of_part in _parts(tensor, start[0], shape[0]):
        values = stored[(slice(part, part + 1), *columns, rows_of_part)][0]
        rows.append(values.t() if columns else values)
    return torch.cat(rows)


def _values_of(
    opened: _OpenFiles, names: Sequence[str], full: tuple[int, ...], box: tuple[slice, ...]
) -> Tensor:
    """Read a box of a stored tensor; float8 becomes float32, with the scales of the overlapping blocks."""
    values = opened.slice(names[0])[box]
    if len(names) == 1:
        return values
    edges = [range(at.start // BLOCK, -(-at.stop // BLOCK)) for at in box[-2:]]
    outer = (*box[:-2], *(slice(edge.start, edge.stop) for edge in edges))
    scales = opened.slice(names[1], scales_shape(full))[outer]
    return float8.dequantise_float8(values, scales, (box[-2].start, box[-1].start))


def _microscaled(
    opened: _OpenFiles,
    names: Sequence[str],
    tensor: CheckpointTensor,
    start: tuple[int, ...],
    shape: tuple[int, ...],
) -> Tensor:
    """Read a box [rows, columns] float32 of a stacked checkpoint tensor from its mxfp4 blocks and scales."""
    blocks, scales = opened.slices(names, mxfp4.stored_shapes(tensor))
    groups = slice(start[1] // mxfp4.BLOCK, -(-(start[1] + shape[1]) // mxfp4.BLOCK))
    rows = [
        dequantise_microscaled(
            blocks[part : part + 1, rows_of_part, groups][0], scales[part : part + 1, rows_of_part, groups][0]
        )
        for part, rows_of_part in _parts(tensor, start[0], shape[0])
    ]
    return torch.cat(rows).narrow(1, start[1] - groups.start * mxfp4.BLOCK, shape[1])


def _int4(
    opened: _OpenFiles,
    names: Sequence[str],
    tensor: CheckpointTensor,
    start: tuple[int, ...],
    shape: tuple[int, ...],
) -> Tensor:
    """Read a box [rows, columns] of a checkpoint tensor from int4 numbers and scales, in the scales' type."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32  # takes seconds
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    packed, scales, sizes = opened.slices(names, int4.int4_shapes(tensor.shape))
    if tuple(sizes[:].tolist()) != tensor.shape:
        raise ConfigError(
            f"{names[2]} in {opened.path(names[2])} says {sizes[:].tolist()}, but config.json says "
            f"{list(tensor.shape)}"
        )
    rows, words = slice(start[0], start[0] + shape[0]), int4.GROUP // int4.PER_WORD
    first, last = start[1] // int4.GROUP, -(-(start[1] + shape[1]) // int4.GROUP)
    whole = torch.Size((shape[0], (last - first) * int4.GROUP))
    numbers = unpack_from_int32(packed[rows, first * words : last * words], int4.BITS, whole)
    values = dequantize(numbers, scales[rows, first:last])
    return values.narrow(1, start[1] - first * int4.GROUP, shape[1])


def _parts(tensor: CheckpointTensor, first: int, count: int) -> Iterator[tuple[int, slice]]:
    """Yield the parts of a stack that contain `count` rows from `first`, with their row slices."""
    share, end = tensor.shape[0] // tensor.stack, first + count
    for part in range(first // share, -(-end // share)):
        yield part, slice(max(first - part * share, 0), min(end - part * share, share))


def box(tensor: Tensor, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """Return the view tensor[start : start + shape]."""
    return tensor[_slices(start, shape)]


def _slices(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
