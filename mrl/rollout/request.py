"""What is asked of an engine and what comes back, token in and token out. Pure: imports no engine.

Also the seeds: samples of one run never share one (`sample_seed`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import numpy as np
import xxhash

from mrl.errors import ConfigError, RolloutError
from mrl.rollout.stint import Address
from mrl.routes import Keep, Routes, in_one_block
from mrl.samples import Prompt, ResponseSegment, Status

MAX_ATTEMPTS = 1 << 10
"""Requests that one sample may take: each has a seed of its own."""

_PROMPT_LOW_BITS, _SAMPLE_LOW_BITS = 20, 12
_PROMPT_HIGH_BITS, _SAMPLE_HIGH_BITS, _ATTEMPT_BITS = 17, 4, MAX_ATTEMPTS.bit_length() - 1
_LOW_BITS = _PROMPT_LOW_BITS + _SAMPLE_LOW_BITS
_MASK_32 = (1 << 32) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response to produce, or to go on with."""

    request_id: str
    """Of its prompt and sample (`request_id`): unique among the requests an engine holds."""
    prompt_tokens: np.ndarray
    """[T_prompt] int32."""
    seed: int
    """Of this request's own random stream (`sample_seed`); unused when greedy."""
    max_tokens: int
    """Tokens that may still be produced; those of `own_tokens` are not among them."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    greedy: bool = False
    """Take the most probable token; the temperature is then 1 for the log-probs."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response besides the engine's own."""
    ignore_stop: bool = False
    """Run to max_tokens whatever is produced (measurements, fixed-length tests)."""
    own_tokens: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    """[T] int32: the response's tokens so far, of earlier requests; the engine goes on after them."""
    attempt: int = 0
    """Number of this request among those made for its sample, from 0."""

    def require_fits(self, max_length: int) -> None:
        """RolloutError where a model of this length cannot run it."""
        require_fits(
            self.request_id, len(self.prompt_tokens) + len(self.own_tokens), self.max_tokens, max_length
        )

    @property
    def first_row(self) -> int:
        """The first position whose route belongs to its response: the one before the first token that it draws, or
        the prompt's first one where no earlier request has these."""
        return len(self.prompt_tokens) + len(self.own_tokens) - 1 if len(self.own_tokens) else 0

    def engine_prompt(self) -> np.ndarray:
        """[T_prompt + T_own] int32: all that the engine computes before it draws a token."""
        return np.concatenate([self.prompt_tokens, self.own_tokens]).astype(np.int32, copy=False)


