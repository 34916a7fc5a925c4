"""Types that cross packages and processes: prompts, samples, verdicts, groups and training batches.

All are frozen and contain arrays instead of lists; their methods only read them.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from mrl.routes import Routes
from mrl.sampling_masks import SamplingMasks

CACHED_TOKENS = 1 << 15
"""Tokens per slice of `TrainBatch.pieces`."""

Role = Literal["policy", "reference", "critic", "teacher"]
"""Models of a run; the reference is a frozen copy of the policy, teachers are other weights of its shapes."""


class Status(enum.Enum):
    """End of a sample's generation."""

    FINISHED = "finished"
    """Finished: the policy produced a stop token or a stop text."""
    TRUNCATED = "truncated"
    """Truncated: the response limit came first."""
    ABORTED = "aborted"
    """Aborted on purpose (surplus, deadline of a round)."""
    FAILED = "failed"
    """Failed: the engine returned no usable response; counted and excluded."""
    INTERRUPTED = "parked"
    """Interrupted: taken out of its engine with the tokens so far, to be resumed."""


class VerdictKind(enum.Enum):
    """Kind of a verifier's result for a sample."""

    SCORED = "scored"
    """Scored: the verifier returned a value; an incorrect answer is scored, with a low value."""
    NO_REWARD = "no_reward"
    """No reward: the verifier itself failed; the sample enters no statistic and no loss."""
    REJECTED = "rejected"
    """Rejected: the sample is outside what the verifier accepts (limits) and gets its lowest value."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a verifier for one sample. `value` is None exactly if `kind` is NO_REWARD."""

    kind: VerdictKind
    value: float | None
    reason: str = ""
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Named components of the value (correctness, format, ...)."""
    verifier: str = ""
    version: str = ""
    seconds: float = 0.0
    token_values: np.ndarray | None = None
    """[T_response] float32 process rewards, if the verifier gives them; NaN at tokens without one."""
    is_return: bool = False
    """True if `value` is the sum of `token_values`: an estimator that adds both must use only one."""
    applies: bool = True
    """False if no verifier of the domain applies to the sample."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One question, tokenised once."""

    index: int
    """Position in the data stream; unique in a run, a pure function of (seed, epoch, row)."""
    tokens: np.ndarray
    """[T] int32."""
    text: str
    ground_truth: Any
    """Reference that the domain's verifier compares with (parsed and checked at load)."""
    domain: str = "default"
    tag: str = ""
    row: str = ""
    """Origin of the row: file:line."""
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """All columns of the row except the prompt's."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Prompt as messages, if the row has them."""
    content: str = ""
    """Digest of the row's content (mrl/data/identity.py); empty for prompts without a row."""


@dataclasses.dataclass(frozen=True, slots=True)
class ResponseSegment:
    """Consecutive tokens of a response from one engine and version, over a KV cache of that version only."""

    start: int
    """Position of the first token in the response."""
    end: int
    """One past the last token; never `start`."""
    version: int
    attempt: int
    """Number of its request attempt among those for this sample, from 0."""
    engine: int
    prompt_digest: int
    """Digest of the tokens that the engine ran before the segment (mrl/rollout/request.py)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the policy in an episode, and the environment's reply."""

    start: int
    """Position of the first token in the response."""
    end: int
    """One past the last token; the observation's tokens follow if the episode continues."""
    text: str
    observation: str = ""
    reward: float | None = None
    seconds: float = 0.0
    """Seconds of the environment for its reply."""


