"""Agent settings that cannot work, or would have no effect, are refused with a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config.load import load
from mrl.errors import ConfigError

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.yaml"
ACTS = (
    "model.max_length=64",
    "rollout.max_response_tokens=40",
    "agent={environment: tests.support.guess:Guess}",
)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("reward={kind: environment}",), "needs an environment; add the section agent"),
        ((*ACTS, "agent.max_turn_tokens=41"), "max_turn_tokens = 41 has no effect"),
        ((*ACTS, "loop.deterministic=true"), "depend on when environments reply"),
    ],
)
def test_refused(words: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load([QUICKSTART], words)


def test_an_environment_with_a_judge_of_its_own_is_allowed() -> None:
    config = load([QUICKSTART], [*ACTS, "agent.max_turn_tokens=40"])
    assert config.agent is not None and config.reward.kind == "maths"
