"""Responses of several requests: budgets, seeds, order, and that a sample holds what the engines ran."""

import dataclasses

import numpy as np
import pytest

from mrl.errors import RolloutError
from mrl.rollout.drafts import Drafts, join_responses, next_request, whole_sample
from mrl.rollout.request import (
    MAX_ATTEMPTS,
    GenerationRequest,
    Response,
    Round,
    Sampling,
    prompt_digest,
    sample_seed,
)
from mrl.routes import RouteRows, Routes
from mrl.samples import Prompt, ResponseSegment, Status
from tests.support.samples import make_response

SEED = 7
PROMPTS = [Prompt(index, np.arange(2, 5 + index, dtype=np.int32), "", None) for index in (0, 1, 2)]


def asked(*, num_samples: int = 2, max_tokens: int = 10) -> list[GenerationRequest]:
    return Round.of(PROMPTS, Sampling(num_samples, 1.0, max_tokens, SEED)).requests()


def test_a_response_is_whole_when_its_last_segment_ended() -> None:
    drafts, (first, second, *_) = Drafts(SEED), asked()
    drafts.ask([first, second])
    parked = Status.PARKED
    assert drafts.take([make_response(first, [11, 12, 13], version=4, status=parked)]) == []
    (again,) = drafts.resubmit()
    assert drafts.resubmit() == [] and drafts.parked() == []
    assert drafts.take([make_response(again, [14, 15], version=5, status=parked)]) == []
    (last,) = drafts.resubmit()
    (whole,) = drafts.take([make_response(last, [16], version=7, logprobs=[-2.0])])
    assert len(drafts) == 1 and whole.status is Status.FINISHED
    assert whole.tokens.tolist() == [11, 12, 13, 14, 15, 16]
    assert whole.logprobs.tolist() == [-0.5] * 5 + [-2.0]
    assert whole.policy_versions.tolist() == [4, 4, 4, 5, 5, 7]
    assert [(s.start, s.end, s.version, s.attempt) for s in whole.segments] == [
        (0, 3, 4, 0), (3, 5, 5, 1), (5, 6, 7, 2),
    ]  # fmt: skip
    sample = whole_sample(PROMPTS[0], 0, whole)
    assert sample.segments == whole.segments and sample.loss_mask.all() and len(sample.loss_mask) == 6


def test_the_budget_and_the_random_stream_go_on() -> None:
    request = asked()[3]
    first = next_request(request, make_response(request, [1, 2, 3], status=Status.PARKED), SEED)
    assert first.engine_prompt().tolist() == [*PROMPTS[1].tokens.tolist(), 1, 2, 3]
    assert (first.max_tokens, first.attempt, first.seed) == (7, 1, sample_seed(SEED, 1, 1, 1))
    more = make_response(first, [4], status=Status.PARKED)
    second = next_request(
        request, join_responses(make_response(request, [1, 2, 3], status=Status.PARKED), more), SEED
    )
    assert (second.max_tokens, second.attempt, second.own_tokens.tolist()) == (6, 2, [1, 2, 3, 4])
    assert len({request.seed, first.seed, second.seed}) == 3


def test_a_request_that_had_not_begun_is_made_again_as_it_was() -> None:
    request = asked()[0]
    again = next_request(request, Response.empty(request.request_id, Status.PARKED), SEED)
    assert (again.seed, again.attempt, again.max_tokens) == (request.seed, 0, request.max_tokens)
    assert again.engine_prompt().tolist() == request.prompt_tokens.tolist()
    begun = make_response(request, [5], status=Status.PARKED)
    waited = join_responses(begun, Response.empty(request.request_id, Status.PARKED))
    assert next_request(request, waited, SEED).attempt == 1


def test_routes_of_the_segments_follow_each_other() -> None:
    """A request that goes on has rows from the position on that led to its first token."""
    request = asked()[1]
    first = make_response(request, [11, 12, 13], status=Status.PARKED)
    again = next_request(request, first, SEED)
    more = make_response(again, [14, 15])
    assert (request.first_row, again.first_row) == (0, len(PROMPTS[0].tokens) + 2)
    rows = np.zeros((9, 1, 1), np.uint8)
    parts = Routes((RouteRows(rows, 0, 5),)), Routes((RouteRows(rows, 5, 7),), 1)
    whole = join_responses(
        *(dataclasses.replace(r, routes=own) for r, own in zip((first, more), parts, strict=True))
    )
    assert whole.routes == Routes((*parts[0].pieces, *parts[1].pieces), 1)
    assert whole.routes is not None and len(whole.routes) == len(PROMPTS[0].tokens) + 5 - 1
    assert whole_sample(PROMPTS[0], 1, whole).status is Status.FAILED
    waited = join_responses(Response.empty("0.1", Status.PARKED), dataclasses.replace(first, routes=parts[0]))
    assert waited.routes == parts[0]


