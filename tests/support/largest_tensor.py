"""How large the tensors are that an expression makes."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Inside it, `elements` is the size of the largest tensor that any operation has returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_tensor(result):
            self.elements = max(self.elements, result.numel())
        return result
