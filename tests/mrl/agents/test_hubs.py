"""Environments of hubs, with their real packages."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Iterator

import pytest

from mrl.agents.adapters.remote import Remote
from mrl.agents.environment import ToolFailed, Unreachable
from mrl.agents.environment_registry import EnvironmentSpec
from tests.support.acted_programs import PYTHON, call, install_programs, reward_of, sample_of
from tests.support.source_tree import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="session", autouse=True)
def packages() -> None:
    install_programs()


def test_an_environment_of_verifiers_scores_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tool is called, and both rewards of its rubric count."""
    monkeypatch.chdir(ROOT)
    options = {"name": "tests.support.letters_environment", "arguments": {"words": 3}}
    spec = EnvironmentSpec("verifiers", options, PYTHON)
    sample = sample_of(spec, "How long is xxx?", [call("count_letters", word="xxx"), "3"], answer="3")
    assert sample.transcript is not None and sample.transcript.turns[0].observation == "3"
    assert reward_of(sample) == 1.25 and not sample.branches
    assert reward_of(sample_of(spec, "How long is xxx?", ["4"], answer="3")) == 0.0


@pytest.fixture(scope="module")
def openenv() -> Iterator[int]:
    """Return the port of a server of OpenEnv's package."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        words = [ROOT / PYTHON, ROOT / "tests/support/openenv_server.py", str(listener.fileno())]
        server = subprocess.Popen(words, pass_fds=[listener.fileno()], env={"PATH": "/usr/bin:/bin"})
        try:
            yield listener.getsockname()[1]
        finally:
            server.terminate()
            server.wait(60)


def test_episodes_on_a_server_of_openenv(openenv: int) -> None:
    with contextlib.ExitStack() as opened:
        one, other = (
            Remote(f"ws://127.0.0.1:{openenv}/ws", observation="text", columns=["start"], seconds=300.0)
            for _ in range(2)
        )
        assert [one.reset({"start": 0}, 3), other.reset({"start": 5}, 4)] == ["seed 3: 0", "seed 4: 5"]
        for env in (one, other):
            opened.callback(env.close)
        steps = [one.step("4", []), other.step("1", []), one.step("6", [])]
        assert [(step.observation, step.reward, step.done) for step in steps] == [
            ("4", 0.0, False),
            ("6", 0.0, False),
            ("10", 1.0, True),
        ]
        with pytest.raises(Unreachable, match="EXECUTION_ERROR"):
            other.step("word", [])


def test_an_action_of_another_form_is_the_policys_mistake_on_a_server_of_openenv(openenv: int) -> None:
    env = Remote(f"ws://127.0.0.1:{openenv}/ws", action="text", seconds=300.0)
    env.reset({}, 0)
    with pytest.raises(ToolFailed, match="VALIDATION_ERROR"):
        env.step("4", [])
    env.close()
