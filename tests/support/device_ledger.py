"""A model of a run's GPUs: bytes by process, part and device. What does not fit is an error that names process and moment.

A process holds parts, and beside them what torch's cache keeps: blocks that were freed and not given back, which the process
itself takes again before it asks the device, and no other process can have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


class Overcommit(Exception):
    """A process asked a device for more than is free."""


@dataclasses.dataclass
class Held:
    """What one process has of one device."""

    parts: dict[str, int] = dataclasses.field(default_factory=dict)
    cached: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts.values()) + self.cached

    def __str__(self) -> str:
        named = {**self.parts, "torch's cache": self.cached}
        return ", ".join(f"{part} {size / 1e9:.1f}" for part, size in named.items() if size) or "nothing"


class Ledger:
    """The devices of a run, numbered by slot."""

    def __init__(self, num_devices: int, memory_bytes: int, *, moment: Callable[[], str]) -> None:
        """`moment`: says in errors what the run is doing."""
        self._memory, self._moment = memory_bytes, moment
        self._devices: list[dict[str, Held]] = [{} for _ in range(num_devices)]
        self.marks: dict[tuple[str, int], tuple[int, int]] = {}
        """(event, device) -> bytes of all parts, bytes of all caches, when the event was last marked."""

    def free(self, device: int) -> int:
        """Bytes that any process could get."""
        return self._memory - sum(held.total for held in self._devices[device].values())

    def hold(self, process: str, device: int, part: str, num_bytes: int) -> None:
        """The part has this size now: growth comes from the process's cache first, then from the device; what shrinks stays
        in the cache. Overcommit where the device has not enough."""
        held = self._devices[device].setdefault(process, Held())
        grown = num_bytes - held.parts.get(part, 0)
        held.cached = max(0, held.cached - grown)
        self._take(process, device, part, num_bytes)

    def map(self, process: str, device: int, part: str, num_bytes: int) -> None:
        """The part has this size now, of memory of its own, past torch's cache. Overcommit where the device has not enough."""
        self._devices[device].setdefault(process, Held())
        self._take(process, device, part, num_bytes)

    def _take(self, process: str, device: int, part: str, num_bytes: int) -> None:
        self._devices[device][process].parts[part] = num_bytes
        if self.free(device) < 0:
            holders = "; ".join(f"{name}: {what}" for name, what in self._devices[device].items())
            raise Overcommit(
                f"{process} asks device {device} for {part}, {num_bytes / 1e9:.1f} GB, in {self._moment()}: "
                f"{-self.free(device) / 1e9:.1f} GB too much. {holders}"
            )

    def drop(self, process: str, device: int, part: str) -> None:
        """A mapped part goes back to the device at once."""
        self._devices[device].setdefault(process, Held()).parts.pop(part, None)

    def give_back(self, process: str) -> None:
        """torch.cuda.empty_cache in one process."""
        for device in self._devices:
            if process in device:
                device[process].cached = 0

    def mark(self, event: str, device: int) -> None:
        """Notes what the device holds at an event of the capacity estimate."""
        held = self._devices[device].values()
        live = sum(sum(each.parts.values()) for each in held)
        self.marks[event, device] = live, sum(each.cached for each in held)
