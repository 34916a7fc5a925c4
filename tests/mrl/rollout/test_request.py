"""Requests and completions: budgets, seeds, order; a sample holds what the engines ran."""

import dataclasses

import numpy as np
import pytest

from mrl.errors import RolloutError
from mrl.rollout.request import (
    Completion,
    GenerationRequest,
    Sampling,
    completion_of,
    join_completions,
    next_request,
    prompt_digest,
    sample_of_completion,
)
from mrl.rollout.seeds import MAX_ATTEMPTS, sample_of, sample_seed
from mrl.routes import RouteRows, Routes
from mrl.samples import Prompt, Status
from tests.support.samples import make_completion

SEED = 7
PROMPTS = [Prompt(index, np.arange(2, 5 + index, dtype=np.int32), "", None) for index in (0, 1, -1)]
PARKED = Status.INTERRUPTED


def asked(index: int = 0, number: int = 1) -> GenerationRequest:
    return Sampling(2, 1.0, 10, SEED).request(PROMPTS[index], number)


def test_each_sample_is_a_request() -> None:
    sampling = Sampling(3, temperature=0.7, max_tokens=5, seed=11, top_p=0.9, top_k=40, min_p=0.05)
    requests = sampling.requests(PROMPTS)
    assert [sample_of(r.request_id) for r in requests] == [(p, n) for p in (0, 1, -1) for n in range(3)]
    assert all(r.prompt_tokens is PROMPTS[i // 3].tokens for i, r in enumerate(requests))
    drawn = {
        (r.temperature, r.max_tokens, r.top_p, r.top_k, r.min_p, r.greedy, r.ignore_stop) for r in requests
    }
    assert drawn == {(0.7, 5, 0.9, 40, 0.05, False, False)}
    assert len({r.seed for r in requests}) == 9 and requests[4].seed == sample_seed(11, 1, 1)


def test_a_response_of_a_given_length_runs_to_it_and_no_further_than_allowed() -> None:
    sampling = Sampling(
        2, 1.0, max_tokens=15, seed=1, lengths=lambda prompt, sample: 10 + 5 * prompt + sample
    )
    requests = sampling.requests(PROMPTS[:2])
    assert [r.max_tokens for r in requests] == [10, 11, 15, 15] and all(r.ignore_stop for r in requests)


def test_three_segments_are_one_response() -> None:
    request = asked()
    first = make_completion(request, [11, 12, 13], version=4, status=PARKED)
    second = make_completion(next_request(request, first, SEED), [14, 15], version=4, status=PARKED)
    both = join_completions(first, second)
    last = make_completion(next_request(request, both, SEED), [16], version=7, logprobs=[-2.0])
    complete = join_completions(both, last)
    assert complete.tokens.tolist() == [11, 12, 13, 14, 15, 16] and complete.status is Status.FINISHED
    assert complete.logprobs.tolist() == [-0.5] * 5 + [-2.0]
    assert complete.policy_versions.tolist() == [4, 4, 4, 4, 4, 7]
    assert [(s.start, s.end, s.version, s.attempt) for s in complete.segments] == [
        (0, 3, 4, 0), (3, 5, 4, 1), (5, 6, 7, 2),
    ]  # fmt: skip
    sample = sample_of_completion(PROMPTS[0], 1, complete)
    assert sample.segments == complete.segments and sample.loss_mask.all() and len(sample.loss_mask) == 6
    assert repr(completion_of(sample)) == repr(complete)


@pytest.mark.parametrize("prefix", [[], [8, 9]], ids=["first", "continuing"])
def test_the_budget_and_the_random_stream_continue(prefix: list[int]) -> None:
    """Also for a request that continues another engine's response."""
    request = dataclasses.replace(
        asked(1), own_tokens=np.array(prefix, np.int32), attempt=len(prefix), max_tokens=10 - len(prefix)
    )
    first = make_completion(request, [1, 2, 3], status=PARKED)
    again = next_request(request, first, SEED)
    assert again.engine_prompt().tolist() == [*PROMPTS[1].tokens.tolist(), *prefix, 1, 2, 3]
    assert (again.max_tokens, again.attempt) == (7 - len(prefix), len(prefix) + 1)
    assert again.seed == sample_seed(SEED, 1, 1, len(prefix) + 1)
    second = next_request(request, join_completions(first, make_completion(again, [4], status=PARKED)), SEED)
    assert (second.max_tokens, second.attempt) == (6 - len(prefix), len(prefix) + 2)
    assert second.own_tokens.tolist() == [*prefix, 1, 2, 3, 4]


def test_a_request_without_a_token_is_made_again_as_it_was() -> None:
    request, nothing = asked(), Completion.empty("0.1", PARKED)
    assert repr(next_request(request, nothing, SEED)) == repr(request)
    begun = make_completion(request, [5], status=PARKED)
    assert join_completions(nothing, begun) is begun and join_completions(None, begun) is begun
    assert repr(next_request(request, join_completions(begun, nothing), SEED)) == repr(
        next_request(request, begun, SEED)
    )


def test_routes_of_the_segments_follow_each_other() -> None:
    """A continued request has rows from the position that led to its first token."""
    request = asked()
    first = make_completion(request, [11, 12, 13], status=PARKED)
    again = next_request(request, first, SEED)
    assert (request.first_row, again.first_row) == (0, len(PROMPTS[0].tokens) + 2)
    rows = np.zeros((9, 1, 1), np.uint8)
    parts = Routes((RouteRows(rows, 0, 5),)), Routes((RouteRows(rows, 5, 7),), 1)
    complete = join_completions(
        dataclasses.replace(first, routes=parts[0]),
        dataclasses.replace(make_completion(again, [14, 15]), routes=parts[1]),
    )
    assert complete.routes == Routes((*parts[0].pieces, *parts[1].pieces), 1)
    assert sample_of_completion(PROMPTS[0], 1, complete).status is Status.FAILED, "a row is missing"


def test_too_many_versions_in_one_response_are_refused() -> None:
    part = make_completion(dataclasses.replace(asked(), attempt=MAX_ATTEMPTS - 1), [1], status=PARKED)
    with pytest.raises(RolloutError, match=r"request 0\.1 was interrupted 1024 times after 1 tokens"):
        next_request(asked(), part, SEED)


@pytest.mark.parametrize("changed", [0, 1], ids=["first segment", "second segment"])
def test_a_sample_of_other_tokens_than_the_engine_ran_is_refused(changed: int) -> None:
    request = asked()
    begun = make_completion(request, [1, 2, 3], status=PARKED)
    complete = join_completions(begun, make_completion(next_request(request, begun, SEED), [4]))
    assert sample_of_completion(PROMPTS[0], 1, complete).segments[1].prompt_digest == prompt_digest(
        np.array([*PROMPTS[0].tokens.tolist(), 1, 2, 3])
    )
    segments = list(complete.segments)
    segments[changed] = dataclasses.replace(segments[changed], prompt_digest=5)
    with pytest.raises(RolloutError, match=f"engine 0 ran other tokens before position {3 * changed} "):
        sample_of_completion(PROMPTS[0], 1, dataclasses.replace(complete, segments=tuple(segments)))
