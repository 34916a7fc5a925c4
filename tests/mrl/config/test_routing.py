"""Routing replay requires certain settings in the rest of the configuration."""

import pytest

from mrl.config.load import load
from mrl.errors import ConfigError

WORDS = ["run.name=r", "model.path=m", "data.train=t.jsonl", "reward.kind=maths"]


def test_a_replay_of_the_trainers_pass_needs_that_pass() -> None:
    for setting in ("algorithm.minibatches=2", "algorithm.epochs=2", "algorithm.old_logprobs=recomputed"):
        assert load([], [*WORDS, "routing.replay=trainer", setting]).routing.replay == "trainer"
    with pytest.raises(ConfigError, match=r"no pass precedes .* set algorithm.old_logprobs = recomputed"):
        load([], [*WORDS, "routing.replay=trainer"])


def test_episodes_have_no_routes_of_their_engines() -> None:
    agent = "agent={environment: calculator}"
    assert load([], [*WORDS, agent]).agent is not None
    with pytest.raises(
        ConfigError, match=r"routing.replay = engine with the section agent: the routes of observations"
    ):
        load([], [*WORDS, agent, "routing.replay=engine"])
