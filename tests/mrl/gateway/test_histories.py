"""Histories of requests: what is taken over from earlier requests is what reading all again gives."""

from __future__ import annotations

import json
import random
from typing import Any

from mrl.gateway.histories import ChatMessage, Histories, History
from mrl.gateway.openai_responses import read_item

ITEMS: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "user", "content": ""},
    {"role": "assistant", "content": "Let me add."},
    {"type": "reasoning", "summary": []},
    {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"},
    {"type": "function_call", "call_id": "b", "name": "show", "arguments": '{"n": 1}'},
    {"type": "function_call_output", "call_id": "a", "output": "4"},
    {"type": "function_call_output", "call_id": "b", "output": "4"},
]


def read(histories: Histories, items: list[bytes], *, system: str = "", tools: str = "") -> History:
    return histories.read(items, read_item, system=system, tools=tools, api="responses")


def test_what_is_taken_over_is_what_reading_all_gives() -> None:
    """Requests of a few sub-agents that grow, fork, shrink and change their instructions."""
    rng, kept = random.Random(0), Histories()
    talks: list[list[bytes]] = [[] for _ in range(12)]
    for _ in range(2000):
        number = rng.randrange(len(talks))
        talk = list(rng.choice(talks)) if rng.random() < 0.1 else talks[number]
        if rng.random() < 0.2:
            del talk[rng.randint(0, len(talk)) :]
        talk += [json.dumps(item).encode() for item in rng.choices(ITEMS, k=rng.randint(1, 4))]
        talks[number] = talk
        options = {"system": rng.choice(("", "You help.")), "tools": rng.choice(("", "[]"))}
        known, whole = read(kept, talk, **options), read(Histories(), talk, **options)
        assert (known.messages, known.digests) == (whole.messages, whole.digests)
        assert len(known.digests) == len(known.messages) + 1


def test_what_an_earlier_request_had_is_not_read_again() -> None:
    taken: list[Any] = []

    def counted(item: Any, messages: list[ChatMessage]) -> None:
        taken.append(item)
        read_item(item, messages)

    histories, items = Histories(), [json.dumps(item).encode() for item in ITEMS]
    for count in (3, 6, 9):
        histories.read(items[:count], counted, system="", tools="", api="responses")
    assert taken == ITEMS
    histories.read([*items[:5], items[8]], counted, system="", tools="", api="responses")
    assert taken[len(ITEMS) :] == [ITEMS[8]]
