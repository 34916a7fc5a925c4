"""Verdicts for coroutines, from real reward workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from mrl.config.load import load_reward
from mrl.errors import RewardError
from mrl.rewards.pool.reward_pool import RewardPool
from mrl.samples import Prompt, Sample, Verdict
from mrl.trajectories.rewards import RewardClient
from tests.support.samples import make_sample

MATHS = load_reward({"kind": "maths", "workers": 2})


def asked(index: int, number: int) -> tuple[Sample, Prompt]:
    text = f"\\boxed{{{index if number % 2 == 0 else -1}}}"
    sample = make_sample(index, number, response_text=text)
    return sample, Prompt(index, sample.prompt_tokens, "", str(index))


def test_each_sample_gets_its_own_verdict_and_each_turn_of_the_loop_is_one_message() -> None:
    handed: list[int] = []

    async def judged(workers: RewardPool) -> list[Verdict]:
        submit = workers.submit_all
        workers.submit_all = lambda pairs: (handed.append(len(pairs)), submit(pairs))[1]  # type: ignore[method-assign,arg-type]
        client = RewardClient(workers, on_failure=fails)
        futures = [client.score(*asked(index, number)) for index in range(20) for number in range(4)]
        verdicts = await asyncio.gather(*futures)
        client.close()
        return verdicts

    with RewardPool(MATHS) as workers:
        verdicts = asyncio.run(judged(workers))
        assert workers.collect(0.0) == [], "a verdict was told twice"
    assert [verdict.value for verdict in verdicts] == [1.0, 0.0] * 40 and handed == [80]


def fails(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("when", ["handing in", "waiting"])
def test_what_ends_the_run_is_told_in_the_loop(when: str) -> None:
    """A sample submitted twice; a judge's server that dies while nothing is submitted."""
    errors: list[BaseException] = []

    async def failing(workers: RewardPool, ended: Callable[[], bool]) -> None:
        client = RewardClient(workers, on_failure=errors.append)
        if when == "handing in":
            for _ in range(2):
                client.score(*asked(1, 0))
                await asyncio.sleep(0)
        while not errors:
            await asyncio.sleep(0.01)
        client.close()

    def check() -> None:
        if when == "waiting":
            raise RewardError("the judge's server died")

    with RewardPool(MATHS, check=check) as workers:
        asyncio.run(asyncio.wait_for(failing(workers, lambda: bool(errors)), 60))
    assert isinstance(errors[0], RewardError)
    assert ("twice" in str(errors[0])) == (when == "handing in")
