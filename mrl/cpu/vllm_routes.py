"""Experts that an engine on CPU chose for each position, by request.

vLLM 0.32 returns them only on GPUs (`enable_return_routed_experts` needs its second model runner and Triton).
Here its `RoutedExpertsCapturer` listens to the routers on CPU, and after a step the rows are stored twice:

| stored by | because |
|---|---|
| request and position | a preempted request recomputes its positions; the row that led to a token stays |
| slot of the KV cache | a position from the prefix cache has the row of the request that computed it |

So a row exists exactly for positions that vLLM computed or found in the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.v1.kv_cache_interface import FullAttentionSpec

from mrl.errors import RolloutError
from mrl.routes import expert_dtype


@dataclasses.dataclass(slots=True)
class _StoredRows:
    """Rows by position or slot, and which of them exist."""

    rows: np.ndarray
    """[n, layers, k]."""
    there: np.ndarray
    """[n] bool: the row exists."""

    @classmethod
    def of(cls, count: int, shape: tuple[int, int], kind: type) -> _StoredRows:
        return cls(np.zeros((count, *shape), kind), np.zeros(count, bool))

    def put(self, places: np.ndarray, rows: np.ndarray) -> None:
        self.rows[places] = rows
        self.there[places] = True


class _Capturer(RoutedExpertsCapturer):
    """Gathers expert numbers as exact floats: vLLM's all-gather over CPU shared memory lacks integers."""

    def capture(self, layer_id: int, topk_ids: Any) -> None:
        super().capture(layer_id, topk_ids.float())


class CapturedRoutes:
    """Routes of a model runner's requests until they are taken; on an engine's first rank."""

    def __init__(self, runner: Any, max_length: int) -> None:
        """Start listening to the routers of a runner whose KV cache exists."""
        self._runner, self._max_length = runner, max_length
        model, vllm_config = runner.get_model(), runner.vllm_config
        self._layers = sorted(m.layer_id for m in model.modules() if isinstance(m, MoERunner))
        """Layers with experts."""
        if not self._layers:
            raise RolloutError("routing.replay = engine: the model has no experts; set it to off")
        batched = vllm_config.scheduler_config.max_num_batched_tokens
        self._capturer = _Capturer(batched, vllm_config)
        bind_routed_experts_capturer(model, self._capturer)
        self._shape = len(self._layers), self._capturer.shape_per_token[1]
        self._kind = expert_dtype(vllm_config.model_config.get_num_experts())
        self._table = _attention_blocks(runner)
        slots = runner.kv_cache_config.num_blocks * self._table.block_size
        self._by_slot = _StoredRows.of(slots, self._shape, self._kind)
        self._by_request: dict[str, _StoredRows] = {}

    def end_step(self, num_tokens: int) -> None:
        """Store the rows of a step's tokens; drop requests that left the runner without being taken."""
        rows = self._capturer.device_buffer[:num_tokens, self._layers].numpy().astype(self._kind)
        batch = list(self._of_requests(rows))
        # Slots first: a request may find there what another computed in this step.
        for number, (_, positions, request_rows) in enumerate(batch):
            self._by_slot.put(self._slots(number, positions), request_rows)
        for number, (name, positions, request_rows) in enumerate(batch):
            self._store(name, number, positions, request_rows)
        for name in self._by_request.keys() - self._runner.requests.keys():
            del self._by_request[name]

    def take(self, spans: Iterable[tuple[str, int, int]]) -> list[tuple[np.ndarray, int]]:
        """Return (rows [stop - first, layers, k], number missing) per request; drop the requests. `spans`
        contains (request, first position, stop)."""
        routes = []
        for name, first, stop in spans:
            stored = self._by_request.pop(name, None) or self._no_rows()
            routes.append((stored.rows[first:stop].copy(), int((~stored.there[first:stop]).sum())))
        return routes

    def _of_requests(self, rows: np.ndarray) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Yield (name, positions, their rows) of the step's requests, in the order of the batch."""
        starts = self._runner.query_start_loc.np
        for number, name in enumerate(self._runner.input_batch.req_ids):
            span = slice(int(starts[number]), int(starts[number + 1]))
            yield name, self._runner.positions[span].numpy(), rows[span]

    def _store(self, name: str, number: int, positions: np.ndarray, rows: np.ndarray) -> None:
        """Store the rows that a request lacks: the step's, and earlier positions' from the cache."""
        stored = self._by_request.get(name) or self._no_rows()
        self._by_request[name] = stored
        earlier = np.flatnonzero(~stored.there[: positions[0]])
        slots = self._slots(number, earlier)
        cached = self._by_slot.there[slots]
        stored.put(earlier[cached], self._by_slot.rows[slots[cached]])
        new = ~stored.there[positions]
        stored.put(positions[new], rows[new])

    def _slots(self, number: int, positions: np.ndarray) -> np.ndarray:
        """Return the KV-cache slots of these positions of the batch's request."""
        size = self._table.block_size
        return (
            self._table.block_table.np[number, positions // size].astype(np.int64) * size + positions % size
        )

    def _no_rows(self) -> _StoredRows:
        return _StoredRows.of(self._max_length, self._shape, self._kind)


def _attention_blocks(runner: Any) -> Any:
    """Return the block table of the layers that keep every position's keys and values."""
    groups = runner.kv_cache_config.kv_cache_groups
    for group, table in zip(groups, runner.input_batch.block_table.block_tables, strict=True):
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            return table
    raise RolloutError(
        "routing.replay = engine: no layer of the model caches all positions, so routes cannot be stored by "
        "slot; set it to trainer or off"
    )
