"""What crosses packages and processes: prompts, samples, verdicts, groups and training batches.

All are frozen and hold arrays instead of lists; they have no behaviour beyond reading themselves.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from mrl.routes import Routes

CACHED_TOKENS = 1 << 15
"""Of `TrainBatch.pieces`."""

Role = Literal["policy", "reference", "critic", "teacher"]
"""The models of a run; the reference is the policy's frozen copy, teachers are other weights in its shapes."""


class Status(enum.Enum):
    """How a sample's generation ended."""

    FINISHED = "finished"
    """The policy produced a stopping token or a stop text."""
    TRUNCATED = "truncated"
    """The response limit was reached first."""
    ABORTED = "aborted"
    """We stopped it on purpose (surplus, deadline of a round)."""
    FAILED = "failed"
    """The engine gave no usable response; counted and excluded."""
    PARKED = "parked"
    """Not ended: it was taken out of its engine with the tokens so far, and is to go on."""


class VerdictKind(enum.Enum):
    """What a verifier could say about a sample."""

    SCORED = "scored"
    """The verifier looked and gave a value; a wrong answer is scored, with a low value."""
    NO_REWARD = "no_reward"
    """The verifier itself failed; the sample enters no statistic and no loss."""
    REJECTED = "rejected"
    """The sample is outside what the verifier accepts (limits); it carries the verifier's lowest value."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """A verifier's answer for one sample. `value` is None exactly when `kind` is NO_REWARD."""

    kind: VerdictKind
    value: float | None
    reason: str = ""
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Named components of the value (for instance correctness, format)."""
    verifier: str = ""
    version: str = ""
    seconds: float = 0.0
    token_values: np.ndarray | None = None
    """[T_response] float32 process rewards, where the verifier gives them; NaN at tokens without one."""
    is_return: bool = False
    """`value` is the sum of `token_values`: an estimator that adds both to a token's return takes one of them."""
    applies: bool = True
    """False where no verifier of the domain applies to the sample."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One question, tokenised once."""

    index: int
    """Position in the data stream; unique over a run, a pure function of (seed, epoch, row)."""
    tokens: np.ndarray
    """[T] int32."""
    text: str
    ground_truth: Any
    """What the domain's verifier compares with (parsed and checked at load)."""
    domain: str = "default"
    tag: str = ""
    row: str = ""
    """Where the row came from: file:line."""
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The row's columns but the prompt's, as the row has them."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The prompt as messages, where the row had them."""
    content: str = ""
    """Digest of what its row says (mrl/data/identity.py); empty where no row made it."""


@dataclasses.dataclass(frozen=True, slots=True)
class ResponseSegment:
    """Consecutive tokens of a response that one engine produced with one version of the weights, from a KV cache that this
    version alone computed."""

    start: int
    """Position of its first token in the response."""
    end: int
    """One past its last token; never `start`."""
    version: int
    attempt: int
    """Number of the request it answered, among all that were made for this sample, from 0."""
    engine: int
    prompt_digest: int
    """Of the tokens that the engine says it ran before the segment's first one (mrl/rollout/request.py, `prompt_digest`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the policy in an episode, and what the environment answered."""

    start: int
    """Position of its first token in the response."""
    end: int
    """One past its last token; the observation's tokens, where the episode went on, follow."""
    text: str
    observation: str = ""
    reward: float | None = None
    seconds: float = 0.0
    """Of the environment, for the answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Transcript:
    """An episode as its sample keeps it."""

    turns: tuple[Turn, ...]
    opening: str = ""
    """What the environment said before the first turn."""
    ended_by: str = ""
    """Why it ended (mrl/agents/episode.py, EndedBy); empty while it goes on."""
    reason: str = ""
    """The environment's words for that, where it has any."""
    faults: int = 0
    """Times that it began anew because something of ours had failed."""
    restarts: int = 0
    """Times that it began anew because a resumed run could not repeat what its environment had said."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One response of the policy to one prompt. Nothing in it is ever re-tokenised."""

    prompt_index: int
    sample_index: int
    """Position in its group, 0..G-1."""
    prompt_tokens: np.ndarray
    """[T_prompt] int32."""
    response_tokens: np.ndarray
    """[T] int32, the stopping token (or the tokens of a stop text) included when the policy produced it."""
    loss_mask: np.ndarray
    """[T] bool: True where the policy produced the token."""
    rollout_logprobs: np.ndarray
    """[T] float32: log-prob under the policy that sampled, at its temperature, over the whole vocabulary."""
    policy_versions: np.ndarray
    """[T] int32: the weights' version that produced each token; -1 where an environment did."""
    status: Status
    response_text: str = ""
    domain: str = "default"
    tag: str = ""
    segments: tuple[ResponseSegment, ...] = ()
    """Which engine produced which tokens, in order; empty where no engine did."""
    routes: Routes | None = None
    """Of prompt and response, where the engine recorded them."""
    verdict: Verdict | None = None
    transcript: Transcript | None = None
    """Its turns, where it is an episode with an environment."""

    @property
    def sample_id(self) -> str:
        """Unique over a run: prompt index and position in the group."""
        return f"{self.prompt_index}.{self.sample_index}"

    @property
    def num_policy_tokens(self) -> int:
        """Tokens of the response that the policy produced."""
        return len(self.loss_mask) if self._is_all_policy else int(np.count_nonzero(self.loss_mask))

    @property
    def _is_all_policy(self) -> bool:
        """Return True if engines produced every token, by the segments alone: one call of numpy per sample is too many."""
        produced = sum(segment.end - segment.start for segment in self.segments)
        return self.transcript is None and produced == len(self.loss_mask) > 0

    @property
    def has_reward(self) -> bool:
        """Return True if the sample may enter statistics and loss: it is whole and a verifier has judged it."""
        judged = self.verdict is not None and self.verdict.kind is not VerdictKind.NO_REWARD
        return judged and self.status in (Status.FINISHED, Status.TRUNCATED) and len(self.response_tokens) > 0

    def version_runs(self) -> list[tuple[int, int, int]]:
        """(start, end, version) of consecutive tokens that the policy produced with the same weights."""
        if self._is_all_policy:
            return [(s.start, s.end, s.version) for s in self.segments]
        told = np.where(self.loss_mask, self.policy_versions, -1)
        ends = [*(np.flatnonzero(np.diff(told)) + 1).tolist(), len(told)]
        runs = zip([0, *ends], ends, strict=False)
        return [
            (start, end, int(told[start])) for start, end in runs if start < end and self.loss_mask[start]
        ]

    def with_verdict(self, verdict: Verdict) -> Sample:
        """The scored sample; in half the time of dataclasses.replace, because a step does it for every
        sample."""
        return Sample(*_before_verdict(self), verdict, self.transcript)  # type: ignore[call-arg]


