"""Samples pass through messages and checkpoints unchanged."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from mrl.errors import RolloutBufferError
from mrl.samples import Group, Prompt, ResponseSegment, Sample, Status, Transcript, Turn, Verdict, VerdictKind
from mrl.trajectories import group_messages
from mrl.trajectories.group_messages import decode_group, encode_group, group_fields, samples_of
from mrl.trajectories.worker_messages import GroupsDone, decode_worker_message, encode_worker_message
from tests.support.many_groups import assert_same, group_of, prompt_at

PROMPT = Prompt(7, np.array([5, 6, 7], np.int32), "", None, domain="sums", tag="hard")


def made(segments: tuple[ResponseSegment, ...], count: int, **fields: Any) -> Sample:
    mask, versions = np.zeros(count, np.bool_), np.full(count, -1, np.int32)
    for segment in segments:
        mask[segment.start : segment.end], versions[segment.start : segment.end] = True, segment.version
    rng = np.random.default_rng(count)
    return dataclasses.replace(
        Sample(
            7,
            2,
            PROMPT.tokens,
            rng.integers(0, 1 << 17, count).astype(np.int32),
            mask,
            -rng.exponential(1.0, count).astype(np.float32),
            versions,
            Status.FINISHED,
            "é\ud7ff\0 text",
            "sums",
            "hard",
            segments,
        ),
        **fields,
    )


ONE = (ResponseSegment(0, 5, 3, 0, 1, (1 << 63) - 1),)
TWO = (ResponseSegment(0, 2, 3, 0, 1, 4), ResponseSegment(2, 5, 4, 1, 0, 5))
APART = (ResponseSegment(0, 2, 3, 0, 1, 4), ResponseSegment(4, 9, 4, 1, 0, 5))
SCORED = Verdict(VerdictKind.SCORED, 1, "why", {"format": 0.5, "n": 1}, "maths", "2", 0.25)
VALUES = dataclasses.replace(SCORED, value=np.float64(0.1), token_values=np.array([0.5, np.nan], np.float32))
TALK = Transcript((Turn(0, 2, "one", "two", 0, 0.5), Turn(4, 9, "three")), "hello", "env_done", "", 1, 2)
SAMPLES = {
    "one segment": made(ONE, 5),
    "two": made(TWO, 5, verdict=SCORED),
    "an episode": made(APART, 9, transcript=TALK, prompt_tokens=np.array([1], np.int32), verdict=VALUES),
    "nothing": made(
        (), 0, status=Status.FAILED, verdict=Verdict(VerdictKind.NO_REWARD, None, is_return=True)
    ),
    "a mask of its own": made(ONE, 5, loss_mask=np.array([1, 0, 1, 1, 0], np.bool_)),
    "versions of its own": made(ONE, 5, policy_versions=np.array([3, 3, 2, 3, -1], np.int32)),
    "interrupted": made(TWO, 5, status=Status.INTERRUPTED),
}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_a_sample_crosses_unchanged(sample: Sample) -> None:
    others = [made(TWO, 5, sample_index=0), sample, made(ONE, 5, sample_index=9)]
    message = decode_worker_message(encode_worker_message(GroupsDone(4, [(1, group_fields(PROMPT, others))])))
    ((number, fields),) = message.groups
    came = samples_of(fields, PROMPT)
    assert (message.newest_version, number, [s.sample_index for s in came]) == (4, 1, [0, 2, 9])
    assert_same(came[1], sample)
    assert_same(came[2], others[2])


def test_a_group_comes_back_as_it_was() -> None:
    for index in range(20):
        assert_same(decode_group(encode_group(group_of(index)), prompt_at), group_of(index))


@pytest.mark.parametrize("data", [b"", b'{"prompt": 3, "samples": []}', encode_group(group_of(1))[:-1]])
def test_a_group_of_another_release_says_so(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RolloutBufferError, match="another release of mrl; finish the run"):
        decode_group(data, prompt_at)
    today = encode_group(group_of(1))
    monkeypatch.setattr(group_messages, "_FORM", "other fields")
    with pytest.raises(RolloutBufferError, match="another release"):
        decode_group(today, prompt_at)


def test_a_token_takes_about_eight_bytes() -> None:
    fifth = 4_000
    segments = tuple(ResponseSegment(n * fifth, (n + 1) * fifth, n, 0, 0, n) for n in range(5))
    sample = made(segments, 5 * fifth)
    assert len(encode_group(Group(PROMPT, (sample,)))) < 8.1 * 5 * fifth
