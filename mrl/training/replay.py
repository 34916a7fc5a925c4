"""Replay and recording of expert routes in the passes of one rank.

A batch may contain the experts that each position of its samples visits in each layer (mrl/routes.py). This
rank cuts out its part: the layers of its pipeline stages, the positions of its context-parallel chunks and
its tensor-parallel share. Positions without a row, padding and each sample's last token, visit experts in
turn: no computed log-prob depends on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig

from mrl.errors import RoutingError
from mrl.models.megatron.layer_modules import RecordingRouter
from mrl.models.megatron.replay import RecordedRouting, ReplayedRouting
from mrl.routes import expert_dtype
from mrl.samples import TrainBatch
from mrl.training.device_microbatch import DeviceMicrobatch


class Replay:
    """Routers of this rank's chunks, and the routes that they are given or record."""

    def __init__(
        self,
        routers: Sequence[RecordingRouter],
        config: TransformerConfig,
        *,
        tp: int,
        tp_rank: int,
        device: torch.device,
    ) -> None:
        self._routers, self._config = routers, config
        self._tp, self._tp_rank, self._device = tp, tp_rank, device
        depths = _layers_with_experts(config)
        self._depths = [depths.index(router.layer_number or 0) for router in routers]
        """Each router's layer number among those with experts."""
        self._num_layers = len(depths)
        self._sources: list[ReplayedRouting] | list[RecordedRouting] = []
        """One route source or recorder per router in the current pass."""
        self._agreement = torch.zeros(len(depths), 2, dtype=torch.int64, device=device)

    @contextlib.contextmanager
    def given(self, batch: TrainBatch, prepared: Sequence[DeviceMicrobatch]) -> Iterator[None]:
        """Make all routers take the batch's routes. Raise RoutingError if a sample's routes are incomplete,
        or the pass did not take each exactly once."""
        if self._config.moe_router_fusion:
            raise RoutingError(
                "Transformer Engine's fused router always chooses experts itself, not by given routes; "
                "build the model for replay (routing.replay), or with training.router_dtype = fp64"
            )
        _require_whole(batch)
        parts = [self._part(batch, item) for item in prepared]
        known = [torch.from_numpy(own_known).to(self._device) for _, own_known in parts]
        experts = [torch.from_numpy(own_experts).to(self._device) for own_experts, _ in parts]
        answering = [
            ReplayedRouting([rows[:, n] for rows in experts], known) for n in range(len(self._routers))
        ]
        with self._installed(answering):
            yield
        self._agreement.zero_()
        for depth, given in zip(self._depths, answering, strict=True):
            self._agreement[depth] = given.agreement

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record all routers' choices, for rows()."""
        with self._installed([RecordedRouting() for _ in self._routers]):
            yield

    @contextlib.contextmanager
    def microbatch(self, number: int) -> Iterator[None]:
        """Mark a micro-batch's forward step; a layer computed outside of one is a recomputation."""
        for source in self._sources:
            source.microbatch = number
        try:
            yield
        finally:
            for source in self._sources:
                source.microbatch = None

    def rows(self, batch: TrainBatch, prepared: Sequence[DeviceMicrobatch]) -> np.ndarray:
        """Return the recorded experts [N, layers, k] of the batch's positions, inside recorded(); a
        collective of the model's ranks."""
        kind = expert_dtype(self._config.num_moe_experts or 0)
        flat = np.zeros((batch.num_tokens, self._num_layers, self._config.moe_router_topk), kind)
        for number, item in enumerate(prepared):
            experts = torch.zeros(len(item.real), *flat.shape[1:], dtype=torch.int32, device=self._device)
            for depth, record in zip(self._depths, self._sources, strict=True):
                assert isinstance(record, RecordedRouting)
                experts[:, depth] = record.experts[number].int()
            flat[item.plan.token_index] = item.gather(experts, fill=0, op=dist.ReduceOp.MAX)
        return flat

    def metrics(self) -> dict[str, float]:
        """Return the agreement in the last replaying pass, equal on all ranks; a collective."""
        if not self._num_layers:
            return {}
        counts = self._agreement.clone()
        dist.all_reduce(counts)  # each token meets each router on one rank
        return agreement_metrics(counts.cpu().numpy())

    @contextlib.contextmanager
    def _installed(self, answering: list[ReplayedRouting] | list[RecordedRouting]) -> Iterator[None]:
        self._sources = answering
        for router, source in zip(self._routers, answering, strict=True):
            router.router_replay = source  # type: ignore[assignment] Megatron only calls its get_replay_topk
        try:
            yield
            for router, source in zip(self._routers, answering, strict=True):
                source.require_all_taken(f"the router of layer {router.layer_number}")
        finally:
            self._sources = []
            for router in self._routers:
                router.router_replay = None

    def _part(self, batch: TrainBatch, item: DeviceMicrobatch) -> tuple[np.ndarray, np.ndarray]:
        """Return experts [k / tp, own layers, top-k] and known [k / tp] for this rank's hidden states."""
        assert batch.routes is not None
        topk, count = self._config.moe_router_topk, self._config.num_moe_experts or 1
        size, lengths = len(item.plan.tokens), batch.lengths()
        in_turn = (np.arange(size)[:, None] * topk + np.arange(topk)) % count
        # torch cannot compute with unsigned 16 bits
        kind = np.uint8 if expert_dtype(count) is np.uint8 else np.int16
        experts = np.repeat(in_turn[:, None].astype(kind), len(self._depths), axis=1)
        known, at = np.zeros(size, bool), 0
        for sample in item.plan.samples.tolist():
            places = item.plan.places[at : at + lengths[sample] - 1]
            experts[places] = batch.routes[sample].layers(self._depths)
            known[places] = True
            at += lengths[sample]
        return self._share(experts[item.mine]), self._share(known[item.mine])

    def _share(self, values: np.ndarray) -> np.ndarray:
        """Return this rank's tensor-parallel share of [k, ...]."""
        share = len(values) // self._tp
        return np.ascontiguousarray(values[self._tp_rank * share : (self._tp_rank + 1) * share])


def agreement_metrics(counts: np.ndarray) -> dict[str, float]:
    """Return the share of given experts that routers also choose: the mean and the worst layer's.

    `counts` [layers, (agreed, all)]. >>> agreement_metrics(np.array([[9, 10], [5, 10], [0, 0]]))
    {'routing/agreement': 0.7, 'routing/agreement_min': 0.5}
    """
    counts = counts[counts[:, 1] > 0]
    if not len(counts):
        return {}
    shares = counts[:, 0] / counts[:, 1]
    return {"routing/agreement": float(shares.mean()), "routing/agreement_min": float(shares.min())}


def _layers_with_experts(config: TransformerConfig) -> list[int]:
    """Return their numbers among all layers, from 1 as in Megatron's routers."""
    if not config.num_moe_experts:
        return []
    frequency = config.moe_layer_freq
    has_experts = (
        frequency if isinstance(frequency, list) else [n % frequency == 0 for n in range(config.num_layers)]
    )
    return [number for number, has in enumerate(has_experts, 1) if has]


def _require_whole(batch: TrainBatch) -> None:
    """Raise RoutingError for the first sample whose routes lack a row for any position but the last."""
    assert batch.routes is not None
    for name, routes, length in zip(batch.sample_ids, batch.routes, batch.lengths(), strict=True):
        if routes.missing or len(routes) != length - 1:
            raise RoutingError(
                f"sample {name} has {len(routes)} rows of routes for {length} tokens, {routes.missing} not "
                "recorded; exclude it from training with routing.replay"
            )
