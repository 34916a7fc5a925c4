"""Environments in their processes: none harms another, and faults are reported by name."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mrl.agents.answer import EnvironmentFault, EnvironmentResult, decode_answer
from mrl.agents.environment_limits import Deadlines
from mrl.agents.environment_registry import EnvironmentSpec
from mrl.agents.episode import EndedBy
from mrl.agents.pool import EnvironmentWorkers
from mrl.agents.tool_calls import ToolCall
from mrl.errors import ConfigError, RolloutError
from tests.support.environments import FILE
from tests.support.processes import children

PATIENCE = 120.0
SPECS = {"counting": EnvironmentSpec(FILE + "Counting"), "faulty": EnvironmentSpec(FILE + "Faulty")}


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentWorkers]:
    with EnvironmentWorkers(
        SPECS, Deadlines(reset_seconds=60.0, step_seconds=60.0, close_seconds=1.0, memory_mib=1024)
    ) as made:
        yield made


@pytest.fixture(scope="module")
def hasty() -> Iterator[EnvironmentWorkers]:
    with EnvironmentWorkers(SPECS, Deadlines(step_seconds=0.5)) as made:
        yield made


def answers(pool: EnvironmentWorkers, count: int) -> dict[str, EnvironmentResult]:
    results: list[EnvironmentResult] = []
    until = time.monotonic() + PATIENCE
    while len(results) < count:
        assert time.monotonic() < until, f"{len(results)} of {count} answers"
        results += pool.poll(1.0)
    assert len(results) == count == len({answer.key for answer in results})
    return {answer.key: answer for answer in results}


def begun(pool: EnvironmentWorkers, key: str, environment: str, **task: Any) -> EnvironmentResult:
    pool.open(key, environment, task, 7)
    return answers(pool, 1)[key]


def hosts() -> set[psutil.Process]:
    """Return the workers of all pools here; pids wrap, so the last need not be the youngest."""
    return {*children("mrl.agents.environment_host")}


def test_an_episode_from_reset_to_done(pool: EnvironmentWorkers) -> None:
    opening = begun(pool, "a", "counting", turns=2)
    assert opening.turn == 0 and opening.reward is None and opening.ended_by is None
    assert opening.messages[0]["role"] == "user" and opening.messages[0]["content"].startswith("seed 7")
    pool.step("a", "hello", [])
    first = answers(pool, 1)["a"]
    assert (first.turn, first.reward, first.done) == (1, 0.5, False)
    assert first.messages == ({"role": "user", "content": "heard hello"},)
    pool.step("a", "", [ToolCall("add", {"n": 2}), ToolCall("add", {"n": 3})])
    last = answers(pool, 1)["a"]
    assert [message["content"] for message in last.messages] == ["add: 5", "add: 5"]
    assert last.messages[0]["role"] == "tool" and last.info == {"added": 5}
    assert (
        last.ended_by is EndedBy.ENV_DONE
        and not last.ended_by.is_infrastructure_failure
        and last.fault is None
    )
    with pytest.raises(RolloutError, match="is over"):
        pool.step("a", "more")
    pool.close("a")
    assert pool.num_open == 0


def test_the_seed_is_that_of_the_process_too(pool: EnvironmentWorkers) -> None:
    openings = []
    for key in ("one", "two"):
        openings.append(begun(pool, key, "counting", turns=1).messages)
        pool.close(key)
    assert openings[0] == openings[1]


@pytest.mark.parametrize(
    ("fault", "counted", "ended_by"),
    [
        ("raise", EnvironmentFault.RAISED, EndedBy.ENV_CRASHED),
        ("exit", EnvironmentFault.EXITED, EndedBy.ENV_CRASHED),
        ("sys.exit", EnvironmentFault.EXITED, EndedBy.ENV_CRASHED),
        ("huge", EnvironmentFault.OVERSIZED, EndedBy.ENV_CRASHED),
        ("nan", EnvironmentFault.REWARD, EndedBy.ENV_CRASHED),
        ("text reward", EnvironmentFault.REWARD, EndedBy.ENV_CRASHED),
        ("object", EnvironmentFault.CONTRACT, EndedBy.ENV_CRASHED),
        ("role", EnvironmentFault.CONTRACT, EndedBy.ENV_CRASHED),
        ("tuple", EnvironmentFault.CONTRACT, EndedBy.ENV_CRASHED),
        ("unreachable", EnvironmentFault.UNREACHABLE, EndedBy.ENV_UNREACHABLE),
        ("refused", EnvironmentFault.UNREACHABLE, EndedBy.ENV_UNREACHABLE),
        ("sandbox", EnvironmentFault.SANDBOX_LOST, EndedBy.SANDBOX_LOST),
        ("tool", EnvironmentFault.TOOL_TIMEOUT, EndedBy.TOOL_TIMEOUT),
        ("memory", EnvironmentFault.RAISED, EndedBy.ENV_CRASHED),
        ("a reply of its own", EnvironmentFault.RAISED, EndedBy.ENV_CRASHED),
    ],
)
def test_a_fault_has_a_name_and_ends_its_episode_alone(pool, fault, counted, ended_by) -> None:
    before = pool.faults().get(counted.value, 0)
    pool.open("good", "faulty", {}, 0)
    pool.open("bad", "faulty", {"fault": fault}, 0)
    answers(pool, 2)
    pool.step("good", "")
    pool.step("bad", "")
    results = answers(pool, 2)
    assert results["good"].reward == 1.0 and results["good"].fault is None
    bad = results["bad"]
    assert (bad.fault, bad.ended_by, bad.reward, bad.done) == (counted, ended_by, None, False)
    assert ended_by.is_infrastructure_failure == (fault != "tool") and bad.reason
    assert pool.faults()[counted.value] == before + 1
    for key in results:
        pool.close(key)


@pytest.mark.parametrize("fault", ["hang", "spin"])
def test_a_step_has_a_deadline(hasty: EnvironmentWorkers, fault: str) -> None:
    begun(hasty, fault, "faulty", fault=fault)
    hasty.step(fault, "")
    answer = answers(hasty, 1)[fault]
    assert answer.ended_by is EndedBy.ENV_DEADLINE and "agent.step_seconds" in answer.reason
    assert answer.seconds >= 0.5
    hasty.close(fault)


def test_what_an_environment_prints_holds_nobody_up(pool: EnvironmentWorkers) -> None:
    begun(pool, "loud", "faulty", fault="prints")
    pool.step("loud", "")
    assert answers(pool, 1)["loud"].reward == 1.0
    pool.close("loud")


def test_a_fault_at_reset(pool: EnvironmentWorkers) -> None:
    answer = begun(pool, "early", "faulty", fault="raise", at=0)
    assert answer.ended_by is EndedBy.ENV_CRASHED and "an environment's own mistake" in answer.reason
    pool.close("early")


def test_an_opening_of_another_shape_is_a_fault(pool: EnvironmentWorkers) -> None:
    for key, says in (("number", 5), ("tool", [{"role": "tool", "content": "x"}]), ("bare", [{"text": "x"}])):
        assert begun(pool, key, "counting", turns=1, says=says).fault is EnvironmentFault.CONTRACT
        pool.close(key)
    row = begun(pool, "row", "counting", turns=1, says="")
    assert row.messages == () and row.fault is None
    pool.close("row")


def test_an_episode_that_is_closed_is_closed_in_its_process(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    spec = EnvironmentSpec(FILE + "Counting", {"closed": str(closed)})
    with EnvironmentWorkers({"counting": spec}) as pool:
        for seed in range(4):
            pool.open(str(seed), "counting", {"turns": 3}, seed)
        answers(pool, 4)
        pool.step("3", "still at it")
        answers(pool, 1)
        pool.close("0")
    assert sorted(closed.read_text().split()) == ["0", "1", "2", "3"]


def test_a_host_that_is_killed_is_replaced(pool: EnvironmentWorkers) -> None:
    begun(pool, "first", "counting", turns=9)
    (host,) = [host for host in hosts() if host.children()]
    guests = host.children()
    os.kill(host.pid, signal.SIGKILL)
    gone, left = psutil.wait_procs(guests, timeout=PATIENCE)
    assert not left and gone
    pool.step("first", "hello")
    answer = answers(pool, 1)["first"]
    assert answer.fault is EnvironmentFault.HOST_LOST and answer.ended_by is EndedBy.ENV_CRASHED
    pool.close("first")
    assert begun(pool, "second", "counting", turns=9).fault is None
    pool.close("second")


def test_a_host_that_says_nothing_is_given_up() -> None:
    others = hosts()
    with EnvironmentWorkers(SPECS, Deadlines(step_seconds=0.2), host_seconds=0.3) as pool:
        begun(pool, "first", "counting", turns=9)
        (stopped,) = hosts() - others
        os.kill(stopped.pid, signal.SIGSTOP)
        pool.step("first", "hello")
        answer = answers(pool, 1)["first"]
    assert answer.fault is EnvironmentFault.HOST_LOST and "is silent" in answer.reason


def test_an_environment_describes_itself(pool: EnvironmentWorkers) -> None:
    spec = pool.describe("counting")
    assert spec.replayable and list(spec.schemas()) == ["add"] and spec.schemas()["add"]["required"] == ["n"]
    assert pool.describe("faulty").tools == ()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (EnvironmentSpec("no_such_word"), "is not known; choose one of .*, or a path"),
        (EnvironmentSpec(FILE + "Counting", {"clsed": 1}), "cannot be made.*clsed"),
        (EnvironmentSpec(FILE + "BadTool"), "with a JSON schema"),
    ],
)
def test_what_cannot_be_had_is_told_at_the_start(spec: EnvironmentSpec, says: str) -> None:
    with EnvironmentWorkers({"it": spec}) as pool, pytest.raises(ConfigError, match=says):
        pool.describe("it")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("class Env(:\n", "SyntaxError: "),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("import sys\nsys.exit(0)\n", "SystemExit: 0"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_at_the_start(text: str, says: str, tmp_path: Path) -> None:
    """As for every file that a setting names: the file's error follows the setting's name."""
    name = f"{tmp_path / 'own.py'}:Env"
    (tmp_path / "own.py").write_text(text)
    message = re.escape(f"agent.environment = {name!r}: {tmp_path / 'own.py'} cannot be imported: {says}")
    with EnvironmentWorkers({"it": EnvironmentSpec(name)}) as pool, pytest.raises(ConfigError, match=message):
        pool.describe("it")


def test_a_pool_is_used_by_its_rules(pool: EnvironmentWorkers) -> None:
    with pytest.raises(RolloutError, match="no environment 'other'"):
        pool.open("k", "other", {}, 0)
    with pytest.raises(RolloutError, match="not valid JSON"):
        pool.open("k", "counting", {"what": object()}, 0)
    with pytest.raises(RolloutError, match="not open"):
        pool.step("k", "hello")
    pool.close("k")


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"messages": "text"},
        {"messages": [{"role": "user", "content": 1}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]},
        {"messages": [{"role": "user", "content": "a\ud800b"}], "done": False, "info": {}},
        {"messages": [], "done": 1, "info": {}},
        {"messages": [], "done": False, "info": []},
        {"messages": [], "done": False, "info": {}, "reward": 10**400},
        {"messages": [], "done": False, "info": {}, "reward": float("inf")},
    ],
)
def test_a_reply_of_another_shape_is_never_an_answer(reply: dict[str, Any]) -> None:
    answer = decode_answer(reply | {"key": "k", "turn": 1, "seconds": 0.1})
    assert (
        answer.fault in (EnvironmentFault.CONTRACT, EnvironmentFault.REWARD)
        and answer.ended_by is EndedBy.ENV_CRASHED
    )
    assert answer.reward is None and not answer.messages
