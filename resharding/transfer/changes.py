"""Both ends of a weight sync that sends what changed: the version before, and the choice of what is sent.

A trainer rank keeps a copy of its parameters, an engine rank the messages that it got. A receiver that does
not have the version before (it joined, or its last session failed) gets everything.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from mrl.resharding.wire.delta import packed_changes, pays


class SentWeights:
    """A trainer rank's parameters in the version that it sent last."""

    def __init__(self, choice: Literal["on", "auto"]) -> None:
        """`choice`: as `sync.delta`."""
        self._choice = choice
        self._version: int | None = None
        self.tensors: Sequence[torch.Tensor] = ()
        """Flat copies, in the manifest's order."""
        self._holders: frozenset[int] = frozenset()
        self._link: float | None = None
        """Bytes per second of the last session that sent everything."""
        self._session = _Amounts()

    def begin(self, held: Mapping[int, int | None]) -> None:
        """Start a session with these receivers and the versions that they have."""
        version = self._version
        self._holders = frozenset(r for r, v in held.items() if v is not None and v == version)
        self._session = _Amounts()

    @property
    def is_useful(self) -> bool:
        """False once packing takes longer in this session than it saves."""
        amounts = self._session
        if not self._holders or self._choice == "on" or not amounts.tried:
            return bool(self._holders)
        return pays(amounts.tried, amounts.packed, amounts.seconds, self._link or float("inf"))

    def packed(self, receiver: int, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
        """Return a message as changes of the version before, or None if it is sent whole."""
        amounts, result = self._session, None
        if receiver in self._holders and self.is_useful:
            started = time.monotonic()
            result = packed_changes(old, new)
            amounts.seconds += time.monotonic() - started
            amounts.tried += new.numel()
            amounts.packed += new.numel() if result is None else result.numel()
        amounts.whole += new.numel()
        amounts.sent += new.numel() if result is None else result.numel()
        return result

    def keep(self, tensors: Sequence[torch.Tensor], move_seconds: float) -> dict[str, float]:
        """Keep what was sent, of no version until `commit`; return the bytes sent, by metric name."""
        self._version, amounts = None, self._session
        if len(self.tensors) != len(tensors):
            self.tensors = [torch.empty_like(tensor) for tensor in tensors]
        for kept, tensor in zip(self.tensors, tensors, strict=True):
            kept.copy_(tensor)
        if amounts.sent == amounts.whole and move_seconds > 0:
            self._link = amounts.sent / move_seconds
        return {"sent_bytes": float(amounts.sent)}

    def commit(self, version: int) -> None:
        """Note that all receivers have what was kept, as this version."""
        self._version = version


@dataclasses.dataclass(slots=True)
class _Amounts:
    """Bytes of one session's messages: all, as sent; those that were tried, and what they became."""

    whole: int = 0
    sent: int = 0
    tried: int = 0
    packed: int = 0
    seconds: float = 0.0


class HeldMessages:
    """An engine rank's messages of the version that it committed last, window by window."""

    def __init__(self) -> None:
        self._tables = ""
        self._version: int | None = None
        self._windows: dict[int, torch.Tensor] = {}

    def version(self, tables: str) -> int | None:
        """Return the version that is complete here by the tables with this digest, or None."""
        return self._version if tables == self._tables else None

    def begin(self, tables: str) -> None:
        """Start a session; until its commit the messages are of no version."""
        if tables != self._tables:
            self._windows = {}
        self._tables, self._version = tables, None

    def window(self, number: int) -> torch.Tensor:
        """Return a window's bytes in the version before, which the session replaces."""
        return self._windows.setdefault(number, torch.empty(0, dtype=torch.uint8))

    def commit(self, version: int) -> None:
        """Note that all windows are of this version."""
        self._version = version
