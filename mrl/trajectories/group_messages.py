"""Samples of a group in messages and checkpoints: the driver reads every one, so they decode fast.

Masks and versions follow from the segments and are included only if they differ, so that a token takes about
8 bytes. Prompts are left out: the stream of rows has them. So are routes: they end with their processes."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from mrl.errors import RolloutBufferError
from mrl.samples import Group, Prompt, ResponseSegment, Sample, Status, Transcript, Turn, Verdict, VerdictKind
from mrl.sampling_masks import MaskFields, join_masks, split_masks

_INT, _FLOAT = np.dtype(np.int32), np.dtype(np.float32)
_segment_fields = operator.attrgetter(*ResponseSegment.__slots__)


class VerdictFields(msgspec.Struct, array_like=True):
    """A Verdict; numbers keep their types."""

    kind: str
    value: Any
    reason: str
    parts: dict[str, Any]
    verifier: str
    version: str
    seconds: Any
    token_values: bytes | None
    """[T] float32."""
    is_return: bool
    applies: bool


class SampleFields(msgspec.Struct, array_like=True):
    """A Sample, without its prompt's domain and tag."""

    number: int
    length: int
    """Number of response tokens."""
    status: str
    text: str
    segments: list[tuple[int, int, int, int, int, int]]
    """Fields of a ResponseSegment."""
    prompt_tokens: bytes | None
    """[T] int32; None: those of the prompt."""
    mask: bytes | None
    """[T] bool; None: True for the tokens of the segments."""
    versions: bytes | None
    """[T] int32; None: those of the segments, and -1 between them."""
    verdict: VerdictFields | None
    transcript: Any
    """Fields of a Transcript."""
    is_branch: bool
    """It is a branch of the next sample of the list."""


class GroupFields(msgspec.Struct, array_like=True):
    """Samples of one prompt, each after its branches."""

    samples: list[SampleFields]
    tokens: bytes
    """[sum of lengths] int32: all responses, concatenated."""
    logprobs: bytes
    """[sum of lengths] float32."""
    masks: MaskFields | None
    """Sampling masks of all responses; None without any."""


class SavedGroup(msgspec.Struct, array_like=True):
    """A group in a checkpoint."""

    form: str
    """Names of all fields, which differ in another release's group."""
    prompt: int
    """Index of the prompt in the stream of rows."""
    fields: GroupFields


_FORM = " ".join(
    name
    for fields in (GroupFields, SampleFields, VerdictFields, ResponseSegment, Transcript, Turn)
    for name in fields.__match_args__
)


def plain_number(value: Any) -> Any:
    """Return a verdict's numpy scalar as a Python number."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be part of a message")


_encode, _decoder = msgspec.msgpack.Encoder(enc_hook=plain_number).encode, msgspec.msgpack.Decoder(SavedGroup)


def encode_group(group: Group) -> bytes:
    """Encode a group without its routes. Raise TypeError if a message cannot contain a verdict's value."""
    samples = [_without_routes(sample) for sample in group.samples]
    return _encode(SavedGroup(_FORM, group.prompt.index, group_fields(group.prompt, samples)))


def decode_group(data: bytes, prompt_at: Callable[[int], Prompt]) -> Group:
    """Decode bytes of `encode_group`. Raise RolloutBufferError if a release with other fields wrote them."""
    try:
        saved = _decoder.decode(data)
    except msgspec.MsgspecError:
        saved = None
    if saved is None or saved.form != _FORM:
        raise RolloutBufferError(
            "a group was saved by another release of mrl; finish the run with that release"
        )
    prompt = prompt_at(saved.prompt)
    return Group(prompt, samples_of(saved.fields, prompt))


def group_fields(prompt: Prompt, samples: Sequence[Sample]) -> GroupFields:
    """Return the message of a prompt's samples, which have no routes."""
    sequences = [sequence for sample in samples for sequence in sample.sequences]
    return GroupFields(
        [
            _fields(sequence, prompt, is_branch=sequence is not sample)
            for sample in samples
            for sequence in sample.sequences
        ],
        b"".join(np.ascontiguousarray(s.response_tokens, _INT).data for s in sequences),
        b"".join(np.ascontiguousarray(s.rollout_logprobs, _FLOAT).data for s in sequences),
        MaskFields.of(join_masks((s.sampling_masks, len(s.response_tokens)) for s in sequences)),
    )