@dataclasses.dataclass(frozen=True, slots=True)
class Transcript:
    """Trajectory of an episode, as its sample keeps it."""

    turns: tuple[Turn, ...]
    opening: str = ""
    """Text of the environment before the first turn."""
    ended_by: str = ""
    """Reason of the end (mrl/agents/episode.py, EndedBy); empty until then."""
    reason: str = ""
    """Environment's explanation of the end, if any."""
    faults: int = 0
    """Number of restarts after a failure of ours."""
    restarts: int = 0
    """Number of restarts because a resumed run could not reproduce the environment's replies."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One response of the policy to one prompt. Nothing in it is ever re-tokenised."""

    prompt_index: int
    sample_index: int
    """Position in its group, 0..G-1."""
    prompt_tokens: np.ndarray
    """[T_prompt] int32."""
    response_tokens: np.ndarray
    """[T] int32, including the stop token (or the tokens of a stop text) if the policy produced it."""
    loss_mask: np.ndarray
    """[T] bool: True for tokens of the policy."""
    rollout_logprobs: np.ndarray
    """[T] float32: log-prob under the sampling policy, at its temperature, over the sampling masks."""
    policy_versions: np.ndarray
    """[T] int32: weight version that produced each token; -1 for tokens of an environment."""
    status: Status
    response_text: str = ""
    domain: str = "default"
    tag: str = ""
    segments: tuple[ResponseSegment, ...] = ()
    """Segments in order; empty if no engine produced the tokens."""
    routes: Routes | None = None
    """Routes of prompt and response, if the engine recorded them."""
    sampling_masks: SamplingMasks | None = None
    """[T] tokens that each one was drawn from; None: from the whole vocabulary."""
    verdict: Verdict | None = None
    transcript: Transcript | None = None
    """Turns of the episode, if an environment is involved."""
    branches: tuple[Sample, ...] = ()
    """Earlier token sequences of the same trajectory, oldest first, without verdict and branches.

    They are conversations that this one does not continue: before a compaction of the history, or a
    sub-agent's."""

    @property
    def sequences(self) -> tuple[Sample, ...]:
        """All token sequences of the trajectory in order of time; this one is the last."""
        return (*self.branches, self)

    @property
    def sample_id(self) -> str:
        """Id, unique in a run: prompt index and position in the group."""
        return f"{self.prompt_index}.{self.sample_index}"

    @property
    def num_policy_tokens(self) -> int:
        """Number of tokens that the policy produced, in all sequences."""
        return self._num_of_sequence + sum(branch._num_of_sequence for branch in self.branches)

    @property
    def _num_of_sequence(self) -> int:
        return len(self.loss_mask) if self._is_all_policy else int(np.count_nonzero(self.loss_mask))

    @property
    def _is_all_policy(self) -> bool:
        """True if engines produced every token; reads segments only, as numpy is too slow per sample."""
        produced = sum(segment.end - segment.start for segment in self.segments)
        return self.transcript is None and produced == len(self.loss_mask) > 0

    @property
    def has_reward(self) -> bool:
        """True if the sample may enter statistics and loss: complete and judged by a verifier."""
        judged = self.verdict is not None and self.verdict.kind is not VerdictKind.NO_REWARD
        return judged and self.status in (Status.FINISHED, Status.TRUNCATED) and len(self.response_tokens) > 0

    def version_runs(self) -> list[tuple[int, int, int]]:
        """Return (start, end, version) of this sequence's consecutive policy tokens of the same weights."""
        if self._is_all_policy:
            return [(s.start, s.end, s.version) for s in self.segments]
        versions = np.where(self.loss_mask, self.policy_versions, -1)
        ends = [*(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
        runs = zip([0, *ends], ends, strict=False)
        return [
            (start, end, int(versions[start])) for start, end in runs if start < end and self.loss_mask[start]
        ]

    def with_verdict(self, verdict: Verdict) -> Sample:
        """Return the scored sample, twice as fast as dataclasses.replace: a step does it for every sample."""
        fields = (*_before_verdict(self), verdict, self.transcript, self.branches)
        return Sample(*fields)  # type: ignore[call-arg]


_before_verdict = operator.attrgetter(
    *(f.name for f in dataclasses.fields(Sample) if f.name not in ("verdict", "transcript", "branches"))
)


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """All samples of one prompt."""

    prompt: Prompt
    samples: tuple[Sample, ...]

    def sequences(self) -> Iterator[Sample]:
        """Return the token sequences of all samples, in order."""
        return (sequence for sample in self.samples for sequence in sample.sequences)


@dataclasses.dataclass(frozen=True, slots=True)
class TrainBatch:
    """Samples packed for training: flat tokens and segment bounds, never a padded matrix.

    A segment is a token sequence: a sample has one, and one more per branch.

    Per-token arrays are [N] and aligned with `tokens`: entry t concerns tokens[t] given its prefix inside the
    segment. The entry of a segment's first token is 0 and its mask False. Example, two samples "ab->cd" and
    "e->f": tokens = [a b c d e f], cu_seqlens = [0 4 6], loss_mask = [0 0 1 1 0 1].
    """

    tokens: np.ndarray
    """[N] int32."""
    cu_seqlens: np.ndarray
    """[B + 1] int32: segment b is tokens[cu_seqlens[b]:cu_seqlens[b + 1]]."""
    loss_mask: np.ndarray
    """[N] bool."""
    group_ids: np.ndarray
    """[B] int64: samples of one prompt share the id."""
    sample_ids: tuple[str, ...]
    """B ids, for messages and dumps."""
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """Further [N] float32 arrays by field name: rollout_logprobs, age, old_logprobs, ref_logprobs,
    advantages, returns, values, scores."""
    routes: tuple[Routes, ...] | None = None
    """Routes of each sample, if passes of policy and reference replay them."""
    sampling_masks: SamplingMasks | None = None
    """[N] tokens that each one was drawn from, over which policy and reference renormalise; or None."""
    samples: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """Per-segment [B] arrays by name; an objective finds them in its segments' values. With branches,
    `sample` is the index of the segment's sample, whose segments are adjacent, and `sample_tokens` (after the
    estimators) the number of the sample's trained tokens."""
    whole_groups: bool = False
    """Compute the samples of a group, which are adjacent, in one micro-batch."""
    microbatches: np.ndarray | None = None
    """[B] int64: micro-batch of each sample in the pass, if agreed over ranks."""
    shares_prefixes: bool = False
    """Compute the tokens that samples of a group share, from their start, once per micro-batch."""

    @property
    def num_samples(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def lengths(self) -> np.ndarray:
        """Return [B] tokens per segment."""
        return np.diff(self.cu_seqlens)

    def with_arrays(self, **arrays: np.ndarray) -> TrainBatch:
        """Return a batch with further [N] arrays; an array of another length is an error."""
        for name, array in arrays.items():
            assert array.shape == (self.num_tokens,), (
                f"{name}: {array.shape}, batch has {self.num_tokens} tokens"
            )
        return dataclasses.replace(self, arrays={**self.arrays, **arrays})

    def positions(self, samples: np.ndarray) -> np.ndarray:
        """Return [n] token positions of the given samples [S], sample by sample."""
        starts, lengths = self.cu_seqlens[:-1][samples], self.lengths()[samples]
        before = np.concatenate([[0], np.cumsum(lengths)])
        return np.arange(before[-1]) + np.repeat(starts - before[:-1], lengths)

    def pieces(self) -> Iterator[slice]:
        """Return slices over all tokens, small enough that results stay in a processor's cache."""
        return (slice(start, start + CACHED_TOKENS) for start in range(0, self.num_tokens, CACHED_TOKENS))

    def groups(self) -> list[np.ndarray]:
        """Return the positions of each group's samples, which are adjacent."""
        starts = np.flatnonzero(self.group_ids[1:] != self.group_ids[:-1]) + 1
        return np.split(np.arange(self.num_samples), starts) if self.num_samples else []

    def spans(self, samples: np.ndarray) -> list[slice]:
        """Return the token slice of each of the given samples [S]."""
        starts, ends = self.cu_seqlens[:-1][samples].tolist(), self.cu_seqlens[1:][samples].tolist()
        return [slice(*bounds) for bounds in zip(starts, ends, strict=True)]

    def select(self, samples: np.ndarray) -> TrainBatch:
        """Return the sub-batch of the given samples in the given order; the batch itself if that is all."""
        if np.array_equal(samples, np.arange(self.num_samples)):
            return self
        spans = self.spans(samples)

        def part(array: np.ndarray) -> np.ndarray:
            return np.concatenate([array[:0], *(array[span] for span in spans)])

        return TrainBatch(
            tokens=part(self.tokens),
            cu_seqlens=np.concatenate([[0], np.cumsum(self.lengths()[samples])]).astype(np.int32),
            loss_mask=part(self.loss_mask),
            group_ids=self.group_ids[samples],
            sample_ids=tuple(self.sample_ids[b] for b in samples),
            arrays={name: part(array) for name, array in self.arrays.items()},
            routes=None if self.routes is None else tuple(self.routes[b] for b in samples),
            sampling_masks=None
            if self.sampling_masks is None
            else self.sampling_masks.take(self.positions(samples)),
            samples={name: array[samples] for name, array in self.samples.items()},
            whole_groups=self.whole_groups,
            microbatches=None if self.microbatches is None else self.microbatches[samples],
            shares_prefixes=self.shares_prefixes,
        )
