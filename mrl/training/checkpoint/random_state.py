"""All random generators of a process that training may draw from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel


def random_state() -> dict[str, Any]:
    """The state of all random generators of this process, for set_random_state(), as plain values."""
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state().numpy(),
        "tracker": {name: held.cpu().numpy() for name, held in tracker.get_states().items()},
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy()  # not yet run on a GPU
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restores what random_state() gave."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(torch.from_numpy(state["torch"]))
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    tracker.set_states({name: torch.from_numpy(held) for name, held in state["tracker"].items()})
    if "cuda" in state:
        torch.cuda.set_rng_state(torch.from_numpy(state["cuda"]))
