"""Reduces the metrics of microbatches over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor


def combine(name: str, values: Iterable[float]) -> float:
    """Sum; largest for names ending in _max, smallest for _min."""
    if name.endswith("_max"):
        return max(values)
    if name.endswith("_min"):
        return min(values)
    return float(sum(values))


def reduce_metrics(parts: Iterable[Mapping[str, Tensor]], *, device: torch.device) -> dict[str, float]:
    """Combine the parts of all ranks; a rank without any contributes nothing. The same result everywhere."""
    own: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            own.setdefault(name, []).append(float(value))
    mine = {name: combine(name, values) for name, values in own.items()}
    everyone: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    names = sorted({name for rank in everyone for name in rank})
    return {name: combine(name, [rank[name] for rank in everyone if name in rank]) for name in names}
