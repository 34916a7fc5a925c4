"""Off-loading as a trainer rank does it, seen from a second process; torch alone.

Parameters with twice their bytes of gradients are in a real ParameterMemory. On a GPU, segments are
expandable, and every round exports the parameters to the second process, which reads them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch

from mrl.resharding.wire import memory
from mrl.resharding.wire.digest import digest_bytes
from mrl.resharding.wire.exportable import exportable_allocations
from mrl.training.platform import device_memory
from mrl.training.platform.parameter_memory import ParameterMemory
from tests.gpu.figures import check, show
from tests.gpu.peer import Peer, flat_bytes

_GPU_BYTES, _CPU_BYTES = 4 << 30, 16 << 20
_ROUNDS = 20
_SMALLEST_SHARE = 0.95
"""Of freed bytes, what the second process must see: torch keeps no more than the ends of segments."""


def test_memory_comes_back_from_offloading(device: torch.device) -> None:
    with expandable_segments(device):
        peer = Peer(device.type)
        try:
            offloading = Offloading(device, peer)
            offloading.once()
            offloading.many(_ROUNDS)
        finally:
            peer.close()


@contextlib.contextmanager
def expandable_segments(device: torch.device) -> Iterator[None]:
    """Turn on expandable segments, as a user may have done."""
    before = torch._C._accelerator_getAllocatorSettings()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False")


class Offloading:
    """A rank's parameters and gradients, and the second process."""

    def __init__(self, device: torch.device, peer: Peer) -> None:
        self._device, self._peer = device, peer
        elements = (_GPU_BYTES if device.type == "cuda" else _CPU_BYTES) // 2
        with exportable_allocations():
            params = torch.randint(0, 99, (elements,), dtype=torch.int16, device=device).view(torch.bfloat16)
            gradients = torch.zeros(elements, dtype=torch.float32, device=device)
        buffer = SimpleNamespace(param_data=params, grad_data=gradients, param_index_map={})
        model = SimpleNamespace(
            buffers=[buffer], expert_parallel_buffers=[], module=SimpleNamespace(weights=dict)
        )
        self._memory = ParameterMemory([model], device=device)
        self._parameters, self._num_bytes = buffer.param_data, params.nbytes + gradients.nbytes

    def once(self) -> None:
        """Measure a round, and the other process's free memory with and without torch's cache."""
        device_memory.release_cached(self._device)
        full = self._free()
        self._timed("off-load, which pins its buffers the first time", self._memory.offload)
        kept = self._free() - full
        device_memory.release_cached(self._device)
        given = self._free() - full
        check(
            given >= _SMALLEST_SHARE * self._num_bytes,
            f"{self._num_bytes >> 20} MiB off-loaded: the second process sees",
            f"{given >> 20} MiB ({kept >> 20} before torch's cache was emptied)",
        )
        self._timed("reload from pinned buffers", self._memory.reload)
        self._memory.note_change()
        self._timed("off-load to pinned buffers", self._memory.offload)
        self._memory.reload()
        self._timed("off-load of parameters that did not change", self._memory.offload)
        self._memory.reload()

    def many(self, rounds: int) -> None:
        """Export, off-load and reload in turns: the bytes stay, and memory does not grow."""
        expected, free = digest_bytes(flat_bytes(self._parameters)), []
        same = True
        for _ in range(rounds):
            same = same and self._read_by_the_other() == expected
            self._memory.note_change()
            self._memory.offload()
            device_memory.release_cached(self._device)
            free.append(self._free())
            self._memory.reload()
        check(same, f"{rounds} rounds of export, off-load and reload: the same bytes")
        lost = free[0] - min(free)
        check(lost < 64 << 20, "memory that those rounds kept back", f"{lost >> 20} MiB")

    def _read_by_the_other(self) -> int:
        """Return the second process's digest of the leased parameters."""
        with self._peer.leased(self._memory, self._device) as (read,):
            pass
        return read

    def _free(self) -> int:
        """Return the device's free bytes as the second process sees them; on CPU, less the buffers' bytes."""
        if self._device.type == "cpu":
            gradients = self._memory.buffers[0].grad_data.untyped_storage().size()
            return self._num_bytes - self._memory.shared_bytes() - gradients
        memory.synchronize(self._device)
        return self._peer.call("free_bytes")

    def _timed(self, name: str, action: Callable[[], None]) -> None:
        memory.synchronize(self._device)
        start = time.monotonic()
        action()
        memory.synchronize(self._device)
        seconds = time.monotonic() - start
        speed = self._parameters.nbytes / seconds / 1e9
        show(name, f"{seconds:.3f} s, {speed:.1f} GB/s of parameters")
