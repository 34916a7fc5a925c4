"""A checkpoint's state of one model: sharded, and saved and loaded in place.

atomic_save.py writes it, loading.py reads it.
"""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from mrl.training.checkpoint.shards import restore_states, sharded_places, sharded_states, sharded_weights

METADATA: dict[str, Any] = {}
"""Options for Megatron's modules: the defaults."""


class TrainingState:
    """Model chunks, optimizer and its step count."""

    def __init__(self, models: list[Any], optimizer: Any) -> None:
        """Take the bare chunks, and a mrl.training.optimizer.Optimizer."""
        self._models, self._optimizer = models, optimizer
        self._held: list[list[tuple[Tensor, dict[str, Tensor]]]] = []

    def sharded(self) -> dict[str, Any]:
        """Return the sharded state dict to save from or load into: its tensors are this rank's own memory."""
        parts = self._optimizer.chained()
        trained = [model.trained_state_dict(prefix="", metadata=dict(METADATA)) for model in self._models]
        places = dict(place for state in trained for place in sharded_places(state))
        self._optimizer.prime()
        self._held = [[] for _ in parts]
        states: dict[str, list[ShardedTensor]] = {}
        for part, states_of in zip(parts, self._held, strict=True):
            for key, shards in sharded_states(part, places, states_of, self._optimizer.resting).items():
                states.setdefault(key, []).extend(shards)
        common = self._optimizer.common()
        return _by_chunk(trained) | {"optimizer": common, "optimizer_states": states}

    def sharded_weights(self) -> dict[str, Any]:
        """Return the whole model, with frozen parts, for an export."""
        return _by_chunk([m.sharded_state_dict(prefix="", metadata=dict(METADATA)) for m in self._models])

    def restore(self, state: dict[str, Any]) -> None:
        """Take the non-tensors of a state that was loaded into sharded()."""
        self._optimizer.load(state["optimizer"])
        for part, states_of in zip(self._optimizer.chained(), self._held, strict=True):
            restore_states(part, states_of)
        self._held = []


def _by_chunk(states: list[dict[str, Any]]) -> dict[str, Any]:
    return {f"model{number}": sharded_weights(state) for number, state in enumerate(states)}
