"""Messages between slots of one machine: written straight into receive buckets, they are the messages the group would carry."""

import dataclasses

import numpy as np
import pytest
import torch

from mrl.resharding.planner.slot_plan import SlotPart
from mrl.resharding.planner.topology import Topology
from mrl.resharding.transfer.copies import run
from mrl.resharding.transfer.node_lane import Neighbours, Offer, split
from mrl.resharding.transfer.slot_tables import of_part
from mrl.resharding.wire.shared_memory import SharedSegment
from tests.resharding.planned import Parameters, as_torch, equal, plan_of, world_of
from tests.resharding.simulate import num_elements
from tests.resharding.worlds import World, checkpoint, loaded

POISON = 0xFF


class Slot:
    """What one slot has: buckets, source tensors, its consumer and its lane."""

    def __init__(self, part: SlotPart, world: World, size: int) -> None:
        self.part, self.number = part, part.slot
        self.segments = [SharedSegment(size) for _ in range(2)]
        for segment in self.segments:
            segment.buffer.fill_(POISON)
        values = loaded(world.trainers[part.slot], checkpoint(world))
        self.arrays = [as_torch(np.ascontiguousarray(a)).reshape(-1) for a in values]
        self.consumer = Parameters(world.engines[part.slot])
        self.consumer.start(of_part(part, [None] * len(part.trainer_tensors)), None)  # type: ignore[list-item]
        self.send = torch.full((part.send_bucket_bytes,), POISON, dtype=torch.uint8)
        self.offer = Offer.of(part, [segment.export() for segment in self.segments])
        self.lane: Neighbours

    def meet(self, slots: list["Slot"], nodes: tuple[int, ...]) -> None:
        near = {s.number: s.offer for s in slots if s is not self and nodes[s.number] == nodes[self.number]}
        self.lane = Neighbours(self.part, near)

    def close(self) -> None:
        self.lane.close()
        for segment in self.segments:
            segment.close()


@pytest.mark.parametrize("slots_per_node", [1, 2, 4])
@pytest.mark.parametrize("name", ["tp2-pp2", "ep2-dp2"])
def test_what_goes_this_way_and_what_is_left_make_every_slots_bytes(name: str, slots_per_node: int) -> None:
    world = world_of(name)
    topology = Topology.shared(4, slots_per_node=slots_per_node)
    world = dataclasses.replace(world, topology=topology)
    plan = plan_of(world)
    slots = [Slot(plan.part(s), world, world.options.bucket_bytes) for s in range(4)]
    for slot in slots:
        slot.meet(slots, topology.nodes)
    left = 0
    for number in range(len(plan.windows)):
        for slot in slots:
            slot.lane.pack(number, slot.arrays)
            left += _send_the_rest(slot, slots, number)
        for slot in slots:
            slot.consumer.apply(number, slot.arrays, slot.segments[number % 2].buffer)
    assert all(equal(slot.consumer, world, slot.number) for slot in slots)
    assert (left > 0) == (plan.summary()["bytes_inter_node"] > 0)
    for slot in slots:
        slot.close()


def _send_the_rest(slot: Slot, slots: list[Slot], number: int) -> int:
    """As the group does; messages sent."""
    window = slot.lane.rest.windows[number]
    run(window.pack, slot.arrays, slot.send)
    for message in window.sends:
        there = next(
            m for m in slots[message.peer].lane.rest.windows[number].receives if m.peer == slot.number
        )
        assert there.num_bytes == message.num_bytes
        bucket = slots[message.peer].segments[number % 2].buffer
        bucket[there.offset : there.offset + there.num_bytes] = slot.send[
            message.offset : message.offset + message.num_bytes
        ]
    return len(window.sends)


def test_a_split_loses_and_doubles_nothing() -> None:
    plan = plan_of(world_of("tp2-pp2"))
    window = max(plan.part(0).windows, key=lambda w: len(w.sends))
    assert len(window.sends) > 1
    for places in ({}, {window.sends[0].peer: 64}, {m.peer: 0 for m in window.sends}):
        tables, rest = split(window, places)
        assert set(tables) == set(places) and {m.peer for m in rest.sends} == {
            m.peer for m in window.sends if m.peer not in places
        }
        assert sum(map(num_elements, [*tables.values(), rest.pack])) == num_elements(window.pack)
