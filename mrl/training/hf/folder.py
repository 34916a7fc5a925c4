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
from mrl.models import int4, microscaling
from mrl.models.family import Family
from mrl.models.folder_form import FolderForm, FolderTensor, Home
from mrl.models.hf_config import HfConfig, language_model
from mrl.models.kernels import float8
from mrl.models.kernels.microscaling import widened
from mrl.models.tensors import BLOCK, SCALES, CheckpointTensor, LocalTensor, Piece
from mrl.resharding.planner.boxes import Box

_WIDE, _FLOAT8 = ("F64", "F32", "BF16", "F16"), ("F8_E4M3",)
"""safetensors' words for the types of values that are read without scales, and with them."""


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
    with _opened(single, "np") as file:
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


def _opened(path: Path, framework: str = "pt") -> Any:
    """safetensors' reader of a file; ConfigError where it is damaged. Torch's ("pt") asks for room for the whole file, which
    headers need not ("np")."""
    try:
        return safe_open(path, framework=framework)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} is no readable safetensors file: {error}; download it again") from error


def load_folder(
    folder: str | Path, family: Family, hf_config: HfConfig, targets: Iterable[tuple[LocalTensor, Tensor]]
) -> set[str]:
    """Streams a folder of the family into one rank's parameters; returns the names that no rank trains.

    ConfigError unless the folder has exactly the tensors of `hf_config`, in its shapes.
    """
    expected = family.checkpoint_tensors(hf_config)
    files, left_out = _check_files(folder, family, hf_config, expected)
    load_pieces(targets, files, expected)
    return left_out


def check_folder(folder: str | Path, family: Family, hf_config: HfConfig) -> tuple[dict[str, Path], set[str]]:
    """(tensor name -> file, names that no rank trains) of a folder of the family; reads the files' headers, no weights.

    ConfigError unless the folder has exactly the tensors of `hf_config`, in their shapes and in types that are read.
    """
    expected = family.checkpoint_tensors(hf_config)
    files, left_out = _check_files(folder, family, hf_config, expected)
    _check_headers(files, expected)
    return files, left_out


def _check_files(
    folder: str | Path, family: Family, hf_config: HfConfig, expected: Sequence[CheckpointTensor]
) -> tuple[dict[str, Path], set[str]]:
    """check_folder() without opening each file of a folder of several."""
    files = tensor_files(folder)
    if absent := sorted(path.name for path in set(files.values()) if not path.is_file()):
        raise ConfigError(
            f"{folder} lacks {len(absent)} of the files its index names, first {absent[:3]}; download them again"
        )
    left_out = check_names(
        files,
        expected,
        folder=folder,
        tied=bool(hf_config.get("tie_word_embeddings", False)),
        untrained=(*family.untrained(hf_config), *family.carried),
    )
    return files, left_out


def check_names(
    files: Mapping[str, Path],
    expected: Iterable[CheckpointTensor],
    *,
    folder: str | Path,
    tied: bool,
    untrained: tuple[str, ...] = (),
) -> set[str]:
    """Requires every expected tensor and nothing else; a stored copy of a tied output layer is allowed.

    Returns the names that are left out because they begin with one of `untrained`.
    """
    form = FolderForm.of(files)
    names = {name for tensor in expected for name in form.stored_names(tensor)}
    left_out = {name for name in files if name.startswith(untrained)}
    present = set(files) - left_out - ({"lm_head.weight"} if tied else set())
    if missing := sorted(names - present):
        raise ConfigError(f"{folder} lacks {len(missing)} of {len(names)} tensors, first {missing[:3]}")
    if unknown := sorted(present - names):
        raise ConfigError(f"{folder} has {len(unknown)} tensors the model does not know, first {unknown[:3]}")
    return left_out


def _check_headers(files: Mapping[str, Path], expected: Iterable[CheckpointTensor]) -> None:
    """ConfigError unless the headers of the files say the expected shapes, and types that are read."""
    form, headers = FolderForm.of(files), _headers(files)
    for tensor in form.tensors(expected):
        shapes = _stored_shapes(form, tensor)
        for name, shape in shapes.items():
            _require_shape(name, files[name], headers[name][0], shape)
        if tensor.name in shapes:  # else it is mxfp4 or int4
            _require_type(tensor.name, files[tensor.name], headers[tensor.name][1], len(shapes) > 1)


