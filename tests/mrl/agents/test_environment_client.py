"""Real environments from coroutines: an answer per turn, places in order, deaths and cancelled episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from mrl.agents.answer import EnvironmentFault
from mrl.agents.environment_client import EnvironmentClient
from mrl.agents.environment_limits import Deadlines
from mrl.agents.environment_registry import EnvironmentSpec
from mrl.agents.episode import EndedBy
from mrl.agents.pool import EnvironmentWorkers
from mrl.errors import RolloutError
from tests.support.environments import FILE
from tests.support.processes import children

SPECS = {"counting": EnvironmentSpec(FILE + "Counting")}


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentWorkers]:
    deadlines = Deadlines(reset_seconds=60.0, step_seconds=60.0, close_seconds=1.0, memory_mib=1024)
    with EnvironmentWorkers(SPECS, deadlines) as made:
        yield made


async def episode(client: EnvironmentClient, index: int, turns: int, opened: list[int] | None = None) -> int:
    async with client.opened((index, 0), f"{index}.0/0", "counting", {"turns": turns}, 7) as environment:
        if opened is not None:
            opened.append(index)
        answer = await environment.opening()
        assert answer.turn == 0 and answer.messages[0]["content"].startswith("seed 7")
        while not answer.done:
            answer = await environment.step("hello")
    assert answer.ended_by is EndedBy.ENV_DONE
    return answer.turn


def test_many_episodes_answer_turn_after_turn(pool: EnvironmentWorkers) -> None:
    async def all_of() -> list[int]:
        client = EnvironmentClient(pool)
        return await asyncio.gather(*(episode(client, n, 1 + n % 3) for n in range(12)))

    assert asyncio.run(all_of()) == [1 + n % 3 for n in range(12)]
    assert pool.num_open == 0


def test_places_are_given_in_the_order_of_prompts_and_a_validation_has_its_own(
    pool: EnvironmentWorkers,
) -> None:
    async def all_of() -> list[int]:
        client, opened = EnvironmentClient(pool, max_environments=2), list[int]()
        order = (5, 6, 9, 3, 8, 4, 7, -1)
        await asyncio.gather(*(episode(client, index, 1, opened) for index in order))
        return opened

    opened = asyncio.run(all_of())
    assert set(opened[:3]) == {5, 6, -1} and opened[3:] == [3, 4, 7, 8, 9]


def test_a_cancelled_episode_gives_its_place_back_and_closes_its_environment(
    pool: EnvironmentWorkers,
) -> None:
    async def all_of() -> int:
        client, opened = EnvironmentClient(pool, max_environments=1), asyncio.Event()

        async def stays() -> None:
            async with client.opened((0, 0), "0.0/0", "counting", {"turns": 1}, 7):
                opened.set()
                await asyncio.Event().wait()

        first = asyncio.ensure_future(stays())
        await opened.wait()
        waits = asyncio.ensure_future(episode(client, 1, 1))
        await asyncio.sleep(0)
        for task in (waits, first):
            task.cancel()
        await asyncio.gather(first, waits, return_exceptions=True)
        return await episode(client, 2, 1)

    assert asyncio.run(all_of()) == 1 and pool.num_open == 0


def test_a_host_that_dies_is_an_answer_and_the_next_episode_has_another(pool: EnvironmentWorkers) -> None:
    async def all_of() -> tuple[object, int]:
        client = EnvironmentClient(pool)
        async with client.opened((0, 0), "0.0/0", "counting", {"turns": 2}, 7) as environment:
            await environment.opening()
            pending = asyncio.ensure_future(environment.step("hello"))
            for host in children("mrl.agents.environment_host"):
                host.kill()
            lost = await pending
            if lost.fault is None:  # it had answered before
                lost = await environment.step("again")
        return lost.fault, await episode(client, 1, 1)

    fault, turns = asyncio.run(all_of())
    assert fault is EnvironmentFault.HOST_LOST and turns == 1


def test_what_the_pool_refuses_is_raised_where_it_was_asked(pool: EnvironmentWorkers) -> None:
    async def unknown() -> None:
        async with EnvironmentClient(pool).opened((0, 0), "0.0/0", "chess", {}, 7) as environment:
            await environment.opening()

    with pytest.raises(RolloutError, match="no environment 'chess'"):
        asyncio.run(unknown())
