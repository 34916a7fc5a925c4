"""State of all random generators that training may draw from in a process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel


def random_state() -> dict[str, Any]:
    """Return the state of all random generators of this process as plain values, for set_random_state()."""
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state().numpy(),
        "tracker": {name: generator.cpu().numpy() for name, generator in tracker.get_states().items()},
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy()  # not yet run on a GPU
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the result of random_state()."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(torch.from_numpy(state["torch"]))
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    tracker.set_states({name: torch.from_numpy(generator) for name, generator in state["tracker"].items()})
    if "cuda" in state:
        torch.cuda.set_rng_state(torch.from_numpy(state["cuda"]))
