"""What an engine is asked for and what it returns, token in and token out. Pure: imports no engine."""

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

_NO_TOKENS = np.zeros(0, np.int32)
_LEAST_SHARED = 1 << 12
"""Elements of the smallest array that samples share."""


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response to generate, or to continue."""

    request_id: str
    """Name of the sample (`seeds.request_id`); unique among the requests that an engine holds."""
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
    """Take the most probable token; the temperature is then 1 for the log-probs."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response besides the engine's own."""
    ignore_stop: bool = False
    """Run to max_tokens whatever is generated (measurements, fixed-length tests)."""
    own_tokens: np.ndarray = dataclasses.field(default_factory=lambda: _NO_TOKENS)
    """[T] int32: tokens of the response that earlier requests generated; the engine continues after them."""
    attempt: int = 0
    """Number of this request among those made for its sample, from 0."""
    urgent: bool = False
    """Send the completion at once: another turn follows it."""

    def require_fits(self, max_length: int) -> None:
        """Raise RolloutError if a model of this length cannot run the request."""
        length = len(self.prompt_tokens) + len(self.own_tokens)
        if length == 0 or self.max_tokens < 1 or length + self.max_tokens > max_length:
            raise RolloutError(
                f"request {self.request_id}: prompt of {length} and {self.max_tokens} new tokens; both must be at least 1 "
                f"and together at most model.max_length = {max_length}"
            )

    @property
    def first_row(self) -> int:
        """First position whose route belongs to the response: the one before its first new token, or the prompt's first
        one if no earlier request has these."""
        return len(self.prompt_tokens) + len(self.own_tokens) - 1 if len(self.own_tokens) else 0

    def engine_prompt(self) -> np.ndarray:
        """Return [T_prompt + T_own] int32: all that the engine computes before it draws a token."""
        if not len(self.own_tokens):
            return self.prompt_tokens
        return np.concatenate([self.prompt_tokens, self.own_tokens]).astype(np.int32, copy=False)


