"""The sum of gradients over data-parallel replicas, bucket by bucket, while the backward pass of the last microbatch goes on.

Megatron's own form learns in the first update how often the last microbatch brings a gradient of each parameter, and starts a
bucket's sum when the same has come again. That asks of all ranks and updates that their last microbatches are of one kind.
Here one may be a dummy, and adapters take their gradients past autograd's accumulators. So a bucket's sum starts when
each of its parameters has brought its gradient, all buckets in one order that ranks share, and finish() starts those that
are left: whatever a rank's last microbatch lacks, every group of ranks meets the same sums in the same order.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from torch import Tensor


class OverlappedReduction:
    """The buckets of a model's chunks in one order, the last layers' first: that in which a backward pass fills them."""

    def __init__(self, models: list[DistributedDataParallel]) -> None:
        """`models`: the chunks as wrapped with overlap_grad_reduce, in chunk order."""
        self._models = models
        self._groups: list[Any] = [group for model in reversed(models) for group in _last_first(model)]
        self._missing: dict[Any, set[Tensor]] = {}
        """Bucket -> its parameters whose gradients of the last microbatch have not come yet."""
        self._started = 0
        for group in self._groups:
            group.is_first_batch = False  # nothing is learned
            group.register_grad_ready = functools.partial(self._take, group)
        self.begin()

    def begin(self) -> None:
        """No gradient of this update has come yet."""
        self._missing = {group: set(group.params) for group in self._groups}
        self._started = 0

    def no_sync(self) -> Any:
        """For Megatron's schedules: inside, microbatches are not the last; of several chunks one for each."""
        contexts = [model.no_sync for model in self._models]
        return contexts if len(contexts) > 1 else contexts[0]

    def take(self, parameter: Tensor) -> None:
        """A parameter's gradient of this microbatch is in main_grad."""
        model = next(model for model in self._models if parameter in model.param_to_bucket_group)
        self._take(model.param_to_bucket_group[parameter], parameter)

    def finish(self) -> None:
        """Starts the sums that have not started; Megatron's finish_grad_sync() waits for all."""
        for group in self._groups[self._started :]:
            group.start_grad_sync()
        self._started = len(self._groups)

    def _take(self, group: Any, parameter: Tensor, force_all_reduce: bool = False) -> None:
        """Megatron calls it where autograd has added a parameter's gradient."""
        if not group.is_last_microbatch:
            return
        missing = self._missing[group]
        if parameter not in missing:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} brought its gradient twice in one microbatch: its sum over the "
                "replicas may be short of the second; set training.overlap_grad_reduce to false"
            )
        missing.discard(parameter)
        while self._started < len(self._groups) and not self._missing[self._groups[self._started]]:
            self._groups[self._started].start_grad_sync()
            self._started += 1


def _last_first(model: DistributedDataParallel) -> list[Any]:
    """A chunk's buckets, dense and experts', by their earliest parameter, the latest first."""
    position = {parameter: number for number, parameter in enumerate(model.module.parameters())}
    groups: list[Any] = [*model.bucket_groups, *model.expert_parallel_bucket_groups]
    return sorted(groups, key=lambda group: min(position[each] for each in group.params), reverse=True)
