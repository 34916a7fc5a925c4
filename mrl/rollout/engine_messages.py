"""Messages between a driver and an engine: msgpack in frames (mrl/processes/framing.py), never pickles.

| from the driver | | from the engine | |
|---|---|---|---|
| Proof | first: proves knowledge of the run's secret | Challenge | first: the nonce to prove it with |
| Submit | requests | Ended | completions |
| Pause | stop at a token boundary | PauseDone | all stopped; with the snapshot if requested |
| Resume | step again | Pulse | every second: steps so far |
| AbortRequests | forget requests | Failure | the engine failed |
"""

from __future__ import annotations

import hmac
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from mrl.rollout.request import Completion, GenerationRequest
from mrl.routes import RouteRows, Routes, in_one_block
from mrl.samples import ResponseSegment, Status
from mrl.sampling_masks import MaskFields, join_masks, split_masks

STREAM_BYTES = 1 << 26
"""Buffer of an engine's stream in bytes; a longer frame arrives in parts."""


class EngineMessage(msgspec.Struct, tag=True, array_like=True):
    """One message, which is one frame."""


class Challenge(EngineMessage):
    """Nonce that a connection must sign before anything else is read from it."""

    nonce: bytes


class Proof(EngineMessage):
    """HMAC-SHA256 of the nonce under the run's secret."""

    digest: bytes


class RequestFields(msgspec.Struct, array_like=True):
    """A GenerationRequest without its prompt, which the message contains once."""

    prompt: int
    """Index of its prompt in the message."""
    own_tokens: bytes
    request_id: str
    seed: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    greedy: bool
    stop_token_ids: tuple[int, ...]
    ignore_stop: bool
    attempt: int
    urgent: bool


class Submit(EngineMessage):
    """Requests."""

    prompts: list[bytes]
    """[T] int32 each."""
    requests: list[RequestFields]


class Pause(EngineMessage):
    """Stop at a token boundary."""

    snapshot: bool
    """Return the partial rollout of each request."""


class Resume(EngineMessage):
    """Step again."""

    training: bool
    """False: only requests of a validation run."""


class AbortRequests(EngineMessage):
    """Stop requests and forget them."""

    request_ids: list[str]


class Ended(EngineMessage):
    """Completions, packed into few arrays, which costs less than one message per completion."""

    request_ids: list[str]
    statuses: list[str]
    lengths: list[int]
    """Tokens of each completion."""
    tokens: memoryview
    """[sum of lengths] int32, in the frame's memory."""
    logprobs: memoryview
    """[sum of lengths] float32."""
    num_segments: list[int]
    segments: list[tuple[int, int, int, int, int, int]]
    """Fields of a ResponseSegment."""
    texts: list[str]
    block: int = -1
    """Number of the block that contains all routes, in the engine's process; -1 without routes."""
    routes: list[tuple[int, int, int] | None] = []
    """(first row, one past the last, positions without a row) of each completion."""
    masks: MaskFields | None = None
    """Sampling masks of all tokens; None without any."""


class PauseDone(EngineMessage):
    """The engine stopped stepping."""

    num_requests: int
    num_tokens: int
    so_far: Ended


class Pulse(EngineMessage):
    """Heartbeat of the engine's process."""

    num_steps: int
    is_busy: bool


class Failure(EngineMessage):
    """The engine failed for good."""

    kind: str
    text: str


_decoder = msgspec.msgpack.Decoder(
    Challenge | Proof | Submit | Pause | Resume | AbortRequests | Ended | PauseDone | Pulse | Failure
)
encode: Callable[[EngineMessage], bytes] = msgspec.msgpack.Encoder().encode
"""Return the bytes of a message."""


def decode(data: bytes | memoryview) -> Any:
    """Return the message in these bytes; raise msgspec.ValidationError or DecodeError if there is none."""
    return _decoder.decode(data)


def proof_of(secret: bytes, nonce: bytes) -> bytes:
    """Return the digest that proves knowledge of the secret."""
    return hmac.digest(secret, nonce, "sha256")


