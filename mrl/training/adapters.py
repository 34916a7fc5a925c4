"""The adapters of one rank's policy: merged into its weights after every step, taken off for the reference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from mrl.models.megatron.lora_parameters import LowRankPair
from mrl.training.platform.host_copies import HostCopies
from mrl.training.platform.parameter_memory import ParameterMemory


class Adapters:
    """Adapters, and the weights that they change as they were loaded (the base), in the host's memory.

    The device has one copy of the weights, and whoever reads them (passes, leases, digests, exports) finds them
    merged.
    """

    def __init__(
        self,
        pairs: Sequence[LowRankPair],
        memory: ParameterMemory,
        *,
        device: torch.device,
        taken: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """To be called once the optimizer is made: the changed weights ask for gradients from now on. `taken` hears of each A
        and B that got its gradient of a microbatch."""
        self._pairs, self._memory = pairs, memory
        self._bases = [pair.base for pair in pairs]
        self._loaded = HostCopies(device, keep=True)
        for pair in pairs:
            pair.follow_gradients(taken)

    def keep_base(self) -> None:
        """Takes today's weights for the base, and merges."""
        self._loaded.start(self._bases)
        self._loaded.wait()
        self.merge()

    def merge(self) -> None:
        """Makes the weights what the base and today's A and B say; the same bits for the same of both."""
        self._loaded.restore(self._bases)
        for pair in self._pairs:
            pair.merge()

    @contextlib.contextmanager
    def taken_off(self, action: str) -> Iterator[None]:
        """Inside, the weights are the base. WeightSyncError when leased."""
        self._memory.require_own(action)
        self._loaded.restore(self._bases)
        try:
            yield
        finally:
            self.merge()