def test_parked_requests_go_on_in_the_order_of_prompts() -> None:
    drafts, requests = Drafts(SEED), asked(num_samples=11)
    drafts.ask(requests)
    shuffled = np.random.default_rng(1).permutation(len(requests))
    drafts.take([Response.empty(requests[i].request_id, Status.PARKED) for i in shuffled])
    assert [r.request_id for r in drafts.parked()] == [r.request_id for r in requests]
    assert [r.request_id for r in drafts.resubmit()] == [r.request_id for r in requests]


def test_the_requests_of_a_round_go_on_as_if_they_were_asked_one_by_one() -> None:
    requested, (one_by_one, at_once) = (
        Round.of(PROMPTS, Sampling(3, 0.7, 10, SEED)),
        (Drafts(SEED), Drafts(SEED)),
    )
    one_by_one.ask(requested.requests())
    at_once.ask_round(requested)
    for drafts in (one_by_one, at_once):
        drafts.take([Response.empty(name, Status.PARKED) for name in requested.request_ids()])
    pairs = list(zip(one_by_one.resubmit(), at_once.resubmit(), strict=True))
    assert len(pairs) == len(requested)
    for asked_alone, of_round in pairs:
        assert of_round.prompt_tokens is asked_alone.prompt_tokens
        assert repr(of_round) == repr(asked_alone)


def test_what_was_parked_before_a_checkpoint_goes_on_after_it() -> None:
    drafts, requests = Drafts(SEED), asked()
    drafts.ask(requests)
    drafts.take([make_response(r, [1, 2], version=3, status=Status.PARKED) for r in requests[:4]])
    restored = Drafts(SEED)
    restored.ask(requests)
    restored.take(drafts.parked())
    for ours, theirs in zip(restored.resubmit(), drafts.resubmit(), strict=True):
        assert (ours.request_id, ours.seed, ours.max_tokens) == (
            theirs.request_id,
            theirs.seed,
            theirs.max_tokens,
        )
        assert ours.own_tokens.tolist() == theirs.own_tokens.tolist()


def test_too_many_versions_in_one_response_are_refused() -> None:
    request = asked()[0]
    so_far = Response(
        request.request_id,
        np.ones(1, np.int32),
        np.zeros(1, np.float32),
        (ResponseSegment(0, 1, 0, MAX_ATTEMPTS - 1, 0, 0),),
        Status.PARKED,
    )
    with pytest.raises(RolloutError, match=r"request 0\.0 was parked 1024 times"):
        next_request(request, so_far, SEED)


def test_a_response_nobody_asked_for_is_refused() -> None:
    drafts, (first, *_) = Drafts(SEED), asked()
    drafts.ask([first])
    drafts.take([make_response(first, [1])])
    with pytest.raises(RolloutError, match=r"request 0\.0"):
        drafts.take([make_response(first, [1])])


@pytest.mark.parametrize("changed", [0, 1], ids=["first segment", "second segment"])
def test_a_sample_of_other_tokens_than_the_engine_ran_is_refused(changed: int) -> None:
    request = asked()[0]
    begun = make_response(request, [1, 2, 3], status=Status.PARKED)
    whole = join_responses(begun, make_response(next_request(request, begun, SEED), [4]))
    assert whole_sample(PROMPTS[0], 0, whole).segments[1].prompt_digest == prompt_digest(
        np.array([*PROMPTS[0].tokens.tolist(), 1, 2, 3])
    )
    segments = list(whole.segments)
    segments[changed] = ResponseSegment(**{**_fields(segments[changed]), "prompt_digest": 5})
    wrong = Response(whole.request_id, whole.tokens, whole.logprobs, tuple(segments), whole.status)
    with pytest.raises(RolloutError, match=f"engine 0 ran other tokens before position {3 * changed} "):
        whole_sample(PROMPTS[0], 0, wrong)


def _fields(segment: ResponseSegment) -> dict[str, int]:
    return {name: getattr(segment, name) for name in ResponseSegment.__slots__}
