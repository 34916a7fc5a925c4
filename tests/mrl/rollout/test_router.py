"""Routing of requests: by index or to the least busy engine; a prompt's requests stay together."""

from mrl.rollout.router import Router


def serving(count: int, *, by_index: bool) -> Router:
    router = Router(count, by_index=by_index)
    for engine in range(count):
        router.add(engine)
    return router


def send(router: Router, prompt: int, count: int = 1) -> int:
    (engine,) = {router.send(prompt) for _ in range(count)}
    return engine


def end(router: Router, prompt: int, engine: int, count: int = 1) -> None:
    for _ in range(count):
        router.ended(prompt, engine)


def test_by_index_nothing_else_counts() -> None:
    router = serving(3, by_index=True)
    assert [send(router, prompt, 5) for prompt in (0, 3, 6, 1, -1)] == [0, 0, 0, 1, 2]


def test_a_prompt_goes_to_the_engine_with_the_fewest_requests() -> None:
    router = serving(3, by_index=False)
    assert [send(router, prompt, count) for prompt, count in ((7, 4), (8, 1), (9, 2), (10, 2))] == [
        0,
        1,
        2,
        1,
    ]
    end(router, 7, 0, 4)
    assert send(router, 11) == 0


def test_a_prompts_requests_stay_with_their_engine_until_caches_are_emptied() -> None:
    """Until they finish, over new weights too."""
    router = serving(2, by_index=False)
    assert [send(router, 4, 3), send(router, 5)] == [0, 1]
    end(router, 4, 0, 3)
    assert send(router, 4) == 0, "an episode's next turn finds its context there"
    assert send(router, 6, 2) == 0
    end(router, 5, 1)
    router.empty_caches()
    assert send(router, 4) == 0, "though engine 1 has less to do"
    end(router, 4, 0, 2)
    router.empty_caches()
    assert send(router, 4) == 1, "no cache of it is left"


def test_what_a_lost_engine_had_goes_elsewhere_until_another_has_its_place() -> None:
    router = serving(2, by_index=False)
    assert [send(router, 4, 3), send(router, 5)] == [0, 1]
    router.remove(0)
    end(router, 4, 0)
    assert router.serving == [1] and send(router, 4) == 1
    end(router, 4, 0, 2)
    assert [send(router, 4, 2), send(router, 6)] == [1, 1]
    router.add(0)
    assert router.serving == [0, 1] and send(router, 7) == 0
    assert send(router, 4) == 1, "its prefix lies there now"


def test_a_preferred_engine_takes_a_prompt_while_it_serves() -> None:
    """The driver counts all engines, a rollout worker only some."""
    router = Router(4, by_index=True)
    for engine in (1, 3):
        router.add(engine)
    router.prefer(2, 3)
    assert [send(router, 2), send(router, 3)] == [3, 3], "2 alone would go to engine 1"
    router.remove(3)
    assert send(router, 2) == 1
    end(router, 2, 1)
    router.add(3)
    router.forget(2)
    router.empty_caches()
    assert send(router, 2) == 1
