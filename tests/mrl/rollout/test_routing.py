"""Where requests go: by index, or to the engine with the least to do; a prompt's requests stay together."""

from mrl.rollout.routing import Router


def test_by_index_nothing_else_counts() -> None:
    router = Router(3, by_index=True)
    assert [router.send(prompt, 5) for prompt in (0, 3, 6, 1, -1)] == [0, 0, 0, 1, 2]
    assert [router.load(engine) for engine in range(3)] == [15, 5, 5]


def test_a_prompt_goes_to_the_engine_with_the_fewest_requests() -> None:
    router = Router(3, by_index=False)
    assert [router.send(prompt, count) for prompt, count in ((7, 4), (8, 1), (9, 2), (10, 2))] == [0, 1, 2, 1]
    for _ in range(4):
        router.ended(7)
    assert router.send(11, 1) == 0


def test_what_waits_since_a_park_counts_again_when_it_goes_on() -> None:
    router = Router(2, by_index=False)
    assert [router.send(4, 3), router.send(5, 2)] == [0, 1]
    router.ended(4)
    router.hold()
    assert (router.load(0), router.load(1)) == (0, 0)
    assert router.send(-1, 1) == 0, "a validation's meanwhile"
    router.ended(-1)
    router.go_on()
    assert (router.load(0), router.load(1)) == (2, 2) and router.engine_of(4) == 0
    assert router.send(4, 1) == 0, "the parked one goes where its siblings wait"


def test_a_prompts_requests_stay_with_their_engine_until_a_park() -> None:
    router = Router(2, by_index=False)
    assert [router.send(4, 3), router.send(5, 1)] == [0, 1]
    router.ended(4)
    assert router.send(4, 1) == 0, "its prefix lies there, though engine 1 has less to do"
    for _ in range(3):
        router.ended(4)
    assert (router.load(0), router.load(1)) == (0, 1)
    assert router.send(6, 2) == 0
    assert router.send(5, 1) == 1 and router.send(4, 1) == 0, (
        "an episode's next turn, though engine 1 has less to do"
    )
    for prompt in (4, 5, 5, 6, 6):
        router.ended(prompt)
    router.send(7, 1)
    router.hold()
    router.go_on()
    assert router.send(4, 1) == 1, "no cache is left after a park"


def test_what_a_lost_engine_had_goes_elsewhere_until_another_has_its_place() -> None:
    router = Router(2, by_index=False)
    assert [router.send(4, 3), router.send(5, 1)] == [0, 1]
    router.ended(5)
    router.hold()
    router.lose(0)
    router.go_on()
    assert router.engine_of(4) is None and (router.load(0), router.load(1)) == (0, 0)
    assert [router.send(4, 3), router.send(6, 1), router.send(5, 1)] == [1, 1, 1]
    router.regain(0)
    assert router.send(7, 1) == 0 and router.send(4, 1) == 1, "its prefix lies there now"
