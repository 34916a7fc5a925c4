"""Samples of a group in a message and in a checkpoint: the driver of a run reads every one, so the form is made to be read fast.

Masks and versions follow from the segments and are told only if they differ from what these say, so that a token takes about 8
bytes. Prompts are not told: the stream of rows has them. Nor are routes, whose blocks end with the processes that have them.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from mrl.errors import PoolError
from mrl.samples import (
    Group,
    Prompt,
    ResponseSegment,
    Sample,
    Status,
    Transcript,
    Turn,
    Verdict,
    VerdictKind,
)

_INT, _FLOAT = np.dtype(np.int32), np.dtype(np.float32)
_segment_fields = operator.attrgetter(*ResponseSegment.__slots__)


class VerdictFields(msgspec.Struct, array_like=True):
    """A Verdict; numbers stay what they are, integers too."""

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
    """A Sample; its prompt's domain and tag are not repeated."""

    number: int
    length: int
    """Tokens of the response."""
    status: str
    text: str
    segments: list[tuple[int, int, int, int, int, int]]
    """Fields of a ResponseSegment."""
    prompt_tokens: bytes | None
    """[T] int32; None: the prompt's."""
    mask: bytes | None
    """[T] bool; None: the tokens of the segments."""
    versions: bytes | None
    """[T] int32; None: those of the segments, and -1 between them."""
    verdict: VerdictFields | None
    transcript: Any
    """A Transcript by its fields."""


class GroupFields(msgspec.Struct, array_like=True):
    """Samples of one prompt."""

    samples: list[SampleFields]
    tokens: bytes
    """[sum of lengths] int32: the responses, one after the other."""
    logprobs: bytes
    """[sum of lengths] float32."""


class SavedGroup(msgspec.Struct, array_like=True):
    """A group in a checkpoint."""

    form: str
    """Names of all fields, by which another release's group is told."""
    prompt: int
    """Its index in the stream of rows."""
    fields: GroupFields


_FORM = " ".join(
    name
    for fields in (GroupFields, SampleFields, VerdictFields, ResponseSegment, Transcript, Turn)
    for name in fields.__match_args__
)


def plain_number(value: Any) -> Any:
    """Return the number that a numpy scalar of a verdict is."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a value of a message")


_encode, _decoder = msgspec.msgpack.Encoder(enc_hook=plain_number).encode, msgspec.msgpack.Decoder(SavedGroup)


def encode_group(group: Group) -> bytes:
    """Return the bytes of a group, without routes. TypeError for a value of a verdict that messages do not have."""
    samples = [dataclasses.replace(s, routes=None) if s.routes is not None else s for s in group.samples]
    return _encode(SavedGroup(_FORM, group.prompt.index, group_fields(group.prompt, samples)))


def decode_group(data: bytes, prompt_at: Callable[[int], Prompt]) -> Group:
    """Return the group of `encode_group`'s bytes. PoolError where another release wrote them, whose samples have other fields."""
    try:
        saved = _decoder.decode(data)
    except msgspec.MsgspecError:
        saved = None
    if saved is None or saved.form != _FORM:
        raise PoolError("a group was saved by another release of mrl; finish the run with that one")
    prompt = prompt_at(saved.prompt)
    return Group(prompt, samples_of(saved.fields, prompt))


def group_fields(prompt: Prompt, samples: Sequence[Sample]) -> GroupFields:
    """Return the message of a prompt's samples, which have no routes."""
    return GroupFields(
        [_fields(sample, prompt) for sample in samples],
        b"".join(np.ascontiguousarray(s.response_tokens, _INT).data for s in samples),
        b"".join(np.ascontiguousarray(s.rollout_logprobs, _FLOAT).data for s in samples),
    )


def samples_of(fields: GroupFields, prompt: Prompt) -> tuple[Sample, ...]:
    """Return the samples of `group_fields`' message; their arrays lie in it."""
    found, end = [], 0
    for own in fields.samples:
        start, end = end, end + own.length
        segments = tuple(ResponseSegment(*each) for each in own.segments)
        mask, versions = _follow(segments, own.length)
        tokens = prompt.tokens if own.prompt_tokens is None else np.frombuffer(own.prompt_tokens, _INT)
        found.append(
            Sample(
                prompt_index=prompt.index,
                sample_index=own.number,
                prompt_tokens=tokens,
                response_tokens=np.frombuffer(fields.tokens, _INT, own.length, 4 * start),
                loss_mask=mask if own.mask is None else np.frombuffer(own.mask, np.bool_),
                rollout_logprobs=np.frombuffer(fields.logprobs, _FLOAT, own.length, 4 * start),
                policy_versions=versions if own.versions is None else np.frombuffer(own.versions, _INT),
                status=Status(own.status),
                response_text=own.text,
                domain=prompt.domain,
                tag=prompt.tag,
                segments=segments,
                verdict=None if own.verdict is None else _verdict(own.verdict),
                transcript=None if own.transcript is None else _transcript(own.transcript),
            )
        )
    return tuple(found)


def _fields(sample: Sample, prompt: Prompt) -> SampleFields:
    assert sample.routes is None, "routes do not pass through workers"
    mask, versions = _follow(sample.segments, len(sample.response_tokens))
    own, verdict, transcript = sample.prompt_tokens, sample.verdict, sample.transcript
    is_prompts = own is prompt.tokens or np.array_equal(own, prompt.tokens)
    return SampleFields(
        sample.sample_index,
        len(sample.response_tokens),
        sample.status.value,
        sample.response_text,
        [_segment_fields(segment) for segment in sample.segments],
        None if is_prompts else np.ascontiguousarray(own, _INT).tobytes(),
        None if np.array_equal(mask, sample.loss_mask) else sample.loss_mask.tobytes(),
        None
        if np.array_equal(versions, sample.policy_versions)
        else np.ascontiguousarray(sample.policy_versions, _INT).tobytes(),
        None if verdict is None else _verdict_fields(verdict),
        None if transcript is None else dataclasses.asdict(transcript),
    )


def _follow(segments: Sequence[ResponseSegment], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ([T] bool, [T] int32): the mask and the versions that segments say."""
    if len(segments) == 1 and segments[0].end - segments[0].start == length:  # as most are
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


def _verdict(own: VerdictFields) -> Verdict:
    values = None if own.token_values is None else np.frombuffer(own.token_values, _FLOAT)
    return Verdict(
        kind=VerdictKind(own.kind),
        value=own.value,
        reason=own.reason,
        parts=own.parts,
        verifier=own.verifier,
        version=own.version,
        seconds=own.seconds,
        token_values=values,
        is_return=own.is_return,
        applies=own.applies,
    )


def _transcript(told: dict[str, Any]) -> Transcript:
    fields: dict[str, Any] = {"turns": tuple(Turn(**turn) for turn in told["turns"])}
    return Transcript(**told | fields)
