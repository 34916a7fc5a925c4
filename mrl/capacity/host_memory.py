"""The memory of one node's host over a step: what its trainers keep there, and what saving takes beside it.

What a trainer off-loads has its place in host memory for the whole run (page-locked buffers are made once), and
so have the reference policy and the teachers.
"""

from __future__ import annotations

from mrl.capacity.memory_timeline import Event


def host_moments(
    *, memory: int, offloaded: int, reference: int, teachers: int, saving: int, export: int
) -> list[Event]:
    """The moments that need most, in bytes of one node.

    `saving`: what a checkpoint takes beside the rest, 0 where none is saved; `export`: of the process that makes a
    folder of the last one while the run goes on, 0 without.
    """
    kept = {"off-loaded": offloaded, "reference": reference, "teachers": teachers, "export": export}
    moments = [("engines serve", kept), ("save", kept | {"copied state": saving})]
    return [_moment(name, parts, memory) for name, parts in moments if name != "save" or saving]


def _moment(name: str, parts: dict[str, int], memory: int) -> Event:
    filled = {part: size for part, size in parts.items() if size}
    return Event(name, filled, memory - sum(filled.values()))
