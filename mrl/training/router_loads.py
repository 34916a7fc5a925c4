"""Statistics of a rank's routers: how even experts' loads and how narrow choices were.

Both are recorded in the routers' forward pass. A layer that the backward pass recomputes chooses again, but
is not recorded again. Padding is not counted, so the metrics describe an update's tokens, whatever the
layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.models.megatron.layer_modules import RecordingRouter
from mrl.observe.metrics_log import LAYERS


class ExpertLoad:
    """Counts each expert's visits by the tokens of one update, over all micro-batches of this rank."""

    def __init__(
        self, routers: Sequence[RecordingRouter], *, num_layers: int, num_experts: int, device: torch.device
    ) -> None:
        self._routers = routers
        self._visits = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        for router in routers:
            assert router.layer_number is not None, "Megatron numbers every layer's router, from 1"
            router.visits = self._visits[router.layer_number - 1]

    def clear(self) -> None:
        """Start a new update."""
        self._visits.zero_()

    @contextlib.contextmanager
    def counting(self, real: Tensor) -> Iterator[None]:
        """Count the choices made inside; `real` [tokens of a router's input] is False for padding."""
        for router in self._routers:
            router.counted = real
        try:
            yield
        finally:
            for router in self._routers:
                router.counted = None

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all ranks' visits, equal on all ranks; a collective."""
        if not self._visits.numel():
            return {}
        visits = self._visits.clone()
        dist.all_reduce(visits)  # each token meets each router on one rank
        return load_metrics(visits.cpu().numpy())


def load_metrics(visits: np.ndarray) -> dict[str, float]:
    """Return the load metrics of visits [layers, experts]; a layer without a router is a row of zeros.

    `load_max_over_mean` is the busiest expert's visits over the mean expert's: 1 is even, experts / top-k is
    the worst. `load_entropy` is the entropy of the shares over its maximum, ln(experts): 1 is even. Each has
    its mean over layers, the worst layer's (_max, _min), and each layer's.

    >>> load_metrics(np.array([[0, 0], [3, 1]]))["moe/load_max_over_mean"] 1.5
    """
    numbers = np.flatnonzero(visits.sum(1))
    if not len(numbers):
        return {}
    shares = visits[numbers] / visits[numbers].sum(1, keepdims=True)
    peaks = shares.max(1) * visits.shape[1]
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    entropies = -(shares * logs).sum(1) / np.log(max(2, visits.shape[1]))
    metrics = {
        "moe/load_max_over_mean": float(peaks.mean()),
        "moe/load_max_over_mean_max": float(peaks.max()),
        "moe/load_entropy": float(entropies.mean()),
        "moe/load_entropy_min": float(entropies.min()),
    }
    for number, peak, entropy in zip(numbers, peaks, entropies, strict=True):
        metrics[f"{LAYERS}{number:03d}/load_max_over_mean"] = float(peak)
        metrics[f"{LAYERS}{number:03d}/load_entropy"] = float(entropy)
    return metrics


@contextlib.contextmanager
def recorded_margins(routers: Iterable[RecordingRouter]) -> Iterator[list[Tensor]]:
    """Yield a list that afterwards contains the gaps of every choice made inside."""
    gaps: list[Tensor] = []
    for router in routers:
        router.margins = gaps
    try:
        yield gaps
    finally:
        for router in routers:
            router.margins = None


def prefix_minimum(values: np.ndarray, cu_seqlens: np.ndarray) -> np.ndarray:
    """Return out[t] = min(values[segment start : t]); 0 for a segment's first token.

    >>> prefix_minimum(np.array([3, 1, 2, 9, 5], np.float32), np.array([0, 3, 5])).tolist() [0.0, 3.0, 1.0,
    0.0, 9.0]
    """
    lengths = np.diff(cu_seqlens)
    if not len(lengths):
        return values.copy()
    inside = np.arange(lengths.max())[None, :] < lengths[:, None]
    padded = np.full(inside.shape, np.inf, values.dtype)
    padded[inside] = values
    shifted = np.zeros_like(padded)
    shifted[:, 1:] = np.minimum.accumulate(padded, axis=1)[:, :-1]
    return shifted[inside]