_PLAIN = RequestFields.__struct_fields__[2:]
_plain = operator.attrgetter(*_PLAIN)


def submit(requests: Iterable[GenerationRequest]) -> Submit:
    """Return requests as a message; requests of one prompt share its tokens."""
    numbers: dict[int, int] = {}
    prompts: list[bytes] = []
    fields = []
    for request in requests:
        key = id(request.prompt_tokens)
        if key not in numbers:
            numbers[key] = len(prompts)
            prompts.append(np.ascontiguousarray(request.prompt_tokens, np.int32).tobytes())
        tail = (
            np.ascontiguousarray(request.own_tokens, np.int32).tobytes() if len(request.own_tokens) else b""
        )
        fields.append(RequestFields(numbers[key], tail, *_plain(request)))
    return Submit(prompts, fields)


def requests_of(message: Submit) -> list[GenerationRequest]:
    """Return the requests of a message."""
    prompts = [np.frombuffer(data, np.int32) for data in message.prompts]
    return [
        GenerationRequest(
            prompt_tokens=prompts[fields.prompt],
            own_tokens=np.frombuffer(fields.own_tokens, np.int32),
            **dict(zip(_PLAIN, _plain(fields), strict=True)),
        )
        for fields in message.requests
    ]


_segment_fields = operator.attrgetter(*ResponseSegment.__slots__)
_STATUS = {status.value: status for status in Status}


def ended(completions: Sequence[Completion], keep: Callable[[np.ndarray], int]) -> Ended:
    """Return completions as a message; `keep` takes the block of all routes and returns its number."""
    moved, block = in_one_block([c.routes for c in completions], keep), -1
    routes: list[tuple[int, int, int] | None] = []
    for route in moved:
        if route is None:
            routes.append(None)
            continue
        for piece in route.pieces:
            block = piece.block
        (start, stop) = (route.pieces[0].start, route.pieces[-1].stop) if route.pieces else (0, 0)
        routes.append((start, stop, route.missing))
    return Ended(
        request_ids=[c.request_id for c in completions],
        statuses=[c.status.value for c in completions],
        lengths=[len(c.tokens) for c in completions],
        tokens=memoryview(b"".join(np.ascontiguousarray(c.tokens, np.int32).data for c in completions)),
        logprobs=memoryview(b"".join(np.ascontiguousarray(c.logprobs, np.float32).data for c in completions)),
        num_segments=[len(c.segments) for c in completions],
        segments=[_segment_fields(s) for c in completions for s in c.segments],
        texts=[c.text for c in completions],
        block=block,
        routes=routes,
        masks=MaskFields.of(join_masks((c.sampling_masks, len(c.tokens)) for c in completions)),
    )


def completions_of(message: Ended, block: object = None) -> list[Completion]:
    """Return the completions of a message as copies; `block` is the object that its block number names."""
    segments, end, completions = iter(message.segments), 0, []
    routes = message.routes or [None] * len(message.request_ids)
    for name, status, length, count, text, route, masks in zip(
        message.request_ids,
        message.statuses,
        message.lengths,
        message.num_segments,
        message.texts,
        routes,
        split_masks(message.masks, message.lengths),
        strict=True,
    ):
        span, end = slice(4 * end, 4 * (end + length)), end + length
        tokens = np.frombuffer(bytes(message.tokens[span]), np.int32)
        logprobs = np.frombuffer(bytes(message.logprobs[span]), np.float32)
        parts = tuple([ResponseSegment(*next(segments)) for _ in range(count)])
        completions.append(
            Completion(name, tokens, logprobs, parts, _STATUS[status], text, _routes(route, block), masks)
        )
    return completions


def _routes(route: tuple[int, int, int] | None, block: object) -> Routes | None:
    if route is None:
        return None
    start, stop, missing = route
    return Routes((RouteRows(block, start, stop),) if stop > start else (), missing)
