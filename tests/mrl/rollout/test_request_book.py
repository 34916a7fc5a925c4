"""Every request is of one engine, or of none, and comes back once."""

from __future__ import annotations

import random

import numpy as np

from mrl.rollout.request import GenerationRequest, Response, Round, Sampling
from mrl.rollout.request_book import RequestBook
from mrl.samples import Status

SAMPLING = Sampling(num_samples=3, temperature=1.0, max_tokens=4, seed=0)
TOKENS = np.ones(2, np.int32)


def round_of(*prompts: int) -> Round:
    return Round(tuple((index, TOKENS) for index in prompts), SAMPLING)


def again(name: str) -> GenerationRequest:
    """As a parked request is asked for again."""
    return GenerationRequest(name, TOKENS, 0, 4, attempt=1)


def sent(book: RequestBook, engine: int) -> list[str]:
    """What the next message brings an engine."""
    return [
        request.request_id
        for each in book.to_send(engine)
        for request in (each.requests() if isinstance(each, Round) else [each])
    ]


def test_a_prompts_samples_are_of_one_engine_and_are_sent_once() -> None:
    book = RequestBook(2, by_index=True)
    book.hand_in([round_of(0, 1), again("2.0")], serves=True)
    assert sent(book, 0) == ["0.0", "0.1", "0.2", "2.0"] and sent(book, 1) == ["1.0", "1.1", "1.2"]
    assert sent(book, 0) == sent(book, 1) == [] and book.has_work([0]) and book.has_work([1])
    book.arrived([Response.empty(f"1.{n}", Status.FINISHED) for n in range(3)])
    assert not book.has_work([1]) and book.engine_of(1) is None and book.engine_of(0) == 0


def test_what_an_engine_had_comes_back_and_goes_elsewhere() -> None:
    book = RequestBook(2, by_index=True)
    book.hand_in([round_of(0, 1)], serves=True)
    sent(book, 1)
    book.arrived([Response.empty("1.1", Status.FINISHED)])
    assert book.lose([1]) == 2 == book.num_started_over
    returned = book.take_returned()
    assert [(r.request_id, r.status) for r in returned] == [("1.0", Status.PARKED), ("1.2", Status.PARKED)]
    assert book.take_returned() == [] and not book.has_work([1])
    book.hand_in([again(r.request_id) for r in returned], serves=True)
    assert sent(book, 0) == ["0.0", "0.1", "0.2", "1.0", "1.2"] and sent(book, 1) == []
    book.regain(1)
    book.hand_in([round_of(3)], serves=True)
    assert sent(book, 1) == ["3.0", "3.1", "3.2"]


def test_while_none_serves_requests_wait_and_rest_over_a_park() -> None:
    book = RequestBook(1, by_index=True)
    book.hand_in([round_of(0)], serves=False)
    assert sent(book, 0) == [] and not book.has_work([0])
    book.hold([], caches_stay=False)
    book.hand_in([again("7.0")], serves=True)
    assert sent(book, 0) == ["7.0"], "what was there at the park waits"
    book.go_on()
    assert book.to_go_on(0) and not book.to_go_on(0), "told once"
    book.hand_in([], serves=True)
    assert sent(book, 0) == ["0.0", "0.1", "0.2"]


def test_after_a_park_a_prompt_stays_where_its_cache_is() -> None:
    """Where caches stay; else it goes to the engine with the least to do."""
    for caches_stay in (True, False):
        book = RequestBook(2, by_index=False)
        book.hand_in([round_of(0), round_of(1)], serves=True)
        home = book.engine_of(1)
        assert home == 1
        parked = [Response.empty(f"{p}.{n}", Status.PARKED) for p in (0, 1) for n in range(3)]
        book.arrived(parked)
        book.hold(parked, caches_stay=caches_stay)
        book.go_on()
        book.hand_in([again("1.0")], serves=True)
        assert (book.engine_of(1) == home) is caches_stay


def test_in_random_worlds_nothing_is_lost_or_doubled() -> None:
    """Engines die and come back, parks come and go; in the end every request has arrived once."""
    for seed in range(200):
        rng, book, serving = random.Random(seed), RequestBook(3, by_index=seed % 2 == 0), {0, 1, 2}
        at: dict[int, list[str]] = {engine: [] for engine in range(3)}
        done: list[str] = []
        book.hand_in([round_of(*range(8))], serves=True)
        for _ in range(400):
            engine, what = rng.randrange(3), rng.random()
            if what < 0.06 and engine in serving:
                serving.discard(engine)
                book.lose([engine])
                at[engine] = []
            elif what < 0.14 and engine not in serving:
                serving.add(engine)
                book.regain(engine)
            elif engine in serving:
                at[engine] += sent(book, engine)
                if at[engine]:
                    name = at[engine].pop(rng.randrange(len(at[engine])))
                    book.arrived([Response.empty(name, Status.FINISHED)])
                    done.append(name)
            back = [again(response.request_id) for response in book.take_returned()]
            book.hand_in(back, serves=bool(serving))
        assert len(done) == len(set(done)) <= 24, seed
        for engine in {0, 1, 2} - serving:
            book.regain(engine)
        book.hand_in([], serves=True)
        left = [name for engine in range(3) for name in at[engine] + sent(book, engine)]
        assert sorted(done + left) == sorted(r.request_id for r in round_of(*range(8)).requests()), seed
