"""What a checkpoint holds of one model: its sharded state, saved from and loaded into in place.

saving.py writes it, loading.py reads it.
"""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from mrl.training.checkpoint.shards import (
    restore_states,
    sharded_places,
    sharded_states,
    sharded_weights,
)

METADATA: dict[str, Any] = {}
"""What Megatron's modules are asked for; the defaults."""


class TrainingState:
    """Model chunks, optimizer and its step count."""

    def __init__(self, models: list[Any], optimizer: Any) -> None:
        """`models` are the bare chunks, `optimizer` is mrl.training.optimizer.Optimizer."""
        self._models, self._optimizer = models, optimizer
        self._held: list[list[tuple[Tensor, dict[str, Tensor]]]] = []

    def sharded(self) -> dict[str, Any]:
        """The sharded state dict that is saved from, or loaded into: its tensors are this rank's own memory."""
        parts = self._optimizer.chained()
        places = dict(place for model in self._models for place in sharded_places(model, METADATA))
        self._optimizer.prime()
        self._held = [[] for _ in parts]
        states: dict[str, list[ShardedTensor]] = {}
        for part, held in zip(parts, self._held, strict=True):
            for key, shards in sharded_states(part, places, held).items():
                states.setdefault(key, []).extend(shards)
        common = self._optimizer.common()
        return self.sharded_weights() | {"optimizer": common, "optimizer_states": states}

    def sharded_weights(self) -> dict[str, Any]:
        """The model's part of sharded()."""
        return {
            f"model{number}": sharded_weights(model, METADATA) for number, model in enumerate(self._models)
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Takes what is not a tensor of a state that was loaded into sharded()."""
        self._optimizer.load(state["optimizer"])
        for part, held in zip(self._optimizer.chained(), self._held, strict=True):
            restore_states(part, held)
        self._held = []
