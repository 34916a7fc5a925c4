"""How large the tensors are that an expression makes, and how many of the largest there are at one time."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Inside it, `elements` is the size of the largest tensor that any operation has returned, `alive` how many of that size were
    in memory together."""

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
