"""Random processes killed, stopped or asked to end, at random moments of random phases: named in time, nothing left, each prompt once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch.random_kills import KINDS, RandomKills, of_kind

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

Make = Callable[[str, int], RandomKills]


@pytest.fixture
def make(task: Path, acting: Path, tmp_path: Path) -> Iterator[Make]:
    made: list[RandomKills] = []

    def one(name: str, seed: int) -> RandomKills:
        made.append(of_kind(name, task, acting, tmp_path, seed))
        return made[-1]

    yield one
    for each in made:
        each.chain.remove()


def test_what_is_replaced_or_stopped_for_a_while_costs_nothing(make: Make) -> None:
    """One start with three faults. Without engines: tests/mrl/loops/test_killed_drivers.py."""
    make("own", 7).finish(3)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", KINDS)
def test_each_prompt_once_over_random_kills(name: str, seed: int, make: Make) -> None:
    """Nine faults: of a start that the fifth ends, and of one that goes on and ends well."""
    kills = make(name, seed)
    kills.ended(4)
    kills.finish(4)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["own", "own, tp"])
def test_each_prompt_once_over_deaths_on_end(name: str, seed: int, make: Make) -> None:
    """Five starts on end of a stream with slots of its own, each ended by the dice in its second step: twenty deaths in all."""
    kills = make(name, 20 + seed)
    for _ in range(5):
        kills.ended(0)
    kills.finish(0)
    print("\n".join(kills.told))
