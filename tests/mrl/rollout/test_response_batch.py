"""Responses come out of a batch as they went in."""

import numpy as np

from mrl.rollout.request import Response, ResponseBatch
from mrl.samples import Segment, Status


def response(name: str, lengths: list[int], status: Status, text: str = "") -> Response:
    total, ends = sum(lengths), np.cumsum(lengths).tolist()
    return Response(
        name,
        np.arange(total, dtype=np.int32) + len(name),
        -np.arange(total, dtype=np.float32) / 3,
        tuple(
            Segment(end - length, end, 5 + number, number, 1, (1 << 63) - 1 - number)
            for number, (length, end) in enumerate(zip(lengths, ends, strict=True))
        ),
        status,
        text,
    )


def test_responses_survive_the_way_through_a_batch() -> None:
    made = [
        response("0.0", [3], Status.FINISHED, "3 é\n\U0001f600"),
        response("0.1", [], Status.ABORTED),
        response("12.3", [2, 1, 2], Status.TRUNCATED),
        response("12.4", [1], Status.PARKED),
    ]
    found = ResponseBatch.of(made).responses()
    for ours, theirs in zip(found, made, strict=True):
        assert (ours.request_id, ours.status, ours.segments, ours.text) == (
            theirs.request_id,
            theirs.status,
            theirs.segments,
            theirs.text,
        )
        for name in ("tokens", "logprobs", "policy_versions"):
            expected = getattr(theirs, name)
            np.testing.assert_array_equal(getattr(ours, name), expected)
            assert getattr(ours, name).dtype == expected.dtype
    assert found[2].policy_versions.tolist() == [5, 5, 6, 7, 7] and found[1].policy_versions.dtype == np.int32


def test_no_responses_are_a_batch_too() -> None:
    assert ResponseBatch.of([]).responses() == []
