"""Reduce gradients over data-parallel replicas, by bucket, during the last micro-batch's backward pass.

Megatron's version learns in the first update how often the last micro-batch produces a gradient of each
parameter, and starts a bucket's sum after as many. That needs similar last micro-batches on all ranks and in
all updates. Here one may be a dummy, and adapters take their gradients past autograd's accumulators. So a
bucket's sum starts after each of its parameters has its gradient, in one bucket order that ranks share;
finish() starts the remaining ones. So every group of ranks runs the same sums in the same order, whatever a
rank's last micro-batch lacks.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from torch import Tensor


class OverlappedReduction:
    """Buckets of a model's chunks in the order in which a backward pass fills them: last layers first."""

    def __init__(self, models: list[DistributedDataParallel]) -> None:
        """Take the chunks, wrapped with overlap_grad_reduce, in chunk order."""
        self._models = models
        self._groups: list[Any] = [group for model in reversed(models) for group in _last_first(model)]
        self._missing: dict[Any, set[Tensor]] = {}
        """Bucket -> its parameters whose gradients of the last micro-batch are missing."""
        self._started = 0
        for group in self._groups:
            group.is_first_batch = False  # nothing is learned
            group.register_grad_ready = functools.partial(self._take, group)
        self.begin()

    def begin(self) -> None:
        """Start an update without any gradients."""
        self._missing = {group: set(group.params) for group in self._groups}
        self._started = 0

    def no_sync(self) -> Any:
        """Return Megatron's context for all but the last micro-batch; a list if there are several chunks."""
        contexts = [model.no_sync for model in self._models]
        return contexts if len(contexts) > 1 else contexts[0]

    def take(self, parameter: Tensor) -> None:
        """Note that a parameter's gradient of this micro-batch is in main_grad."""
        model = next(model for model in self._models if parameter in model.param_to_bucket_group)
        self._take(model.param_to_bucket_group[parameter], parameter)

    def finish(self) -> None:
        """Start the remaining sums; Megatron's finish_grad_sync() waits for all."""
        for group in self._groups[self._started :]:
            group.start_grad_sync()
        self._started = len(self._groups)

    def _take(self, group: Any, parameter: Tensor, force_all_reduce: bool = False) -> None:
        """Handle a finished gradient; Megatron calls this after autograd adds it."""
        if not group.is_last_microbatch:
            return
        missing = self._missing[group]
        if parameter not in missing:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} produced its gradient twice in one "
                "micro-batch, so its sum over replicas may lack the second; "
                "set training.overlap_grad_reduce to false"
            )
        missing.discard(parameter)
        while self._started < len(self._groups) and not self._missing[self._groups[self._started]]:
            self._groups[self._started].start_grad_sync()
            self._started += 1


def _last_first(model: DistributedDataParallel) -> list[Any]:
    """Return a chunk's buckets, dense and expert, by their earliest parameter, the latest first."""
    position = {parameter: number for number, parameter in enumerate(model.module.parameters())}
    groups: list[Any] = [*model.bucket_groups, *model.expert_parallel_bucket_groups]
    return sorted(groups, key=lambda group: min(position[item] for item in group.params), reverse=True)