_before_verdict = operator.attrgetter(
    *(f.name for f in dataclasses.fields(Sample) if f.name not in ("verdict", "transcript"))
)


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """All samples of one prompt."""

    prompt: Prompt
    samples: tuple[Sample, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TrainBatch:
    """Samples packed for training: flat tokens and segment bounds, never a padded matrix.

    Per-token arrays are [N] and aligned with `tokens`: entry t concerns tokens[t] given its prefix inside the
    segment. The entry of a segment's first token is 0 and its mask False. A worked example, two samples
    "ab->cd" and "e->f": tokens = [a b c d e f], cu_seqlens = [0 4 6], loss_mask = [0 0 1 1 0 1].
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
    """Further [N] float32 arrays by their field's name: rollout_logprobs, age, old_logprobs, ref_logprobs,
    advantages, returns, values, scores."""
    routes: tuple[Routes, ...] | None = None
    """Of each sample, where the passes of policy and reference are to take them."""
    samples: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """What is known of each sample, [B] arrays by name; an objective finds them in its segments' values."""
    whole_groups: bool = False
    """Samples of one group, which stand side by side, are computed in one microbatch."""
    microbatches: np.ndarray | None = None
    """[B] int64: which microbatch of the pass each sample is in, where that was agreed over ranks."""

    @property
    def num_samples(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def lengths(self) -> np.ndarray:
        """[B] tokens per segment."""
        return np.diff(self.cu_seqlens)

    def with_arrays(self, **arrays: np.ndarray) -> TrainBatch:
        """A batch with further [N] arrays; an array of another length is an error."""
        for name, array in arrays.items():
            assert array.shape == (self.num_tokens,), (
                f"{name}: {array.shape}, batch has {self.num_tokens} tokens"
            )
        return dataclasses.replace(self, arrays={**self.arrays, **arrays})

    def positions(self, samples: np.ndarray) -> np.ndarray:
        """[n] the tokens of the given samples [S], sample by sample."""
        starts, lengths = self.cu_seqlens[:-1][samples], self.lengths()[samples]
        before = np.concatenate([[0], np.cumsum(lengths)])
        return np.arange(before[-1]) + np.repeat(starts - before[:-1], lengths)

    def pieces(self) -> Iterator[slice]:
        """All tokens, so many at a time that what is made of them stays in a processor's cache."""
        return (slice(start, start + CACHED_TOKENS) for start in range(0, self.num_tokens, CACHED_TOKENS))

    def spans(self, samples: np.ndarray) -> list[slice]:
        """Where the tokens of each of the given samples [S] lie."""
        starts, ends = self.cu_seqlens[:-1][samples].tolist(), self.cu_seqlens[1:][samples].tolist()
        return [slice(*bounds) for bounds in zip(starts, ends, strict=True)]

    def select(self, samples: np.ndarray) -> TrainBatch:
        """The sub-batch of the given sample positions, in the given order; the batch itself where that is all of it."""
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
            samples={name: array[samples] for name, array in self.samples.items()},
            whole_groups=self.whole_groups,
            microbatches=None if self.microbatches is None else self.microbatches[samples],
        )
