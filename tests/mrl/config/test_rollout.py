"""What rollout workers cannot yet do is refused with the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config.load import load
from mrl.errors import ConfigError

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.yaml"
WORKERS = ("rollout.workers=node", "reward.nodes=all")
ACTS = (
    "model.max_length=64",
    "rollout.max_response_tokens=40",
    "agent={environment: tests.support.guess:Guess}",
)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("reward.nodes=driver",), r"reward.nodes = driver: .*; set all, or workers driver"),
        (ACTS, r"agent.nodes = driver: .*; set all, or workers driver"),
        (("routing.replay=engine",), r"routing.replay = engine: .*; set trainer or off, or workers driver"),
        (("rollout.workers=all",), "Input should be 'driver' or 'node'"),
    ],
)
def test_workers_refuse(words: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load([QUICKSTART], [*WORKERS, *words])


@pytest.mark.parametrize("words", [(), (*ACTS, "agent.nodes=all")])
def test_workers_may_be_set(words: tuple[str, ...]) -> None:
    assert load([QUICKSTART], [*WORKERS, *words]).rollout.workers == "node"
