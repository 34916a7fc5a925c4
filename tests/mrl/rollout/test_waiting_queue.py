"""The waiting queue: in the order of prompts; held requests stay in it."""

import random

import numpy as np
import pytest

from mrl.rollout.request import GenerationRequest
from mrl.rollout.seeds import sample_of
from mrl.rollout.waiting_queue import ALL, NOTHING, TRAINING, WaitingQueue


def queue_of(*names: str) -> WaitingQueue:
    waiting = WaitingQueue()
    waiting.add(map(request, names))
    return waiting


def request(name: str) -> GenerationRequest:
    return GenerationRequest(name, np.ones(1, np.int32), 0, 4)


def taken(waiting: WaitingQueue, count: int = 99) -> list[str]:
    return [request.request_id for request in waiting.take(count)]


def test_requests_are_begun_in_the_order_of_prompts_whenever_they_came() -> None:
    names = [f"{prompt}.{sample}" for prompt in range(-2, 12) for sample in range(11)]
    waiting = queue_of(*random.Random(1).sample(names, len(names)))
    assert taken(waiting, 30) == names[:30] and len(waiting) == len(names) - 30
    waiting.add([request("-1.3")])
    assert taken(waiting, 1000) == sorted(["-1.3", *names[30:]], key=sample_of) and len(waiting) == 0


@pytest.mark.parametrize(
    ("hold", "begun", "later"),
    [
        (ALL, [], ["-1.0", "-1.1", "2.1", "3.0", "5.0"]),
        (TRAINING, ["-1.0", "-1.1"], ["2.1", "3.0", "5.0"]),
        (NOTHING, ["-1.0", "-1.1", "2.1", "3.0", "5.0"], []),
    ],
)
def test_what_is_held_waits_whenever_it_came(hold: int, begun: list[str], later: list[str]) -> None:
    waiting = queue_of("3.0", "-1.1")
    waiting.hold(hold)
    waiting.add(map(request, ("5.0", "-1.0", "2.1")))
    assert len(waiting) == len(begun) and all(name in waiting for name in begun + later)
    assert taken(waiting) == begun and not any(name in waiting for name in begun)
    waiting.hold(NOTHING)
    assert taken(waiting) == later


def test_a_request_that_is_stopped_is_not_begun() -> None:
    waiting = queue_of("3.0", "3.1", "-1.0", "-1.1")
    waiting.hold(TRAINING)
    assert waiting.remove(["-1.0", "3.1", "9.9"]) == ["-1.0", "3.1"]
    assert taken(waiting) == ["-1.1"]
    waiting.hold(NOTHING)
    assert taken(waiting) == ["3.0"]
