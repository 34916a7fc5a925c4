"""Which experts an engine on CPU sends each position to, by request.

vLLM 0.32 returns them itself on GPUs alone (`enable_return_routed_experts` asks for its second model runner, which needs Triton).
Here what listens to its routers there (`RoutedExpertsCapturer`) does so too, and after a step the rows are filed twice:

| filed by | because |
|---|---|
| request and position | a request that is preempted computes its positions again; the row that led to a token stays |
| slot of the KV cache | a position whose keys and values another request computed (prefix cache) has the row that computed them |

So a row is there exactly where vLLM had to compute or find a position.
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
class _Filed:
    """Rows by position or slot, and which of them are there."""

    rows: np.ndarray
    """[n, layers, k]."""
    there: np.ndarray
    """[n] bool."""

    @classmethod
    def of(cls, count: int, shape: tuple[int, int], kind: type) -> _Filed:
        return cls(np.zeros((count, *shape), kind), np.zeros(count, bool))

    def put(self, places: np.ndarray, rows: np.ndarray) -> None:
        self.rows[places] = rows
        self.there[places] = True


class _Capturer(RoutedExpertsCapturer):
    """Gathers experts' numbers as floats, which hold them exactly: vLLM's all-gather over a CPU's shared memory knows no integers."""

    def capture(self, layer_id: int, topk_ids: Any) -> None:
        super().capture(layer_id, topk_ids.float())


class CapturedRoutes:
    """The routes of the requests that a model runner has, until they are taken; the first rank's of an engine."""

    def __init__(self, runner: Any, max_length: int) -> None:
        """Begins to listen to the routers of a runner whose KV cache is made."""
        self._runner, self._max_length = runner, max_length
        model, vllm_config = runner.get_model(), runner.vllm_config
        self._layers = sorted(m.layer_id for m in model.modules() if isinstance(m, MoERunner))
        """Those with experts."""
        if not self._layers:
            raise RolloutError("routing.replay = engine: the model has no experts to choose from")
        batched = vllm_config.scheduler_config.max_num_batched_tokens
        self._capturer = _Capturer(batched, vllm_config)
        bind_routed_experts_capturer(model, self._capturer)
        self._shape = len(self._layers), self._capturer.shape_per_token[1]
        self._kind = expert_dtype(vllm_config.model_config.get_num_experts())
        self._table = _attention_blocks(runner)
        slots = runner.kv_cache_config.num_blocks * self._table.block_size
        self._by_slot = _Filed.of(slots, self._shape, self._kind)
        self._by_request: dict[str, _Filed] = {}

    def end_step(self, num_tokens: int) -> None:
        """Files the rows of a step's tokens; requests that left the runner unasked for are forgotten."""
        rows = self._capturer.device_buffer[:num_tokens, self._layers].numpy().astype(self._kind)
        batch = list(self._of_requests(rows))
        # First the slots: a request may find there what another one computed in this very step.
        for number, (_, positions, own) in enumerate(batch):
            self._by_slot.put(self._slots(number, positions), own)
        for number, (name, positions, own) in enumerate(batch):
            self._file(name, number, positions, own)
        for name in self._by_request.keys() - self._runner.requests.keys():
            del self._by_request[name]

    def take(self, asked: Iterable[tuple[str, int, int]]) -> list[tuple[np.ndarray, int]]:
        """(rows [stop - first, layers, k], how many of them are not there) of each (request, first position, stop), which is
        forgotten."""
        found = []
        for name, first, stop in asked:
            filed = self._by_request.pop(name, None) or self._nothing()
            found.append((filed.rows[first:stop].copy(), int((~filed.there[first:stop]).sum())))
        return found

    def _of_requests(self, rows: np.ndarray) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """(name, positions, their rows) of the step's requests, in the order of the batch."""
        starts = self._runner.query_start_loc.np
        for number, name in enumerate(self._runner.input_batch.req_ids):
            own = slice(int(starts[number]), int(starts[number + 1]))
            yield name, self._runner.positions[own].numpy(), rows[own]

    def _file(self, name: str, number: int, positions: np.ndarray, rows: np.ndarray) -> None:
        """The rows that a request does not have yet: those of the step, and those of the positions before that the cache
        had."""
        filed = self._by_request.get(name) or self._nothing()
        self._by_request[name] = filed
        before = np.flatnonzero(~filed.there[: positions[0]])
        slots = self._slots(number, before)
        cached = self._by_slot.there[slots]
        filed.put(before[cached], self._by_slot.rows[slots[cached]])
        new = ~filed.there[positions]
        filed.put(positions[new], rows[new])

    def _slots(self, number: int, positions: np.ndarray) -> np.ndarray:
        """Where the KV cache has these positions of the batch's request."""
        size = self._table.block_size
        return (
            self._table.block_table.np[number, positions // size].astype(np.int64) * size + positions % size
        )

    def _nothing(self) -> _Filed:
        return _Filed.of(self._max_length, self._shape, self._kind)


def _attention_blocks(runner: Any) -> Any:
    """The block table of the layers that keep every position's keys and values."""
    groups = runner.kv_cache_config.kv_cache_groups
    for group, table in zip(groups, runner.input_batch.block_table.block_tables, strict=True):
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            return table
    raise RolloutError(
        "routing.replay = engine: no layer of the model keeps all positions, so that rows have no place to be filed by"
    )
