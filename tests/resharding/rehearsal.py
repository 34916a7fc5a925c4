"""A plan rehearsed as concurrent processes: every order that delays and kills can produce, with real bytes in bounded buckets.

Each slot has two processes, as in a run, and a wire. The exchange (the trainer process) visits every window: packs it while
the one before is on the wire, waits until that one is sent and received and for a free receive bucket, agrees with all others
and starts it. The engine unpacks window by window and frees the bucket. A message moves only when sender and receiver are both
at its window (a rendezvous, stricter than any transport). Commit is in two phases: an engine is verified after its last window, and only when all are does any become
visible. Owns the proof of the order; the real executor is elsewhere.

| process  | consumes              | produces              | waits for                              | unblocked by          |
|----------|-----------------------|-----------------------|----------------------------------------|-----------------------|
| exchange | trainer tensors       | a full send bucket    | its wire; free bucket; all others      | wire; engine; peers   |
| wire     | peers' send buckets   | a full receive bucket | own exchange and peer at the window    | exchanges             |
| engine   | a full receive bucket | engine tensors        | a full bucket; then everyone verified  | exchange; coordinator |
"""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Callable, Generator, Sequence

import torch

from mrl.resharding.planner.plan import Plan
from mrl.resharding.planner.slot_plan import SlotMessage, SlotPart, WindowPart
from mrl.resharding.transfer.copies import run_copies
from tests.resharding.simulate import Storages, bucket_of, flat_of, lent_to, targets_of, trained_on

NUM_BUCKETS = 2

Wait = Callable[[], bool]
Process = Generator[Wait, None, None]


class State(enum.Enum):
    """How an engine ends."""

    COMMITTED = "serves the new version"
    FAILED = "serves nothing until a full resend"
    DEAD = "was killed"


@dataclasses.dataclass(frozen=True, slots=True)
class Kill:
    """End a process when it has been given `after` turns."""

    role: str
    """exchange or engine."""
    slot: int
    after: int


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How every engine ended, and what it holds where it committed."""

    states: dict[int, State]
    """By engine rank."""
    tensors: dict[int, list[torch.Tensor]]
    """Flat tensors of the committed engines, by engine rank, in the manifest's order."""
    turns: int


class _Slot:
    """What one slot's two processes share."""

    def __init__(self, part: SlotPart, sources: Sequence[list[torch.Tensor]]) -> None:
        self.part = part
        self.held, self.lent, self.targets = (
            trained_on(part, sources),
            lent_to(part, sources),
            targets_of(part),
        )
        most = max((window.bucket_bytes for window in part.windows), default=0)
        self.send = [bucket_of(part.send_bucket_bytes) for _ in range(NUM_BUCKETS)]
        self.buckets = [bucket_of(most) for _ in range(NUM_BUCKETS)]
        self.window: WindowPart | None = None
        self.unsent: set[int] = set()
        self.unreceived: set[int] = set()
        self.ready = 0
        self.filled = 0
        self.unpacked = 0
        self.verified = False
        self.committed = False


def rehearse(plan: Plan, storages: Storages, *, seed: int, kills: Sequence[Kill] = ()) -> Outcome:
    """Run the plan's processes in a random order. RuntimeError on a deadlock nobody's death explains.

    After a kill the others wait until nothing can move; then every deadline has passed and each unfinished engine fails.
    """
    sources = flat_of(storages)
    slots = [_Slot(plan.part(slot), sources) for slot in range(plan.topology.num_slots)]
    processes: dict[tuple[str, int], Process] = {}
    for number, slot in enumerate(slots):
        processes["exchange", number] = _exchange(slot, slots)
        processes["wire", number] = _wire(slot, slots)
        if slot.part.engine_rank is not None:
            processes["engine", number] = _engine(slot, slots)
    dead, turns = _schedule(processes, random.Random(seed), kills)
    states, tensors = {}, {}
    for number, slot in enumerate(slots):
        rank = slot.part.engine_rank
        if rank is None:
            continue
        if ("engine", number) in dead:
            states[rank] = State.DEAD
        elif slot.committed:
            states[rank], tensors[rank] = State.COMMITTED, slot.targets
        else:
            states[rank] = State.FAILED
    return Outcome(states, tensors, turns)


def _schedule(
    processes: dict[tuple[str, int], Process], rng: random.Random, kills: Sequence[Kill]
) -> tuple[set[tuple[str, int]], int]:
    """Give turns to random processes that can move until all ended or none can. Returns the killed, and the turns given."""
    doomed = {(kill.role, kill.slot): kill.after for kill in kills}
    waits: dict[tuple[str, int], Wait] = {key: lambda: True for key in processes}
    given = dict.fromkeys(processes, 0)
    dead: set[tuple[str, int]] = set()
    turns = 0
    while waits:
        for key in [key for key in waits if doomed.get(key, -1) == given[key]]:
            dead.add(key)
            del waits[key]
        able = [key for key, wait in waits.items() if wait()]
        if not able:
            if waits and not dead:
                raise RuntimeError(f"deadlock: {sorted(waits)} wait and nobody was killed")
            break
        key = rng.choice(able)
        given[key] += 1
        turns += 1
        try:
            waits[key] = next(processes[key])
        except StopIteration:
            del waits[key]
    return dead, turns


def _exchange(slot: _Slot, slots: Sequence[_Slot]) -> Process:
    for turn, window in enumerate(slot.part.windows):
        run_copies(window.pack, slot.held, slot.send[turn % NUM_BUCKETS])
        yield lambda: not slot.unsent and not slot.unreceived
        slot.filled = turn
        yield lambda turn=turn: slot.unpacked > turn - NUM_BUCKETS or slot.part.engine_rank is None
        slot.ready = turn + 1
        yield lambda turn=turn: all(other.ready > turn for other in slots)
        slot.unsent = {message.peer for message in window.sends}
        slot.unreceived = {message.peer for message in window.receives}
        slot.window = window
        yield lambda: True
    yield lambda: not slot.unsent and not slot.unreceived
    slot.filled = len(slot.part.windows)


def _wire(slot: _Slot, slots: Sequence[_Slot]) -> Process:
    """What the slot receives, message by message, while its trainer process goes on."""
    for turn, window in enumerate(slot.part.windows):
        for message in window.receives:
            peer = slots[message.peer]
            yield lambda peer=peer, window=window: _at(slot, window) and _at(peer, window)
            _receive(slot, peer, message, turn % NUM_BUCKETS)


def _at(slot: _Slot, window: WindowPart) -> bool:
    return slot.window is not None and slot.window.index == window.index


def _receive(slot: _Slot, peer: _Slot, message: SlotMessage, which: int) -> None:
    assert peer.window is not None, "a rendezvous has a sender"
    out = next(m for m in peer.window.sends if m.peer == slot.part.slot)
    bucket = slot.buckets[which]
    bucket[message.offset : message.offset + message.num_bytes] = peer.send[which][
        out.offset : out.offset + out.num_bytes
    ]
    slot.unreceived.discard(peer.part.slot)
    peer.unsent.discard(slot.part.slot)


def _engine(slot: _Slot, slots: Sequence[_Slot]) -> Process:
    for number, window in enumerate(slot.part.windows):
        yield lambda number=number: slot.filled > number
        run_copies(window.local, slot.lent, slot.targets)
        yield lambda: True
        run_copies(window.unpack, slot.buckets[number % NUM_BUCKETS], slot.targets)
        slot.unpacked = number + 1
    slot.verified = True
    yield lambda: all(other.verified for other in slots if other.part.engine_rank is not None)
    slot.committed = True
