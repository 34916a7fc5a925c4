"""Environment and chat template are looked at before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config.load import load
from mrl.config.root import Config
from mrl.errors import ConfigError
from mrl.launch.commands.acting import look_at
from tests.support import chat_tokenizers

ROOT = Path(__file__).parents[2]


def acting(environment: str, *words: str) -> Config:
    own = f"agent={{environment: '{environment}', max_turns: 3}}"
    return load([ROOT / "configs/quickstart.yaml"], ["model.max_length=64", own, *words])


def test_what_an_environment_says_of_itself() -> None:
    found = look_at(acting("calculator"), chat_tokenizers.qwen())
    assert found is not None and [tool["function"]["name"] for tool in found.tools] == ["calculator"]
    assert set(found.rules.tools) == {"calculator"} and found.rules.replayable
    assert (found.rules.limits.max_context, found.rules.limits.max_tokens) == (64, 6)
    assert look_at(load([ROOT / "configs/quickstart.yaml"]), None) is None


def test_a_template_that_rewrites_history_and_an_environment_that_is_none() -> None:
    forgetful = chat_tokenizers.qwen(chat_tokenizers.FORGETFUL)
    with pytest.raises(
        ConfigError, match=r"rewrites a turn before observations of the role 'user': behind .*mrlthought"
    ):
        look_at(acting("guess"), forgetful)
    with pytest.raises(ConfigError, match=r"agent.environment = 'guest'"):
        look_at(acting("guest"), forgetful)
