"""Responses come out of a batch as they went in."""

import dataclasses

import numpy as np

from mrl.rollout.request import Response, ResponseBatch
from mrl.routes import RouteRows, Routes
from mrl.samples import ResponseSegment, Status


def response(name: str, lengths: list[int], status: Status, text: str = "") -> Response:
    total, ends = sum(lengths), np.cumsum(lengths).tolist()
    return Response(
        name,
        np.arange(total, dtype=np.int32) + len(name),
        -np.arange(total, dtype=np.float32) / 3,
        tuple(
            ResponseSegment(end - length, end, 5 + number, number, 1, (1 << 63) - 1 - number)
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


def test_routes_of_all_responses_travel_as_one_block() -> None:
    """What stands for it is all that a message holds."""
    kept: list[np.ndarray] = []

    def keep(block: np.ndarray) -> str:
        kept.append(block)
        return "handle"

    rows = np.arange(24, dtype=np.uint8).reshape(6, 2, 2)
    made = [
        dataclasses.replace(response("0.0", [3], Status.FINISHED), routes=Routes((RouteRows(rows, 1, 5),))),
        response("0.1", [], Status.ABORTED),
        dataclasses.replace(response("1.0", [2], Status.PARKED), routes=Routes((RouteRows(rows, 4, 6),), 1)),
        dataclasses.replace(response("1.1", [], Status.PARKED), routes=Routes(())),
    ]
    found = [r.routes for r in ResponseBatch.of(made, keep).responses()]
    assert found == [
        Routes((RouteRows("handle", 0, 4),)),
        None,
        Routes((RouteRows("handle", 4, 6),), 1),
        Routes((RouteRows("handle", 6, 6),)),
    ]
    (block,) = kept
    np.testing.assert_array_equal(block, np.concatenate([rows[1:5], rows[4:6]]))
    here = ResponseBatch.of(made).responses()[0].routes
    assert here is not None
    np.testing.assert_array_equal(here.layers([1, 0]), rows[1:5, [1, 0]])
