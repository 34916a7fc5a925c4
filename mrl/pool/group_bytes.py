"""A group's samples as one run of bytes and back: about 8 bytes a token, and a header of what is not an array.

    length of the header (4 bytes, little-endian) | header (JSON) | arrays, one after the other

Masks and versions hardly change from token to token and are kept as runs. Prompts are not kept: the stream of rows
has them. Nor are routes, whose blocks end with the processes that have them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mrl.errors import PoolError
from mrl.samples import Group, Prompt, ResponseSegment, Sample, Status, Transcript, Turn, Verdict, VerdictKind

TOKEN_BYTES = 20
"""About the most that a token of a response takes: 8 of arrays, the rest of text."""
_LENGTH_BYTES = 4
_WHOLE = ("prompt_tokens", "response_tokens", "rollout_logprobs")
_RUNS = ("loss_mask", "policy_versions")
_TEXTS = ("prompt_index", "sample_index", "response_text", "domain", "tag")


def size_of(group: Group) -> int:
    """About the bytes that a group takes in memory: those of its samples' arrays, and of their text."""
    return sum(_sample_size(sample) for sample in group.samples)


def _sample_size(sample: Sample) -> int:
    size = sample.prompt_tokens.nbytes + sample.response_tokens.nbytes + sample.rollout_logprobs.nbytes
    size += sample.loss_mask.nbytes + sample.policy_versions.nbytes + len(sample.response_text)
    if sample.verdict is not None and sample.verdict.token_values is not None:
        size += sample.verdict.token_values.nbytes
    return size


def encode_group(group: Group) -> bytes:
    """The bytes of a group. TypeError for a value of a verdict that JSON does not have."""
    arrays: list[np.ndarray] = []
    header = [_told(sample, arrays) for sample in group.samples]
    head = json.dumps({"prompt": group.prompt.index, "samples": header}).encode()
    return b"".join([len(head).to_bytes(_LENGTH_BYTES, "little"), head, *(a.tobytes() for a in arrays)])


def decode_group(data: bytes, prompt_at: Callable[[int], Prompt]) -> Group:
    """The group of `encode_group`'s bytes; its arrays lie in them. PoolError where another release wrote them, whose
    samples have other fields."""
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    try:
        header, reader = json.loads(data[_LENGTH_BYTES:end]), _Reader(data, end)
        samples = tuple(_sample(told, reader) for told in header["samples"])
    except (TypeError, KeyError, ValueError) as error:
        raise PoolError(
            f"a group was saved by another release of mrl ({error}); finish the run with that one"
        ) from error
    return Group(prompt_at(header["prompt"]), samples)


def _told(sample: Sample, arrays: list[np.ndarray]) -> dict[str, Any]:
    """What the header says of a sample, whose arrays go to the end of `arrays`."""
    told: dict[str, Any] = {name: getattr(sample, name) for name in _TEXTS} | {"status": sample.status.value}
    told["segments"] = [dataclasses.astuple(segment) for segment in sample.segments]
    for name in _WHOLE:
        told[name] = _kept(getattr(sample, name), arrays)
    for name in _RUNS:
        values = getattr(sample, name)
        starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]])) if len(values) else []
        runs = np.asarray(starts, np.int32)
        told[name] = [len(values), _kept(runs, arrays), _kept(values[runs], arrays)]
    told["transcript"] = None if sample.transcript is None else dataclasses.asdict(sample.transcript)
    told["verdict"] = None if sample.verdict is None else _told_verdict(sample.verdict, arrays)
    return told


def _told_verdict(verdict: Verdict, arrays: list[np.ndarray]) -> dict[str, Any]:
    told = {field.name: getattr(verdict, field.name) for field in dataclasses.fields(verdict)}
    return told | {
        "kind": verdict.kind.value,
        "parts": dict(verdict.parts),
        "token_values": _kept(verdict.token_values, arrays),
    }


def _kept(array: np.ndarray | None, arrays: list[np.ndarray]) -> tuple[str, tuple[int, ...]] | None:
    """How to read an array again; None for none."""
    if array is None:
        return None
    arrays.append(array)
    return array.dtype.str, array.shape


class _Reader:
    """Takes arrays out of bytes in the order in which they were put in."""

    def __init__(self, data: bytes, start: int) -> None:
        self._data, self._at = data, start

    def array(self, kept: list[Any] | None) -> np.ndarray | None:
        if kept is None:
            return None
        dtype, shape = np.dtype(kept[0]), kept[1]
        count, start = math.prod(shape), self._at
        self._at += count * dtype.itemsize
        return np.frombuffer(self._data, dtype, count, start).reshape(shape)

    def runs(self, kept: list[Any]) -> np.ndarray:
        length, starts, values = kept[0], self.array(kept[1]), self.array(kept[2])
        assert starts is not None and values is not None, "runs always have their arrays"
        return np.repeat(values, np.diff(starts, append=np.int32(length)))


def _sample(told: dict[str, Any], reader: _Reader) -> Sample:
    """Arrays are read in the order of `_told`."""
    fields = {name: reader.array(told[name]) for name in _WHOLE}
    fields |= {name: reader.runs(told[name]) for name in _RUNS}
    verdict: dict[str, Any] | None = told["verdict"]
    if verdict is not None:
        values = {"kind": VerdictKind(verdict["kind"]), "token_values": reader.array(verdict["token_values"])}
        verdict = verdict | values
    return Sample(
        **fields,  # type: ignore[arg-type] arrays by their names
        **{name: told[name] for name in _TEXTS},
        status=Status(told["status"]),
        segments=tuple(ResponseSegment(*segment) for segment in told["segments"]),
        verdict=None if verdict is None else Verdict(**verdict),
        transcript=_transcript(told["transcript"]),
    )


def _transcript(told: dict[str, Any] | None) -> Transcript | None:
    if told is None:
        return None
    fields: dict[str, Any] = {"turns": tuple(Turn(**turn) for turn in told["turns"])}
    return Transcript(**told | fields)
