"""Routes into the passes of one rank, and out of them.

A batch may say which experts each position of its samples visits in each layer (mrl/routes.py). This rank cuts its own part:
the layers of its pipeline stages, the positions of its context-parallel chunks and its tensor-parallel share. What has no
row, padding and each sample's last token, visits experts in turn: no log-prob that is computed depends on it.
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
from mrl.models.megatron.replay import Given, Recorded
from mrl.routes import expert_dtype
from mrl.samples import TrainBatch
from mrl.training.prepared import Prepared


class Replay:
    """The routers of this rank's chunks, and what they are given or recorded."""

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
        self._own = [depths.index(router.layer_number or 0) for router in routers]
        """Of each router, its layer's number among those with experts."""
        self._num_layers = len(depths)
        self._answering: list[Given] | list[Recorded] = []
        """What answers for each router in the pass that is under way."""
        self._agreement = torch.zeros(len(depths), 2, dtype=torch.int64, device=device)

    @contextlib.contextmanager
    def given(self, batch: TrainBatch, prepared: Sequence[Prepared]) -> Iterator[None]:
        """All routers take the batch's routes inside. RoutingError where a sample's are not whole, and where the pass did
        not take each once."""
        if self._config.moe_router_fusion:
            raise RoutingError(
                "Transformer Engine's fused router chooses experts by itself and takes none: build the model for "
                "replay (routing.replay), or with training.router_dtype = fp64"
            )
        _require_whole(batch)
        parts = [self._part(batch, item) for item in prepared]
        known = [torch.from_numpy(own_known).to(self._device) for _, own_known in parts]
        experts = [torch.from_numpy(own_experts).to(self._device) for own_experts, _ in parts]
        answering = [Given([each[:, n] for each in experts], known) for n in range(len(self._routers))]
        with self._answers(answering):
            yield
        self._agreement.zero_()
        for depth, given in zip(self._own, answering, strict=True):
            self._agreement[depth] = given.agreement

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """All routers' choices are kept inside, for rows()."""
        with self._answers([Recorded() for _ in self._routers]):
            yield

    @contextlib.contextmanager
    def microbatch(self, number: int) -> Iterator[None]:
        """The forward step of a microbatch. A layer that is computed outside of one is computed again."""
        for each in self._answering:
            each.microbatch = number
        try:
            yield
        finally:
            for each in self._answering:
                each.microbatch = None

    def rows(self, batch: TrainBatch, prepared: Sequence[Prepared]) -> np.ndarray:
        """[N, layers, k] what the positions of the batch visited, inside recorded(); a collective of the model's ranks."""
        kind = expert_dtype(self._config.num_moe_experts or 0)
        flat = np.zeros((batch.num_tokens, self._num_layers, self._config.moe_router_topk), kind)
        for number, item in enumerate(prepared):
            own = torch.zeros(len(item.real), *flat.shape[1:], dtype=torch.int32, device=self._device)
            for depth, record in zip(self._own, self._answering, strict=True):
                assert isinstance(record, Recorded)
                own[:, depth] = record.experts[number].int()
            flat[item.plan.token_index] = item.of_all_ranks(own, fill=0, op=dist.ReduceOp.MAX)
        return flat

    def metrics(self) -> dict[str, float]:
        """Agreement in the last pass that was given routes, the same on all ranks, which call this together."""
        if not self._num_layers:
            return {}
        counts = self._agreement.clone()
        dist.all_reduce(counts)  # each token meets each router on one rank
        return agreement_figures(counts.cpu().numpy())

    @contextlib.contextmanager
    def _answers(self, answering: list[Given] | list[Recorded]) -> Iterator[None]:
        self._answering = answering
        for router, each in zip(self._routers, answering, strict=True):
            router.router_replay = each  # type: ignore[assignment] Megatron asks it for get_replay_topk alone
        try:
            yield
            for router, each in zip(self._routers, answering, strict=True):
                each.require_all_taken(f"the router of layer {router.layer_number}")
        finally:
            self._answering = []
            for router in self._routers:
                router.router_replay = None

    def _part(self, batch: TrainBatch, item: Prepared) -> tuple[np.ndarray, np.ndarray]:
        """(experts [k / tp, own layers, top-k], known [k / tp]) of the tokens whose hidden states this rank has."""
        assert batch.routes is not None
        topk, count = self._config.moe_router_topk, self._config.num_moe_experts or 1
        size, lengths = len(item.plan.tokens), batch.lengths()
        in_turn = (np.arange(size)[:, None] * topk + np.arange(topk)) % count
        # torch computes with no unsigned 16 bits
        kind = np.uint8 if expert_dtype(count) is np.uint8 else np.int16
        experts = np.repeat(in_turn[:, None].astype(kind), len(self._own), axis=1)
        known, at = np.zeros(size, bool), 0
        for sample in item.plan.samples.tolist():
            places = item.plan.places[at : at + lengths[sample] - 1]
            experts[places] = batch.routes[sample].layers(self._own)
            known[places] = True
            at += lengths[sample]
        return self._share(experts[item.kept]), self._share(known[item.kept])

    def _share(self, values: np.ndarray) -> np.ndarray:
        """This rank's tensor-parallel share of [k, ...]."""
        share = len(values) // self._tp
        return np.ascontiguousarray(values[self._tp_rank * share : (self._tp_rank + 1) * share])


def agreement_figures(counts: np.ndarray) -> dict[str, float]:
    """The share of given experts that routers would have chosen too, of counts [layers, (agreed, all)]; the mean layer's and
    the worst one's.

    >>> agreement_figures(np.array([[9, 10], [5, 10], [0, 0]]))
    {'routing/agreement': 0.7, 'routing/agreement_min': 0.5}
    """
    counts = counts[counts[:, 1] > 0]
    if not len(counts):
        return {}
    shares = counts[:, 0] / counts[:, 1]
    return {"routing/agreement": float(shares.mean()), "routing/agreement_min": float(shares.min())}


def _layers_with_experts(config: TransformerConfig) -> list[int]:
    """Their numbers among all layers, from 1 as Megatron's routers have them."""
    if not config.num_moe_experts:
        return []
    every = config.moe_layer_freq
    has_experts = every if isinstance(every, list) else [n % every == 0 for n in range(config.num_layers)]
    return [number for number, has in enumerate(has_experts, 1) if has]


def _require_whole(batch: TrainBatch) -> None:
    """RoutingError for the first sample whose routes do not have a row for each position but the last."""
    assert batch.routes is not None
    for name, routes, length in zip(batch.sample_ids, batch.routes, batch.lengths(), strict=True):
        if routes.missing or len(routes) != length - 1:
            raise RoutingError(
                f"sample {name} has {len(routes)} rows of routes for {length} tokens, {routes.missing} of them not "
                "recorded; it must not be trained on with routing.replay"
            )