def _headers(files: Mapping[str, Path]) -> dict[str, tuple[list[int], str]]:
    """(shape, safetensors' word for the type) of each tensor; one file is open at a time."""
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name, path in files.items():
        by_file[path].append(name)
    found = {}
    for path, names in by_file.items():
        with _opened(path, "np") as file:
            if absent := sorted(set(names) - set(file.keys())):
                raise ConfigError(
                    f"{path} lacks {len(absent)} of the tensors that the folder's index says it has, first {absent[:3]}; "
                    "download both again"
                )
            for name in names:
                stored = file.get_slice(name)
                found[name] = stored.get_shape(), stored.get_dtype()
    return found


def _stored_shapes(form: FolderForm, tensor: FolderTensor) -> dict[str, tuple[int, ...]]:
    """The folder's tensors that hold one of its wide form, with their shapes."""
    first = tensor.parts[0][0]
    names = form.stored_names(first)
    if form.is_microscaled(first):
        return dict(zip(names, microscaling.stored_shapes(first), strict=True))
    if len(names) == len(int4.SUFFIXES):
        return dict(zip(names, int4.stored_shapes(first.shape), strict=True))
    return dict(zip(names, (tensor.shape, _grid(tensor.shape)), strict=False))


def _grid(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a float8 tensor."""
    return (*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:]))


def _require_shape(name: str, path: Path, found: list[int], shape: tuple[int, ...]) -> None:
    if tuple(found) != shape:
        raise ConfigError(f"{name} in {path} is {found}, config.json says {list(shape)}")


def _require_type(name: str, path: Path, kind: str, is_float8: bool) -> None:
    """ConfigError unless a tensor has values as it should, with scales (`is_float8`) and without."""
    if kind not in (_FLOAT8 if is_float8 else _WIDE):
        has = "has" if is_float8 else "lacks"
        raise ConfigError(
            f"{name} in {path} is {kind}, and the folder {has} {name}{SCALES}; download both again"
        )


def load_pieces(
    targets: Iterable[tuple[LocalTensor, Tensor]],
    files: Mapping[str, Path],
    expected: Iterable[CheckpointTensor],
) -> None:
    """Copies every piece into its place, made wide where it is quantised; padding is set to 0. Shapes in the
    files must be the config's."""
    pieces: list[tuple[Piece, Tensor]] = []
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
    """(index, values in `dtype`) of boxes of a folder's tensors, in the files' order; one is held at a time."""
    expected = family.checkpoint_tensors(hf_config)
    for index, values in _stored_boxes(tensor_files(folder), expected, boxes):
        yield index, values.to(dtype)


def _stored_boxes(
    files: Mapping[str, Path], expected: Iterable[CheckpointTensor], boxes: Sequence[tuple[str, Box]]
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
                stored = form.stored_names(tensors[name])
                if form.is_microscaled(tensors[name]):
                    values = _microscaled(opened, stored, tensors[name], start, shape)
                elif len(stored) == len(int4.SUFFIXES):
                    values = _int4(opened, stored, tensors[name], start, shape)
                else:
                    values = _values(opened, stored, homes[name], start, shape)
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

    def path(self, name: str) -> Path:
        """The file of a tensor."""
        return self._files[name]

    def slice(self, name: str, shape: tuple[int, ...] | None = None) -> Any:
        """safetensors' slice of a tensor, which must have the shape, where one is given."""
        path = self.path(name)
        if path not in self._opened:
            self._opened[path] = self.enter_context(_opened(path))
        stored = self._opened[path].get_slice(name)
        if shape is not None:
            _require_shape(name, path, stored.get_shape(), shape)
        return stored

    def slices(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        """Those of several tensors that hold one, in order."""
        return [self.slice(name, shape) for name, shape in zip(names, shapes, strict=True)]


def _values(
    opened: _OpenFiles, names: Sequence[str], home: Home, start: tuple[int, ...], shape: tuple[int, ...]
) -> Tensor:
    """A box of a checkpoint tensor from the folder's, of which `names` are that and, where it is float8, its scales."""
    stored = opened.slice(names[0], home.tensor.shape)
    _require_type(names[0], opened.path(names[0]), stored.get_dtype(), is_float8=len(names) > 1)
    if home.tensor.packed:
        return _values_of(opened, names, home.tensor.shape, home.box(start, shape))[0]
    tensor = home.tensor.parts[0][0]
    if not tensor.stack:
        return _values_of(opened, names, tensor.shape, _slices(start, shape))
    columns, rows = _slices(start[1:], shape[1:]), []
    for part, own in _parts(tensor, start[0], shape[0]):
        values = stored[(slice(part, part + 1), *columns, own)][0]
        rows.append(values.t() if columns else values)
    return torch.cat(rows)


def _values_of(
    opened: _OpenFiles, names: Sequence[str], full: tuple[int, ...], box: tuple[slice, ...]
) -> Tensor:
    """A box of a folder's tensor; float32 of float8 values, with the scales of the blocks that it touches."""
    values = opened.slice(names[0])[box]
    if len(names) == 1:
        return values
    edges = [range(at.start // BLOCK, -(-at.stop // BLOCK)) for at in box[-2:]]
    outer = (*box[:-2], *(slice(edge.start, edge.stop) for edge in edges))
    scales = opened.slice(names[1], _grid(full))[outer]
    return float8.widened(values, scales, (box[-2].start, box[-1].start))


def _microscaled(
    opened: _OpenFiles,
    names: Sequence[str],
    tensor: CheckpointTensor,
    start: tuple[int, ...],
    shape: tuple[int, ...],
) -> Tensor:
    """A box [rows, columns] float32 of a stacked checkpoint tensor from its mxfp4 blocks and scales."""
    blocks, scales = opened.slices(names, microscaling.stored_shapes(tensor))
    groups = slice(start[1] // microscaling.BLOCK, -(-(start[1] + shape[1]) // microscaling.BLOCK))
    rows = [
        widened(blocks[part : part + 1, own, groups][0], scales[part : part + 1, own, groups][0])
        for part, own in _parts(tensor, start[0], shape[0])
    ]
    return torch.cat(rows).narrow(1, start[1] - groups.start * microscaling.BLOCK, shape[1])


def _int4(
    opened: _OpenFiles,
    names: Sequence[str],
    tensor: CheckpointTensor,
    start: tuple[int, ...],
    shape: tuple[int, ...],
) -> Tensor:
    """A box [rows, columns] of a checkpoint tensor from its int4 numbers and scales, in the type of the scales."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32  # takes seconds
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    packed, scales, sizes = opened.slices(names, int4.stored_shapes(tensor.shape))
    if tuple(sizes[:].tolist()) != tensor.shape:
        raise ConfigError(
            f"{names[2]} in {opened.path(names[2])} says {sizes[:].tolist()}, config.json says {list(tensor.shape)}"
        )
    rows, words = slice(start[0], start[0] + shape[0]), int4.GROUP // int4.PER_WORD
    first, last = start[1] // int4.GROUP, -(-(start[1] + shape[1]) // int4.GROUP)
    whole = torch.Size((shape[0], (last - first) * int4.GROUP))
    numbers = unpack_from_int32(packed[rows, first * words : last * words], int4.BITS, whole)
    values = dequantize(numbers, scales[rows, first:last])
    return values.narrow(1, start[1] - first * int4.GROUP, shape[1])


def _parts(tensor: CheckpointTensor, first: int, count: int) -> Iterator[tuple[int, slice]]:
    """The parts of a stack that hold `count` rows from `first`, with their own rows."""
    share, end = tensor.shape[0] // tensor.stack, first + count
    for part in range(first // share, -(-end // share)):
        yield part, slice(max(first - part * share, 0), min(end - part * share, share))


def box(tensor: Tensor, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """The view tensor[start : start + shape]."""
    return tensor[_slices(start, shape)]


def _slices(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
