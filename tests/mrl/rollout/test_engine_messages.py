"""Messages arrive as they were sent, and nothing else is read."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest

from mrl.rollout import engine_messages
from mrl.rollout.request import Completion, GenerationRequest
from mrl.routes import RouteRows, Routes
from mrl.samples import ResponseSegment, Status


def request(name: str, prompt: np.ndarray, **fields: Any) -> GenerationRequest:
    return GenerationRequest(name, prompt, (1 << 63) - 1, 9, **fields)


def completion(name: str, lengths: list[int], status: Status, text: str = "", **fields: Any) -> Completion:
    total, ends = sum(lengths), np.cumsum(lengths).tolist()
    segments = tuple(
        ResponseSegment(end - length, end, 5 + number, number, 1, (1 << 63) - 1 - number)
        for number, (length, end) in enumerate(zip(lengths, ends, strict=True))
    )
    tokens = np.arange(total, dtype=np.int32) + len(name)
    logprobs = -np.arange(total, dtype=np.float32) / 3
    return Completion(name, tokens, logprobs, segments, status, text, **fields)


def sent(message: engine_messages.EngineMessage) -> Any:
    return engine_messages.decode(engine_messages.encode(message))


def test_requests_of_one_prompt_share_its_tokens() -> None:
    prompt, other = np.arange(70_000, dtype=np.int32), np.array([3], np.int32)
    made = [
        request("0.0", prompt),
        request("0.1", prompt, temperature=0.25, top_p=0.5, top_k=3, min_p=0.125, ignore_stop=True),
        request("-3.0", other, greedy=True, stop_token_ids=(5, 6), attempt=4, urgent=True),
        request("0.2", prompt, own_tokens=np.array([7, 8], np.int32)),
    ]
    message = engine_messages.submit(made)
    assert len(message.prompts) == 2 and len(engine_messages.encode(message)) < 4 * len(prompt) + 1000
    decoded = engine_messages.requests_of(sent(message))
    for ours, theirs in zip(decoded, made, strict=True):
        for field in dataclasses.fields(GenerationRequest):
            value, expected = getattr(ours, field.name), getattr(theirs, field.name)
            np.testing.assert_array_equal(value, expected)
            assert type(value) is type(expected)
    assert decoded[0].prompt_tokens is decoded[3].prompt_tokens and decoded[0].prompt_tokens.dtype == np.int32
    assert engine_messages.requests_of(sent(engine_messages.submit([]))) == []


def test_completions_come_out_as_they_went_in() -> None:
    made = [
        completion("0.0", [3], Status.FINISHED, "3 é\n\U0001f600"),
        completion("0.1", [], Status.ABORTED),
        completion("12.3", [2, 1, 2], Status.TRUNCATED),
        completion("-12.4", [1], Status.INTERRUPTED),
    ]
    for decoded in (
        engine_messages.completions_of(sent(engine_messages.ended(made, lambda block: -1))),
        engine_messages.completions_of(
            sent(engine_messages.PauseDone(4, 9, engine_messages.ended(made, lambda block: -1))).so_far
        ),
    ):
        assert [repr(item) for item in decoded] == [repr(item) for item in made]
        assert {(c.tokens.dtype.name, c.logprobs.dtype.name) for c in decoded} == {("int32", "float32")}
    assert engine_messages.completions_of(sent(engine_messages.ended([], lambda block: -1))) == []


def test_routes_of_all_completions_travel_as_the_number_of_one_block() -> None:
    kept: list[np.ndarray] = []

    def keep(block: np.ndarray) -> int:
        kept.append(block)
        return 17

    rows = np.arange(24, dtype=np.uint8).reshape(6, 2, 2)
    made = [
        completion(
            "0.0", [3], Status.FINISHED, routes=Routes((RouteRows(rows, 1, 3), RouteRows(rows, 0, 2)))
        ),
        completion("0.1", [], Status.ABORTED),
        completion("1.0", [2], Status.INTERRUPTED, routes=Routes((RouteRows(rows, 4, 6),), 1)),
        completion("1.1", [], Status.INTERRUPTED, routes=Routes(())),
    ]
    message = sent(engine_messages.ended(made, keep))
    assert message.block == 17
    assert [c.routes for c in engine_messages.completions_of(message, "handle")] == [
        Routes((RouteRows("handle", 0, 4),)),
        None,
        Routes((RouteRows("handle", 4, 6),), 1),
        Routes(()),
    ]
    (block,) = kept
    np.testing.assert_array_equal(block, np.concatenate([rows[1:3], rows[0:2], rows[4:6]]))
    assert engine_messages.ended(made[1:2], keep).block == -1 and len(kept) == 1


PLAIN = [
    engine_messages.Challenge(bytes(32)),
    engine_messages.Proof(engine_messages.proof_of(b"secret", bytes(32))),
    engine_messages.Pause(True),
    engine_messages.Resume(False),
    engine_messages.AbortRequests(["0.1", "-1.0"]),
    engine_messages.Pulse(1 << 40, True),
    engine_messages.Failure("PeerLost", "é"),
]


@pytest.mark.parametrize("message", PLAIN, ids=lambda m: type(m).__name__)
def test_every_other_message_is_itself_again(message: engine_messages.EngineMessage) -> None:
    assert sent(message) == message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\n",
        pickle.dumps(engine_messages.Failure("a", "b").kind),
        msgspec.msgpack.encode(["Resume"]),
        msgspec.msgpack.encode(["Resume", "yes"]),
        msgspec.msgpack.encode(["Message"]),
        msgspec.msgpack.encode({"type": "Resume", "training": True}),
        engine_messages.encode(engine_messages.Resume(True)) + b"\x00",
        engine_messages.encode(engine_messages.Challenge(bytes(32)))[:-1],
    ],
)
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        engine_messages.decode(data)


def test_a_proof_is_of_the_secret_and_the_nonce() -> None:
    proofs = {
        engine_messages.proof_of(secret, nonce) for secret in (b"a", b"b") for nonce in (bytes(32), b"1" * 32)
    }
    assert len(proofs) == 4 and {len(proof) for proof in proofs} == {32}
