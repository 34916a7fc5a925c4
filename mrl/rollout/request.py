"""Generation requests and their completions, token in and token out. Imports no engine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
import xxhash

from mrl.config.root import Config
from mrl.errors import RolloutError
from mrl.rollout.seeds import MAX_ATTEMPTS, request_id, seed_of_request
from mrl.routes import Routes, one_after_other
from mrl.samples import Prompt, ResponseSegment, Sample, Status
from mrl.sampling_masks import SamplingMasks, join_masks

_NO_TOKENS = np.zeros(0, np.int32)
_LEAST_SHARED = 1 << 12
"""Elements of the smallest array that samples share."""


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Request to generate or continue one response."""

    request_id: str
    """Name of the sample (`seeds.request_id`); unique among the requests of an engine."""
    prompt_tokens: np.ndarray
    """[T_prompt] int32."""
    seed: int
    """Seed of the request's own random stream (`seeds.sample_seed`); unused if greedy."""
    max_tokens: int
    """Tokens that may still be generated; those of `own_tokens` do not count."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    greedy: bool = False
    """Take the most probable token; log-probs are then at temperature 1."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response, besides the engine's own."""
    ignore_stop: bool = False
    """Generate max_tokens tokens and ignore stop tokens (measurements, fixed-length tests)."""
    own_tokens: np.ndarray = dataclasses.field(default_factory=lambda: _NO_TOKENS)
    """[T] int32: response tokens that earlier requests generated; the engine continues after them."""
    attempt: int = 0
    """Number of this request among the sample's requests, from 0."""
    urgent: bool = False
    """Send the completion at once because another turn follows it."""

    def require_fits(self, max_length: int) -> None:
        """Raise RolloutError if a model of this length cannot run the request."""
        length = len(self.prompt_tokens) + len(self.own_tokens)
        if length == 0 or self.max_tokens < 1 or length + self.max_tokens > max_length:
            raise RolloutError(
                f"request {self.request_id}: prompt of {length} and {self.max_tokens} new tokens; both must "
                f"be at least 1 and together at most model.max_length = {max_length}"
            )

    @property
    def first_row(self) -> int:
        """First position whose route is recorded: that before the first new token; 0 in a first request."""
        return len(self.prompt_tokens) + len(self.own_tokens) - 1 if len(self.own_tokens) else 0

    def engine_prompt(self) -> np.ndarray:
        """Return [T_prompt + T_own] int32: all tokens that the engine prefills."""
        if not len(self.own_tokens):
            return self.prompt_tokens
        return np.concatenate([self.prompt_tokens, self.own_tokens]).astype(np.int32, copy=False)


Lengths = Callable[[int, int], int]
"""(prompt index, sample index) -> response length in tokens, at least 1."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of responses."""

    num_samples: int
    """Responses per prompt."""
    temperature: float
    max_tokens: int
    seed: int
    """Seed of the run."""
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    lengths: Lengths | None = None
    """Exact length of each response, at most max_tokens; stop tokens are ignored (measurements)."""

    @classmethod
    def of(cls, config: Config, lengths: Lengths | None = None) -> Sampling:
        """Return the sampling parameters of a run's training."""
        return cls(
            num_samples=config.loop.samples_per_prompt,
            temperature=config.rollout.temperature,
            max_tokens=config.rollout.max_response_tokens,
            seed=config.run.seed,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            min_p=config.rollout.min_p,
            lengths=lengths,
        )

    def request(self, prompt: Prompt, number: int) -> GenerationRequest:
        """Return the first request of a prompt's sample."""
        name, max_tokens = request_id(prompt.index, number), self.max_tokens
        if self.lengths is not None:
            max_tokens = min(self.lengths(prompt.index, number), max_tokens)
        return GenerationRequest(
            request_id=name,
            prompt_tokens=prompt.tokens,
            seed=seed_of_request(self.seed, name),
            temperature=self.temperature,
            max_tokens=max_tokens,
            ignore_stop=self.lengths is not None,
            greedy=self.greedy,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
        )

    def requests(self, prompts: Sequence[Prompt]) -> list[GenerationRequest]:
        """Return the first request of each sample, in the order of prompts and samples."""
        return [self.request(prompt, number) for prompt in prompts for number in range(self.num_samples)]


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """Result of a request: tokens of one or more weight versions."""

    request_id: str
    tokens: np.ndarray
    """[T] int32, including the stop token if the policy drew it."""
    logprobs: np.ndarray
    """[T] float32 at the sampling temperature, over the tokens of the sampling masks."""
    segments: tuple[ResponseSegment, ...]
    """Engine and weight version of each span of tokens, in order; empty without tokens."""
    status: Status
    """PARKED: snapshot of an unfinished response."""
    text: str = ""
    """Text of all tokens, including those of earlier requests, if the response has ended."""
    routes: Routes | None = None
    """Routes of the positions that led to these tokens, plus the prompt's in a first request; or None."""
    sampling_masks: SamplingMasks | None = None
    """[T] tokens that each one was drawn from; None: from the whole vocabulary."""

    @classmethod
    def empty(cls, request_id: str, status: Status) -> Self:
        return cls(request_id, np.zeros(0, np.int32), np.zeros(0, np.float32), (), status)

    @property
    def policy_versions(self) -> np.ndarray:
        """[T] int32: weight version that generated each token."""
        if len(self.segments) == 1:  # the usual case
            (only,) = self.segments
            return _constant(only.version, only.end - only.start, np.int32)
        versions = np.array([s.version for s in self.segments], np.int32)
        return np.repeat(versions, [s.end - s.start for s in self.segments])


