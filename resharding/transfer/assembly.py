"""Whole tensors out of bucket spans: checks every length and offset, and that each byte arrives exactly once.

A tensor that fits a bucket becomes a view of the bucket's copy; one that spans several is put together in its
own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mrl.errors import WeightSyncError
from mrl.resharding.transfer.session import WireTensor
from mrl.resharding.wire.messages import Span

DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2",
        "int64", "int32", "int16", "int8", "uint8", "bool",
    )
}  # fmt: skip
"""The types of the tensors that may travel, by torch's names without the prefix."""


def num_bytes(tensor: WireTensor) -> int:
    if tensor.dtype not in DTYPES:
        raise WeightSyncError(f"{tensor.name} has dtype {tensor.dtype!r}; only {sorted(DTYPES)} travel")
    return math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize


class Assembly:
    """Puts the tensors of one session together from the spans of its buckets."""

    def __init__(self, tensors: Sequence[WireTensor], *, device: torch.device) -> None:
        names = [t.name for t in tensors]
        if len(set(names)) != len(names):
            raise WeightSyncError(f"the manifest names {len(names) - len(set(names))} tensor(s) twice")
        self._tensors = tensors
        self._sizes = [num_bytes(t) for t in tensors]
        self._device = device
        self._arrived = [0] * len(tensors)
        self._done = [False] * len(tensors)
        self._parts: dict[int, torch.Tensor] = {}
        self.num_complete = 0
        self.num_bytes = 0

    def take(self, spans: Sequence[Span], data: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """[used] uint8 bytes of a bucket -> the tensors that are complete with it, in order."""
        complete = []
        for span in spans:
            self._check(span, data.numel())
            piece = data[span.offset : span.offset + span.num_bytes]
            whole = self._whole(span, piece)
            self._arrived[span.tensor] += span.num_bytes
            self.num_bytes += span.num_bytes
            if self._arrived[span.tensor] == self._sizes[span.tensor]:
                tensor = self._tensors[span.tensor]
                self._done[span.tensor] = True
                self._parts.pop(span.tensor, None)
                self.num_complete += 1
                complete.append((tensor.name, whole.view(DTYPES[tensor.dtype]).view(tensor.shape)))
        return complete

    def require_complete(self) -> None:
        """WeightSyncError with the names of what did not arrive."""
        missing = [t.name for t, done in zip(self._tensors, self._done, strict=True) if not done]
        if missing:
            raise WeightSyncError(
                f"{len(missing)} of {len(self._tensors)} tensors did not arrive: {missing[:8]}"
            )

    def _whole(self, span: Span, piece: torch.Tensor) -> torch.Tensor:
        size = self._sizes[span.tensor]
        if span.num_bytes == size:
            return piece
        if span.tensor not in self._parts:
            self._parts[span.tensor] = torch.empty(size, dtype=torch.uint8, device=self._device)
        whole = self._parts[span.tensor]
        whole[span.start : span.start + span.num_bytes].copy_(piece)
        return whole

    def _check(self, span: Span, used: int) -> None:
        if span.tensor >= len(self._tensors):
            raise WeightSyncError(f"a span names tensor {span.tensor} of {len(self._tensors)}")
        tensor, size = self._tensors[span.tensor], self._sizes[span.tensor]
        if self._done[span.tensor] or span.start != self._arrived[span.tensor]:
            raise WeightSyncError(
                f"{tensor.name}: bytes from {span.start} arrived, {self._arrived[span.tensor]} of {size} were there: "
                "every byte comes once and in order"
            )
        if span.start + span.num_bytes > size or (span.num_bytes == 0) != (size == 0):
            raise WeightSyncError(
                f"{tensor.name}: {span.num_bytes} bytes from {span.start} leave its {size} bytes"
            )
        if span.offset + span.num_bytes > used or span.offset % DTYPES[tensor.dtype].itemsize:
            raise WeightSyncError(
                f"{tensor.name}: offset {span.offset} + {span.num_bytes} is not inside a bucket of {used}"
            )
