"""Messages to an environment worker arrive unchanged or are refused before."""

import datetime
from typing import Any

import pytest

from mrl.agents.environment_limits import Deadlines
from mrl.agents.environment_messages import call_message, opening_message, read_call, read_opening
from mrl.agents.environment_registry import EnvironmentSpec
from mrl.errors import ConfigError


def test_openings_and_calls_come_as_they_were() -> None:
    spec = EnvironmentSpec("file.py:Class", {"a": [1, 2.5, None, True], "é": {"b": "two\nlines"}})
    deadlines = Deadlines(step_seconds=0.25, memory_mib=7)
    assert read_opening(opening_message(spec, deadlines)) == (spec, deadlines)
    for call in (("\0", 0, "describe", b'["describe"]'), ("key\nof two", 3, "step", b'["step", "a"]')):
        assert read_call(call_message(*call)) == call


@pytest.mark.parametrize("options", [{"since": datetime.date(2026, 1, 1)}, {1: "one"}, {"in": {2: "two"}}])
def test_options_that_json_has_not_are_refused(options: dict[Any, Any]) -> None:
    with pytest.raises(ConfigError, match=r"agent\.options of 'x'"):
        opening_message(EnvironmentSpec("x", options), Deadlines())