def samples_of(fields: GroupFields, prompt: Prompt) -> tuple[Sample, ...]:
    """Return the samples of a `group_fields` message; their arrays are views of it."""
    sequences, end = [], 0
    masks = split_masks(fields.masks, [item.length for item in fields.samples])
    for item, kept in zip(fields.samples, masks, strict=True):
        start, end = end, end + item.length
        segments = tuple(ResponseSegment(*values) for values in item.segments)
        mask, versions = _follow(segments, item.length)
        tokens = prompt.tokens if item.prompt_tokens is None else np.frombuffer(item.prompt_tokens, _INT)
        sequences.append(
            Sample(
                prompt_index=prompt.index,
                sample_index=item.number,
                prompt_tokens=tokens,
                response_tokens=np.frombuffer(fields.tokens, _INT, item.length, 4 * start),
                loss_mask=mask if item.mask is None else np.frombuffer(item.mask, np.bool_),
                rollout_logprobs=np.frombuffer(fields.logprobs, _FLOAT, item.length, 4 * start),
                policy_versions=versions if item.versions is None else np.frombuffer(item.versions, _INT),
                status=Status(item.status),
                response_text=item.text,
                domain=prompt.domain,
                tag=prompt.tag,
                segments=segments,
                sampling_masks=kept,
                verdict=None if item.verdict is None else _verdict(item.verdict),
                transcript=None if item.transcript is None else _transcript(item.transcript),
            )
        )
    return tuple(_with_branches(fields.samples, sequences))


def _without_routes(sample: Sample) -> Sample:
    if all(sequence.routes is None for sequence in sample.sequences):
        return sample
    branches = tuple(dataclasses.replace(branch, routes=None) for branch in sample.branches)
    return dataclasses.replace(sample, routes=None, branches=branches)


def _with_branches(items: Sequence[SampleFields], sequences: list[Sample]) -> Iterator[Sample]:
    """Return the samples of decoded sequences, with their branches."""
    branches = list[Sample]()
    for item, sequence in zip(items, sequences, strict=True):
        if item.is_branch:
            branches.append(sequence)
            continue
        yield dataclasses.replace(sequence, branches=tuple(branches)) if branches else sequence
        branches.clear()


def _fields(sample: Sample, prompt: Prompt, *, is_branch: bool) -> SampleFields:
    assert sample.routes is None, "routes do not pass through workers"
    mask, versions = _follow(sample.segments, len(sample.response_tokens))
    prompt_tokens, verdict, transcript = sample.prompt_tokens, sample.verdict, sample.transcript
    is_prompts = prompt_tokens is prompt.tokens or np.array_equal(prompt_tokens, prompt.tokens)
    return SampleFields(
        sample.sample_index,
        len(sample.response_tokens),
        sample.status.value,
        sample.response_text,
        [_segment_fields(segment) for segment in sample.segments],
        None if is_prompts else np.ascontiguousarray(prompt_tokens, _INT).tobytes(),
        None if np.array_equal(mask, sample.loss_mask) else sample.loss_mask.tobytes(),
        None
        if np.array_equal(versions, sample.policy_versions)
        else np.ascontiguousarray(sample.policy_versions, _INT).tobytes(),
        None if verdict is None else _verdict_fields(verdict),
        None if transcript is None else dataclasses.asdict(transcript),
        is_branch,
    )


def _follow(segments: Sequence[ResponseSegment], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the mask [T] bool and the versions [T] int32 that follow from the segments."""
    if len(segments) == 1 and segments[0].end - segments[0].start == length:  # the usual case
        return np.ones(length, np.bool_), np.full(length, segments[0].version, _INT)
    mask, versions = np.zeros(length, np.bool_), np.full(length, -1, _INT)
    for segment in segments:
        mask[segment.start : segment.end] = True
        versions[segment.start : segment.end] = segment.version
    return mask, versions


def _verdict_fields(verdict: Verdict) -> VerdictFields:
    values = verdict.token_values
    return VerdictFields(
        verdict.kind.value,
        verdict.value,
        verdict.reason,
        dict(verdict.parts),
        verdict.verifier,
        verdict.version,
        verdict.seconds,
        None if values is None else np.ascontiguousarray(values, _FLOAT).tobytes(),
        verdict.is_return,
        verdict.applies,
    )


def _verdict(fields: VerdictFields) -> Verdict:
    values = None if fields.token_values is None else np.frombuffer(fields.token_values, _FLOAT)
    return Verdict(
        kind=VerdictKind(fields.kind),
        value=fields.value,
        reason=fields.reason,
        parts=fields.parts,
        verifier=fields.verifier,
        version=fields.version,
        seconds=fields.seconds,
        token_values=values,
        is_return=fields.is_return,
        applies=fields.applies,
    )


def _transcript(data: dict[str, Any]) -> Transcript:
    fields: dict[str, Any] = {"turns": tuple(Turn(**turn) for turn in data["turns"])}
    return Transcript(**data | fields)
