"""Check a Hugging Face folder against its model: config.json, the index, the files' headers.

Reads no weights and does not need torch: read_values.py reads them.
"""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from mrl.errors import ConfigError
from mrl.models import int4, mxfp4
from mrl.models.family import HEAD, Family
from mrl.models.folder_format import FolderFormat, FolderTensor
from mrl.models.hf_config import HfConfig, language_model
from mrl.models.tensors import BLOCK, SCALES, CheckpointTensor
from mrl.observe.model_card import base_model

_WIDE, _FLOAT8 = ("F64", "F32", "BF16", "F16"), ("F8_E4M3",)
"""safetensors' names of the types that are read without scales, and with them."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return the text model's part of config.json; raise ConfigError if it is unreadable or not JSON."""
    path = Path(folder) / "config.json"
    try:
        return language_model(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        name = base_model(str(folder))
        advice = f"run `hf download {name}` on each node" if name else "give a folder in Hugging Face format"
        raise ConfigError(f"{path} does not exist on {socket.gethostname()}; {advice}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error


def tensor_files(folder: str | Path) -> dict[str, Path]:
    """Return tensor name -> its safetensors file, for sharded and single-file folders."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in _weight_map(index).items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ConfigError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
    with open_safetensors(single, "np") as file:
        return dict.fromkeys(file.keys(), single)


def _weight_map(index: Path) -> dict[str, str]:
    """Return tensor name -> file name; raise ConfigError for an invalid index."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{index} is not an index of safetensors files: {error!r}") from error
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ConfigError(f"{index} is not an index of safetensors files: its weight_map lacks file names")
    return weight_map


def open_safetensors(path: Path, framework: str = "pt") -> Any:
    """Open a safetensors file; raise ConfigError if it is damaged. The reader for torch ("pt") reserves
    memory for the whole file, which headers do not need ("np")."""
    try:
        return safe_open(path, framework=framework)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file: {error}; download it again") from error


def check_folder(
    folder: str | Path, family: Family, hf_config: HfConfig, *, drafts: bool = False
) -> tuple[dict[str, Path], set[str]]:
    """Check a folder of the family by its headers; return (tensor name -> file, names that no rank trains).
    Raise ConfigError unless it has exactly the tensors of `hf_config`, with their shapes and readable types;
    with `drafts` also those of a draft head."""
    expected = family.checkpoint_tensors(hf_config, drafts=drafts)
    files, left_out = check_files(folder, family, hf_config, expected)
    _check_headers(files, expected)
    return files, left_out


def check_files(
    folder: str | Path, family: Family, hf_config: HfConfig, expected: Sequence[CheckpointTensor]
) -> tuple[dict[str, Path], set[str]]:
    """Do check_folder() without opening each file of a sharded folder."""
    files = tensor_files(folder)
    if absent := sorted(path.name for path in set(files.values()) if not path.is_file()):
        raise ConfigError(
            f"{folder} lacks {len(absent)} of the files in its index, first {absent[:3]}; download them again"
        )
    left_out = check_names(
        files,
        expected,
        folder=folder,
        tied=bool(hf_config.get("tie_word_embeddings", False)),
        untrained=(*family.draft_prefixes(hf_config), *family.copied_prefixes),
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
    """Require every expected tensor and nothing else; a stored copy of a tied output layer is allowed. Return
    the names that are left out because they begin with one of `untrained`."""
    form = FolderFormat.of(files)
    names = {name for tensor in expected for name in form.stored_names(tensor)}
    left_out = {name for name in files if name.startswith(untrained)} - names
    present = set(files) - left_out - ({form.name(HEAD)} if tied else set())
    if missing := sorted(names - present):
        raise ConfigError(f"{folder} lacks {len(missing)} of {len(names)} tensors, first {missing[:3]}")
    if unknown := sorted(present - names):
        raise ConfigError(f"{folder} has {len(unknown)} tensors unknown to the model, first {unknown[:3]}")
    return left_out


def _check_headers(files: Mapping[str, Path], expected: Iterable[CheckpointTensor]) -> None:
    """Raise ConfigError unless the files' headers have the expected shapes and readable types."""
    form, headers = FolderFormat.of(files), _headers(files)
    for tensor in form.tensors(expected):
        shapes = _stored_shapes(form, tensor)
        for name, shape in shapes.items():
            require_shape(name, files[name], headers[name][0], shape)
        if tensor.name in shapes:  # else it is mxfp4 or int4
            require_type(tensor.name, files[tensor.name], headers[tensor.name][1], len(shapes) > 1)


def _headers(files: Mapping[str, Path]) -> dict[str, tuple[list[int], str]]:
    """Return (shape, safetensors' name of the type) of each tensor; one file is open at a time."""
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name, path in files.items():
        by_file[path].append(name)
    headers = {}
    for path, names in by_file.items():
        with open_safetensors(path, "np") as file:
            if absent := sorted(set(names) - set(file.keys())):
                raise ConfigError(
                    f"{path} lacks {len(absent)} of the tensors in the folder's index, first {absent[:3]}; "
                    "download both again"
                )
            for name in names:
                stored = file.get_slice(name)
                headers[name] = stored.get_shape(), stored.get_dtype()
    return headers


def _stored_shapes(form: FolderFormat, tensor: FolderTensor) -> dict[str, tuple[int, ...]]:
    """Return the stored tensors of one wide tensor, with their shapes."""
    first = tensor.parts[0][0]
    names = form.stored_names(first)
    if form.is_microscaled(first):
        return dict(zip(names, mxfp4.stored_shapes(first), strict=True))
    if len(names) == len(int4.SUFFIXES):
        return dict(zip(names, int4.int4_shapes(first.shape), strict=True))
    return dict(zip(names, (tensor.shape, scales_shape(tensor.shape)), strict=False))


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a float8 tensor's scales."""
    return (*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:]))


def require_shape(name: str, path: Path, stored: list[int], shape: tuple[int, ...]) -> None:
    if tuple(stored) != shape:
        raise ConfigError(f"{name} in {path} is {stored}, but config.json says {list(shape)}")


def require_type(name: str, path: Path, kind: str, is_float8: bool) -> None:
    """Raise ConfigError unless a tensor's type fits whether it has scales (`is_float8`)."""
    if kind not in (_FLOAT8 if is_float8 else _WIDE):
        has = "has" if is_float8 else "lacks"
        raise ConfigError(
            f"{name} in {path} is {kind}, but the folder {has} {name}{SCALES}; download both again"
        )
