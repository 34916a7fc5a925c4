"""Check that operations stay on "meta" and within a size; count reads, which would wait on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mrl

PACKAGE = f"{Path(mrl.__file__).parent}/"
META = torch.device("meta")
VALUE = torch.ops.aten._local_scalar_dense.default
COPY = torch.ops.aten._to_copy.default
ON_THE_HOST = (torch.ops.aten.lift_fresh.default, torch.ops.aten.detach.default)
"""Conversions between a numpy array's memory and a tensor."""


class OnMeta(TorchDispatchMode):
    """Rejects operations off "meta" or above `most` elements, except copies to and from the device."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self.waits: list[str] = []
        """Callers that read a value (always 1) or fetched a tensor (always zeros)."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: tuple[Any, ...] = (), options: Any = None
    ) -> Any:
        if operation is VALUE:
            self.waits.append(_asker())
            return 1
        if operation is COPY and options.get("device", META) != META:
            self.waits.append(_asker())
            return torch.zeros(arguments[0].shape, dtype=options.get("dtype") or arguments[0].dtype)
        result = operation(*arguments, **(options or {}))
        if operation not in ON_THE_HOST:
            self._check(operation, result if operation is COPY else (result, arguments, options))
        return result

    def _check(self, operation: Any, values: Any) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, torch.Tensor):
                assert tensor.device == META, f"{operation} with a tensor on {tensor.device} ({_asker()})"
                assert tensor.numel() <= self._most, f"{operation} with {tuple(tensor.shape)} ({_asker()})"


def _asker() -> str:
    """Return the package's innermost running function, for any place and name of the checkout."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return "nobody of ours" if frame is None else f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
