"""Settings that rollout workers do not support yet are refused with a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config.load import load
from mrl.errors import ConfigError

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.yaml"
WORKERS = "rollout.workers=node"
JUDGE = "reward={kind: llm, engine: judge, engines: {judge: {model: /m}}}"
ACTS = (
    "model.max_length=64",
    "rollout.max_response_tokens=40",
    "agent={environment: tests.support.guess:Guess}",
)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((JUDGE,), r"reward.engines, .*; start a server and set its path, or workers driver"),
        (("reward.nodes=all",), r"reward.nodes: .*removed; delete it; rollout.workers: node puts"),
        ((*ACTS, "agent.nodes=all"), r"agent.nodes: .*removed; delete it; rollout.workers: node puts"),
        (("routing.replay=engine",), r"routing.replay = engine: .*; set trainer or off, or workers driver"),
        (("rollout.workers=all",), "Input should be 'driver' or 'node'"),
    ],
)
def test_workers_refuse(words: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load([QUICKSTART], [WORKERS, *words])


@pytest.mark.parametrize("words", [(), ACTS])
def test_workers_may_be_set(words: tuple[str, ...]) -> None:
    assert load([QUICKSTART], [WORKERS, *words]).rollout.workers == "node"
