"""Measure the largest tensors of an expression, and how many exist at a time."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that an operation returned, and how many were alive together."""

    elements = alive = 0

    def __init__(self) -> None:
        super().__init__()
        self._held: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_tensor(result) and result.numel() >= self.elements:
            if result.numel() > self.elements:
                self.elements, self.alive, self._held = result.numel(), 0, []
            self._held = [held for held in self._held if held() is not None] + [weakref.ref(result)]
            tensors = [tensor for held in self._held if (tensor := held()) is not None]
            self.alive = max(self.alive, len({tensor.untyped_storage().data_ptr() for tensor in tensors}))
        return result