def prompt_digest(tokens: np.ndarray) -> int:
    """Return 63 bits of the xxh3 hash of the tokens [T] as int32."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens, np.int32)) >> 1


def next_request(request: GenerationRequest, so_far: Completion, run_seed: int) -> GenerationRequest:
    """Return the request that continues after `so_far`: its tokens become `own_tokens` and reduce max_tokens.

    A request without a token keeps its seed: nothing was drawn from its random stream.

    Raises:
        RolloutError: The sample has used its MAX_ATTEMPTS requests.
    """
    attempt = so_far.segments[-1].attempt + 1 if so_far.segments else request.attempt
    if attempt >= MAX_ATTEMPTS:
        raise RolloutError(
            f"request {request.request_id} was interrupted {MAX_ATTEMPTS} times after "
            f"{len(so_far.tokens)} tokens and has no seed left: a response must not take that many versions"
        )
    return dataclasses.replace(
        request,
        own_tokens=np.concatenate([request.own_tokens, so_far.tokens]),
        max_tokens=request.max_tokens - len(so_far.tokens),
        attempt=attempt,
        seed=seed_of_request(run_seed, request.request_id, attempt),
    )


def join_completions(so_far: Completion | None, continuation: Completion) -> Completion:
    """Return an earlier part and its continuation as one completion, with the status of the continuation."""
    if so_far is None or not len(so_far.tokens):
        return continuation
    length = len(so_far.tokens)
    moved = tuple(
        dataclasses.replace(s, start=s.start + length, end=s.end + length) for s in continuation.segments
    )
    return Completion(
        continuation.request_id,
        np.concatenate([so_far.tokens, continuation.tokens]),
        np.concatenate([so_far.logprobs, continuation.logprobs]),
        so_far.segments + moved,
        continuation.status,
        continuation.text,
        one_after_other(so_far.routes, continuation.routes),
        join_masks((part.sampling_masks, len(part.tokens)) for part in (so_far, continuation)),
    )


def sample_of_completion(prompt: Prompt, sample_index: int, completion: Completion) -> Sample:
    """Return the sample of a prompt's completion; FAILED if a row of its routes is missing.

    Raises:
        RolloutError: The context that an engine ran differs from the prompt and earlier segments.
    """
    require_same_context(prompt.tokens, completion)
    is_whole = completion.status is not Status.INTERRUPTED
    failed = is_whole and completion.routes is not None and completion.routes.missing > 0
    return Sample(
        prompt_index=prompt.index,
        sample_index=sample_index,
        prompt_tokens=prompt.tokens,
        response_tokens=completion.tokens,
        loss_mask=_constant(True, len(completion.tokens), np.bool_),
        rollout_logprobs=completion.logprobs,
        policy_versions=completion.policy_versions,
        status=Status.FAILED if failed else completion.status,
        response_text=completion.text,
        domain=prompt.domain,
        tag=prompt.tag,
        segments=completion.segments,
        routes=completion.routes,
        sampling_masks=completion.sampling_masks,
    )


def _constant(value: int, length: int, dtype: type) -> np.ndarray:
    """Return a shared read-only [length] array: masks and versions are 5 of a token's 13 bytes."""
    return _shared(value, max(_LEAST_SHARED, 1 << (length - 1).bit_length()), dtype)[:length]


@functools.lru_cache(maxsize=64)
def _shared(value: int, length: int, dtype: type) -> np.ndarray:
    array = np.full(length, value, dtype)
    array.flags.writeable = False
    return array


def completion_of(sample: Sample) -> Completion:
    """Return the completion of a sample; the inverse of `sample_of_completion`."""
    return Completion(
        sample.sample_id,
        sample.response_tokens,
        sample.rollout_logprobs,
        sample.segments,
        sample.status,
        sample.response_text,
        sample.routes,
        sample.sampling_masks,
    )


def require_same_context(before: np.ndarray, completion: Completion) -> None:
    """Raise RolloutError if a segment's context is not `before` [T] int32 and the tokens before it."""
    for segment in completion.segments:
        context = np.concatenate([before, completion.tokens[: segment.start]]) if segment.start else before
        if prompt_digest(context) != segment.prompt_digest:
            raise RolloutError(
                f"sample {completion.request_id}: engine {segment.engine} ran other tokens before position "
                f"{segment.start} of the response than the {len(context)} of its prompt and earlier segments "
                f"(request {segment.attempt})"
            )
