"""Responses come out of a batch as they went in."""

import numpy as np

from mrl.rollout.request import Response, ResponseBatch
from mrl.samples import Status


def response(name: str, length: int, status: Status) -> Response:
    return Response(
        name,
        np.arange(length, dtype=np.int32) + len(name),
        -np.arange(length, dtype=np.float32) / 3,
        np.full(length, length, np.int32),
        status,
    )


def test_responses_survive_the_way_through_a_batch() -> None:
    made = [
        response("0.0", 3, Status.FINISHED),
        response("0.1", 0, Status.ABORTED),
        response("12.3", 5, Status.TRUNCATED),
    ]
    found = ResponseBatch.of(made).responses()
    for ours, theirs in zip(found, made, strict=True):
        assert (ours.request_id, ours.status) == (theirs.request_id, theirs.status)
        for name in ("tokens", "logprobs", "policy_versions"):
            expected = getattr(theirs, name)
            np.testing.assert_array_equal(getattr(ours, name), expected)
            assert getattr(ours, name).dtype == expected.dtype


def test_no_responses_are_a_batch_too() -> None:
    assert ResponseBatch.of([]).responses() == []