Lengths = Callable[[int, int], int]
"""(prompt index, sample index) -> tokens of the response, at least 1. Travels to the engines (pickled)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How the responses of a round are drawn."""

    num_samples: int
    """Responses to each prompt."""
    temperature: float
    max_tokens: int
    seed: int
    """Of the run."""
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    lengths: Lengths | None = None
    """Each response runs to its own length, but not over max_tokens, whatever is produced (measurements)."""

    def budget(self, prompt_index: int, sample_index: int) -> int:
        """Tokens that a sample's response may have, or with `lengths` has."""
        if self.lengths is None:
            return self.max_tokens
        return min(self.lengths(prompt_index, sample_index), self.max_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """Prompts with the same sampling; what travels to an engine, which makes the single requests of it."""

    prompts: tuple[tuple[int, np.ndarray], ...]
    """(index, tokens [T] int32) of each."""
    sampling: Sampling

    @classmethod
    def of(cls, prompts: Sequence[Prompt], sampling: Sampling) -> Round:
        return cls(tuple((prompt.index, prompt.tokens) for prompt in prompts), sampling)

    def require_fits(self, max_length: int) -> None:
        """RolloutError where a model of this length cannot run one of its requests."""
        for index, tokens in self.prompts:
            require_fits(request_id(index, 0), len(tokens), self.sampling.max_tokens, max_length)

    def __len__(self) -> int:
        """The number of requests."""
        return len(self.prompts) * self.sampling.num_samples

    def requests(self) -> list[GenerationRequest]:
        """One for each response, each with a seed of its own."""
        return [self.request(*place) for _, *place in self.places()]

    def places(self) -> Iterator[tuple[Self, int, int]]:
        """This, and what `request` takes, in the order of `requests`."""
        return itertools.product((self,), range(len(self.prompts)), range(self.sampling.num_samples))

    def request(self, place: int, number: int) -> GenerationRequest:
        """That of a sample of the prompt at a place."""
        (index, tokens), s = self.prompts[place], self.sampling
        name = request_id(index, number)
        return GenerationRequest(
            request_id=name,
            prompt_tokens=tokens,
            seed=seed_of_request(s.seed, name),
            temperature=s.temperature,
            max_tokens=s.budget(index, number),
            ignore_stop=s.lengths is not None,
            greedy=s.greedy,
            top_p=s.top_p,
            top_k=s.top_k,
            min_p=s.min_p,
        )

    def request_ids(self) -> list[str]:
        """In the order of `requests`."""
        return [request_id(index, n) for index, _ in self.prompts for n in range(self.sampling.num_samples)]


def require_fits(request_id: str, length: int, max_tokens: int, max_length: int) -> None:
    """RolloutError where there is nothing to go on from or nothing to produce, or where both are too long together."""
    if length == 0 or max_tokens < 1 or length + max_tokens > max_length:
        raise RolloutError(
            f"request {request_id}: prompt of {length} and {max_tokens} new tokens; both must be at least 1 and together at "
            f"most model.max_length = {max_length}"
        )


def request_id(prompt_index: int, sample_index: int) -> str:
    """Unique in a run, like the sample it becomes."""
    return f"{prompt_index}.{sample_index}"


def sample_of(request_id: str) -> tuple[int, int]:
    """(prompt index, sample index) of a request's id."""
    prompt_index, sample_index = request_id.split(".")
    return int(prompt_index), int(sample_index)


@dataclasses.dataclass(frozen=True, slots=True)
class Response:
    """What came of one request, or of all that were made for a sample (mrl/rollout/drafts.py)."""

    request_id: str
    tokens: np.ndarray
    """[T] int32, the stopping token included when the policy produced it."""
    logprobs: np.ndarray
    """[T] float32, of the whole vocabulary at the sampling temperature (what top_p, top_k and min_p leave out included)."""
    segments: tuple[ResponseSegment, ...]
    """Whose tokens these are; one segment out of an engine, none where there is no token."""
    status: Status
    text: str = ""
    """Of all tokens, those of earlier requests too, where the response ended (mrl/rollout/texts.py)."""
    routes: Routes | None = None
    """Of the positions that led to these tokens, of the prompt's before them too where it answers a first request; None where
    nobody asked for them."""

    @classmethod
    def empty(cls, request_id: str, status: Status) -> Self:
        return cls(request_id, np.zeros(0, np.int32), np.zeros(0, np.float32), (), status)

    @property
    def policy_versions(self) -> np.ndarray:
        """[T] int32: the version of the weights that produced each token."""
        if len(self.segments) == 1:  # as most have
            (only,) = self.segments
            return np.full(only.end - only.start, only.version, np.int32)
        versions = np.array([s.version for s in self.segments], np.int32)
        return np.repeat(versions, [s.end - s.start for s in self.segments])


@dataclasses.dataclass(frozen=True, slots=True)
class ResponseBatch:
    """Many responses in few arrays: between processes each small array costs more than its bytes."""

    request_ids: tuple[str, ...]
    statuses: tuple[Status, ...]
    lengths: np.ndarray
    """[R] tokens of each response."""
    tokens: np.ndarray
    """[sum of lengths], as are the log-probs."""
    logprobs: np.ndarray
    num_segments: np.ndarray
    """[R] segments of each response."""
    segments: np.ndarray
    """[sum of num_segments, fields of a ResponseSegment] int64."""
    texts: tuple[str, ...]
    routes: tuple[Routes | None, ...]
    """[R] in one block."""
    bell: Address = ("", 0, b"")
    """Of the process that they came from."""

    @classmethod
    def of(cls, responses: Sequence[Response], keep: Keep = lambda block: block) -> ResponseBatch:
        """`keep`: takes the block of all routes, and gives what stands for it on its way."""

        def join(arrays: list[np.ndarray], kind: type) -> np.ndarray:
            return np.concatenate(arrays) if arrays else np.zeros(0, kind)

        return cls(
            request_ids=tuple(r.request_id for r in responses),
            statuses=tuple(r.status for r in responses),
            lengths=np.array([len(r.tokens) for r in responses], np.int64),
            tokens=join([r.tokens for r in responses], np.int32),
            logprobs=join([r.logprobs for r in responses], np.float32),
            num_segments=np.array([len(r.segments) for r in responses], np.int64),
            segments=np.array([_segment_fields(s) for r in responses for s in r.segments], np.int64).reshape(
                -1, len(dataclasses.fields(ResponseSegment))
            ),
            texts=tuple(r.text for r in responses),
            routes=in_one_block([r.routes for r in responses], keep),
        )

    def __len__(self) -> int:
        """The number of responses."""
        return len(self.request_ids)

    def responses(self) -> list[Response]:
        """The same responses, each in memory of its own: one that is kept keeps no other."""
        ends, lengths, counts = (
            np.cumsum(self.lengths).tolist(),
            self.lengths.tolist(),
            self.num_segments.tolist(),
        )
        segments = iter([ResponseSegment(*row) for row in self.segments.tolist()])
        return [
            Response(
                request_id,
                self.tokens[end - length : end].copy(),
                self.logprobs[end - length : end].copy(),
                tuple(itertools.islice(segments, count)),
                status,
                text,
                own_routes,
            )
            for request_id, status, length, end, count, text, own_routes in zip(
                self.request_ids,
                self.statuses,
                lengths,
                ends,
                counts,
                self.texts,
                self.routes,
                strict=True,
            )
        ]


_segment_fields = operator.attrgetter(*(f.name for f in dataclasses.fields(ResponseSegment)))


def prompt_digest(tokens: np.ndarray) -> int:
    """63 bits of the xxh3 of the tokens [T] as int32."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens, np.int32)) >> 1


def seed_of_request(run_seed: int, request_id: str, attempt: int = 0) -> int:
    """`sample_seed` of the sample that a request is for. Validation prompts have negative indices; their seeds lie above
    those of any training prompt."""
    index, number = sample_of(request_id)
    return sample_seed(run_seed, index if index >= 0 else (1 << 36) - index, number, attempt)


def sample_seed(run_seed: int, prompt_index: int, sample_index: int, attempt: int = 0) -> int:
    """The seed of one sample's random stream, in 63 bits; no two samples or attempts of a run share one.

    One to one by construction: the low 32 bits are a keyed permutation of (prompt modulo 2^20, sample modulo 2^12),
    the high 31 bits name the rest. The low half matters by itself because torch's CPU generator uses only the
    low 32 bits of a seed: samples of 2^20 neighbouring prompts differ there too.
    """
    limits = (
        ("prompt_index", prompt_index, _PROMPT_LOW_BITS + _PROMPT_HIGH_BITS),
        ("sample_index", sample_index, _SAMPLE_LOW_BITS + _SAMPLE_HIGH_BITS),
        ("attempt", attempt, _ATTEMPT_BITS),
    )
    for name, value, bits in limits:
        if not 0 <= value < 1 << bits:
            raise ConfigError(f"{name} = {value} has no seed of its own; it must lie in 0..2^{bits} - 1")
    prompt_high, prompt_low = divmod(prompt_index, 1 << _PROMPT_LOW_BITS)
    sample_high, sample_low = divmod(sample_index, 1 << _SAMPLE_LOW_BITS)
    high = (prompt_high << _SAMPLE_HIGH_BITS | sample_high) << _ATTEMPT_BITS | attempt
    return high << _LOW_BITS | _permute_32(prompt_low << _SAMPLE_LOW_BITS | sample_low, _keys(run_seed, high))


@functools.lru_cache(maxsize=1024)
def _keys(run_seed: int, high: int) -> tuple[int, ...]:
    """Four words of 32 bits."""
    digest = hashlib.blake2b(f"{run_seed}.{high}".encode(), digest_size=16).digest()
    return struct.unpack("<4I", digest)


def _permute_32(value: int, keys: tuple[int, ...]) -> int:
    """A permutation of 0..2^32 - 1: xor, odd multiplication and shift-xor are each invertible."""
    for key in keys:
        value ^= key
        value = value * 0x9E3779B1 & _MASK_32
        value ^= value >> 15
        value = value * 0x85EBCA77 & _MASK_32
        value ^= value >> 13
    return value