Lengths = Callable[[int, int], int]
"""(prompt index, sample index) -> tokens of the response, at least 1."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are drawn."""

    num_samples: int
    """Responses to each prompt."""
    temperature: float
    max_tokens: int
    seed: int
    """Seed of the run."""
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    lengths: Lengths | None = None
    """Each response runs to its own length, but not over max_tokens, whatever is generated (measurements)."""

    @classmethod
    def of(cls, config: Config, lengths: Lengths | None = None) -> Sampling:
        """Return how the samples of a run's training are drawn."""
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
        name, most = request_id(prompt.index, number), self.max_tokens
        if self.lengths is not None:
            most = min(self.lengths(prompt.index, number), most)
        return GenerationRequest(
            request_id=name,
            prompt_tokens=prompt.tokens,
            seed=seed_of_request(self.seed, name),
            temperature=self.temperature,
            max_tokens=most,
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
    """What came of a request: tokens of one or more versions of the weights."""

    request_id: str
    tokens: np.ndarray
    """[T] int32, the stopping token included if the policy drew it."""
    logprobs: np.ndarray
    """[T] float32, over the whole vocabulary at the sampling temperature (before top_p, top_k and min_p)."""
    segments: tuple[ResponseSegment, ...]
    """Which engine and version generated which tokens, in order; empty without tokens."""
    status: Status
    """PARKED: not ended, a snapshot of what has come so far."""
    text: str = ""
    """Text of all tokens, those of earlier requests included, if the response has ended."""
    routes: Routes | None = None
    """Routes of the positions that led to these tokens, and of the prompt's if no earlier request has them; None if the
    engine does not record them."""

    @classmethod
    def empty(cls, request_id: str, status: Status) -> Self:
        return cls(request_id, np.zeros(0, np.int32), np.zeros(0, np.float32), (), status)

    @property
    def policy_versions(self) -> np.ndarray:
        """Return [T] int32: the version of the weights that generated each token."""
        if len(self.segments) == 1:  # as most have
            (only,) = self.segments
            return _all_alike(only.version, only.end - only.start, np.int32)
        versions = np.array([s.version for s in self.segments], np.int32)
        return np.repeat(versions, [s.end - s.start for s in self.segments])


def prompt_digest(tokens: np.ndarray) -> int:
    """Return 63 bits of the xxh3 of the tokens [T] as int32."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens, np.int32)) >> 1


def next_request(asked: GenerationRequest, so_far: Completion, run_seed: int) -> GenerationRequest:
    """Return the request that continues where `so_far` stopped: its tokens are own tokens, the rest of the budget is left.

    Before the first token the request stays as it was: nothing was drawn from its stream.

    Raises:
        RolloutError: The sample has used up MAX_ATTEMPTS requests.
    """
    attempt = so_far.segments[-1].attempt + 1 if so_far.segments else asked.attempt
    if attempt >= MAX_ATTEMPTS:
        raise RolloutError(
            f"request {asked.request_id} was interrupted {MAX_ATTEMPTS} times after {len(so_far.tokens)} tokens; no seed is left "
            "to continue with: a response must not take that many versions"
        )
    return dataclasses.replace(
        asked,
        own_tokens=np.concatenate([asked.own_tokens, so_far.tokens]),
        max_tokens=asked.max_tokens - len(so_far.tokens),
        attempt=attempt,
        seed=seed_of_request(run_seed, asked.request_id, attempt),
    )


def join_completions(so_far: Completion | None, more: Completion) -> Completion:
    """Return one completion of an earlier part and what continued it; it ended as the later part did."""
    if so_far is None or not len(so_far.tokens):
        return more
    length = len(so_far.tokens)
    moved = tuple(dataclasses.replace(s, start=s.start + length, end=s.end + length) for s in more.segments)
    return Completion(
        more.request_id,
        np.concatenate([so_far.tokens, more.tokens]),
        np.concatenate([so_far.logprobs, more.logprobs]),
        so_far.segments + moved,
        more.status,
        more.text,
        one_after_other(so_far.routes, more.routes),
    )


def whole_sample(prompt: Prompt, sample_index: int, completion: Completion) -> Sample:
    """Return the sample of a completion to a prompt; FAILED if a row of its routes is missing.

    Raises:
        RolloutError: An engine ran other tokens than those before a segment.
    """
    require_ran(prompt.tokens, completion)
    is_whole = completion.status is not Status.PARKED
    failed = is_whole and completion.routes is not None and completion.routes.missing > 0
    return Sample(
        prompt_index=prompt.index,
        sample_index=sample_index,
        prompt_tokens=prompt.tokens,
        response_tokens=completion.tokens,
        loss_mask=_all_alike(True, len(completion.tokens), np.bool_),
        rollout_logprobs=completion.logprobs,
        policy_versions=completion.policy_versions,
        status=Status.FAILED if failed else completion.status,
        response_text=completion.text,
        domain=prompt.domain,
        tag=prompt.tag,
        segments=completion.segments,
        routes=completion.routes,
    )


def _all_alike(value: int, length: int, dtype: type) -> np.ndarray:
    """Return [length] of one value, read-only. Samples share its memory: masks and versions are 5 of a
    token's 13 bytes."""
    return _shared(value, max(_LEAST_SHARED, 1 << (length - 1).bit_length()), dtype)[:length]


@functools.lru_cache(maxsize=64)
def _shared(value: int, length: int, dtype: type) -> np.ndarray:
    array = np.full(length, value, dtype)
    array.flags.writeable = False
    return array


def completion_of(sample: Sample) -> Completion:
    """Return the completion that `whole_sample` made the sample of."""
    return Completion(
        sample.sample_id,
        sample.response_tokens,
        sample.rollout_logprobs,
        sample.segments,
        sample.status,
        sample.response_text,
        sample.routes,
    )


def require_ran(before: np.ndarray, completion: Completion) -> None:
    """Raise RolloutError if an engine ran other tokens before a segment than `before` [T] int32 and the completion's own up
    to there."""
    for segment in completion.segments:
        context = np.concatenate([before, completion.tokens[: segment.start]]) if segment.start else before
        if prompt_digest(context) != segment.prompt_digest:
            raise RolloutError(
                f"sample {completion.request_id}: engine {segment.engine} ran other tokens before position {segment.start} of "
                f"the response than the {len(context)} of its prompt and earlier segments (request {segment.attempt})"
            )
