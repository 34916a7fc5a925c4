"""What an engine has not begun: in the order of prompts, and nothing of before a park until it goes on."""

import random

import numpy as np

from mrl.rollout.request import GenerationRequest, sample_of
from mrl.rollout.waiting import WaitingQueue


def request(name: str) -> GenerationRequest:
    return GenerationRequest(name, np.ones(1, np.int32), 0, 4)


def taken(waiting: WaitingQueue, count: int) -> list[str]:
    return [each.request_id for each in waiting.take(count)]


def test_requests_are_begun_in_the_order_of_prompts_whenever_they_came() -> None:
    waiting, names = (
        WaitingQueue(),
        [f"{prompt}.{sample}" for prompt in range(-2, 12) for sample in range(11)],
    )
    waiting.add(map(request, random.Random(1).sample(names, len(names))))
    assert taken(waiting, 30) == names[:30] and len(waiting) == len(names) - 30
    waiting.add([request("-1.3")])
    assert taken(waiting, 1000) == sorted(["-1.3", *names[30:]], key=sample_of) and len(waiting) == 0


def test_what_waits_since_a_park_is_begun_after_it() -> None:
    """A validation comes and goes meanwhile; what was parked goes on before what is younger."""
    waiting = WaitingQueue()
    waiting.add(map(request, ("3.0", "3.1", "4.0")))
    waiting.hold()
    waiting.add([request("-1.0")])
    assert len(waiting) == 1 and taken(waiting, 9) == ["-1.0"] and "3.1" in waiting
    waiting.add(map(request, ("5.0", "2.1")))
    waiting.go_on()
    assert taken(waiting, 9) == ["2.1", "3.0", "3.1", "4.0", "5.0"] and "3.1" not in waiting


def test_a_request_that_is_stopped_is_not_begun() -> None:
    waiting = WaitingQueue()
    waiting.add(map(request, ("3.0", "3.1")))
    waiting.hold()
    waiting.add(map(request, ("4.0", "4.1")))
    assert waiting.remove(["4.0", "3.1", "9.9"]) == ["4.0", "3.1"]
    waiting.go_on()
    assert taken(waiting, 9) == ["3.0", "4.1"]
