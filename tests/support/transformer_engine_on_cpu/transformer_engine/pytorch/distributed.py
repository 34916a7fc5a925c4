"""The random states and activation recompute that Megatron imports; it recomputes by its own function."""

import contextlib
from collections.abc import Iterator

import torch


class CudaRNGStatesTracker:
    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}

    def reset(self) -> None:
        self.states_ = {}

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        raise NotImplementedError("Megatron's own tracker is used")

    def fork(self, name: str = "model-parallel-rng") -> contextlib.AbstractContextManager:
        raise NotImplementedError("Megatron's own tracker is used")


@contextlib.contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> Iterator[None]:
    yield


def checkpoint(function, *args, **kwargs):
    """Drop the real one's options, and recompute with torch."""
    for option in ("distribute_saved_activations", "get_rng_state_tracker", "tp_group"):
        kwargs.pop(option, None)
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=True, **kwargs)
