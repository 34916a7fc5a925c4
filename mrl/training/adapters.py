"""Adapters of one rank's policy: merged into its weights after every step, removed for the reference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from mrl.models.megatron.lora_parameters import LowRankPair
from mrl.training.platform.host_copies import HostCopies
from mrl.training.platform.parameter_memory import ParameterMemory


class Adapters:
    """Adapters, and a host copy of the loaded weights that they change (the base). The device has one copy of
    the weights, merged, for all readers (passes, leases, digests, exports)."""

    def __init__(
        self,
        pairs: Sequence[LowRankPair],
        memory: ParameterMemory,
        *,
        device: torch.device,
        taken: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Call after making the optimizer: from now on the changed weights require gradients. `taken` is
        called with each A and B that received its gradient of a micro-batch."""
        self._pairs, self._memory = pairs, memory
        self._bases = [pair.base for pair in pairs]
        self._loaded = HostCopies(device, keep=True)
        for pair in pairs:
            pair.follow_gradients(taken)

    def keep_base(self) -> None:
        """Make the current weights the base, and merge."""
        self._loaded.start(self._bases)
        self._loaded.wait()
        self.merge()

    def merge(self) -> None:
        """Compute the weights from the base and the current A and B; deterministic to the bit."""
        self._loaded.restore(self._bases)
        for pair in self._pairs:
            pair.merge()

    @contextlib.contextmanager
    def removed(self, action: str) -> Iterator[None]:
        """Restore the base weights for the block. Raise WeightSyncError while leased."""
        self._memory.require_idle(action)
        self._loaded.restore(self._bases)
        try:
            yield
        finally:
            self.merge()
