"""Read torch's index (`.metadata`), a pickle, with a closed list of classes.

A pickle names the functions that build its objects. Only listed ones are called; any other raises an error
before it is imported.
"""

from __future__ import annotations

import collections
import io
import pickle
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

_MEMBERS: dict[Any, tuple[str, ...]] = {
    metadata: (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    filesystem: ("_StorageInfo",),
}
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(module.__name__, n): getattr(module, n) for module, names in _MEMBERS.items() for n in names},
    **{("torch", n): dtype for n, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)},
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("pathlib", "PosixPath"): PosixPath,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}
"""(module, name) of each function or class that an index may name -> the object."""


def read_index(folder: Path) -> Any:
    """Return the index of a folder in torch's distributed format; UnpicklingError for unlisted names."""
    return _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return _ALLOWED[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it names {module_name}.{global_name}, which is not allowed in a checkpoint"
            ) from None
