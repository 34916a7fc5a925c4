"""Pickles of checkpoints, read with a closed list of classes: torch's index (`.metadata`), and what earlier releases pickled.

A pickle names the functions that make its objects. Only those of the list are called; any other is an error before it is imported.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Mapping
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
from numpy._core import multiarray

Allowed = Mapping[tuple[str, str], Any]
"""(module, name) of each function or class that a pickle may name -> what it is."""

VALUES: Allowed = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy._core.multiarray", "_reconstruct"): multiarray._reconstruct,  # type: ignore[attr-defined]
    ("numpy._core.multiarray", "scalar"): multiarray.scalar,  # type: ignore[attr-defined]
}
"""Of values that are not tensors."""


def read_pickle(data: bytes, allowed: Allowed) -> Any:
    """Return the object of a pickle; pickle.UnpicklingError where it names something that is not allowed."""
    return _Unpickler(io.BytesIO(data), allowed).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, allowed: Allowed) -> None:
        super().__init__(file)
        self._allowed = allowed

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return self._allowed[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it names {module_name}.{global_name}, which has no place in a checkpoint"
            ) from None


def read_index(folder: Path) -> Any:
    """Return the index (`.metadata`) of a folder of torch's distributed format."""
    return read_pickle((folder / ".metadata").read_bytes(), _index_classes())


def random_classes() -> Allowed:
    """What the random states of earlier releases name."""
    import torch
    from torch import _utils

    def storage(data: bytes) -> Any:
        return torch.load(io.BytesIO(data), weights_only=True)

    return {
        **VALUES,
        ("torch._utils", "_rebuild_tensor_v2"): _utils._rebuild_tensor_v2,
        ("torch.storage", "_load_from_bytes"): storage,
        ("megatron.core.safe_globals", "safe_load_from_bytes"): storage,
    }


def _index_classes() -> Allowed:
    import torch
    from torch.distributed.checkpoint import filesystem, metadata, planner

    members = {
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
        # Version 1 kept the plan of the save.
        planner: ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    }
    dtypes = {("torch", n): d for n, d in vars(torch).items() if isinstance(d, torch.dtype)}
    return {
        **{
            (module.__name__, name): getattr(module, name)
            for module, names in members.items()
            for name in names
        },
        **dtypes,
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("pathlib", "PosixPath"): PosixPath,
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    }
