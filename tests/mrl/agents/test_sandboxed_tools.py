"""Tools with calls in the sandbox: names persist, the policy learns of limits, faults are ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mrl.agents.environment_registry import EnvironmentSpec
from mrl.agents.envs.python_maths import PythonMaths
from mrl.agents.pool import EnvironmentWorkers
from mrl.agents.tool_calls import ToolCall
from mrl.agents.tools.python import Python, Shell
from mrl.agents.tools.tool import ToolError
from mrl.rewards.code import cgroup
from mrl.rewards.code.sandbox import find_sandbox
from tests.support.processes import children

GSM8K = Path(__file__).parents[2] / "data/gsm8k/test.jsonl"


@pytest.fixture(scope="module")
def python() -> Iterator[Python]:
    tool = Python(seconds=5.0, memory_mib=256)
    yield tool
    tool.close()


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("x = 6\nx * 7", "42\n"),
        ("print('a', end='')\nx + 1", "a7\n"),
        ("def f(n):\n    return n + x", "(no output)"),
        ("f(1)", "7\n"),
        ("import sys; sys.stderr.write('told')", "told4\n"),
        ("'é😀' * 2", "'é😀é😀'\n"),
    ],
)
def test_names_stay_from_cell_to_cell(python: Python, code: str, says: str) -> None:
    assert python.run(code) == says


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("1/0", "ZeroDivisionError: division by zero"),
        ("def (", "SyntaxError"),
        ("undefined", "NameError"),
        ("print('so far')\nraise ValueError('mine')", "so far\nTraceback"),
        ("open('/etc/passwd').read()", "FileNotFoundError"),
        ("import socket; socket.create_connection(('1.1.1.1', 80))", "OSError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_what_a_cell_raises_is_told_and_its_names_stay(python: Python, code: str, says: str) -> None:
    output = python.run(code)
    assert says in output and "runner.py" not in output
    assert python.run("1 + 1") == "2\n"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("while True: pass", "time limit"),
        ("import os; os._exit(0)", "runtime error"),
        ("x = bytearray(2**30)", None),
        ("import os\nwhile True: os.write(1, b'x' * 65536)", "output limit"),
    ],
)
def test_a_cell_that_is_over_its_limits_is_told_so(code: str, says: str | None) -> None:
    tool = Python(seconds=1.0, memory_mib=256)
    assert tool.run("kept = 1") == "(no output)"
    if says is None:
        assert "MemoryError" in tool.run(code)
    else:
        with pytest.raises(ToolError, match=f"{says}.*without its names"):
            tool.run(code)
        assert "NameError" in tool.run("kept")
    tool.close()


def test_what_a_cell_prints_is_cut(python: Python) -> None:
    output = python.run("print('😀' * 10**6)")
    assert len(output) < 30_000 and output.count("more characters]") == 1


def test_a_shell_keeps_its_files_and_has_no_network() -> None:
    if not find_sandbox().has_cgroup:
        pytest.skip("no cgroup can be made here, and without one the sandbox starts no process")
    shell = Shell(seconds=2.0)
    assert shell.run("echo hello > /tmp/file; ls /tmp") == "file\n"
    assert shell.run("cat /tmp/file; false") == "hello\nexit status 1\n"
    assert "exit status" in shell.run("touch /usr/mine")
    with pytest.raises(ToolError, match="time limit"):
        shell.run("sleep 100")
    shell.close()


def test_a_gsm8k_row_is_computed_and_answered() -> None:
    row = json.loads(GSM8K.read_text().splitlines()[0])
    env = PythonMaths()
    env.reset(row, 0)
    assert env.step("", [ToolCall("python", {"code": "(16 - 3 - 4) * 2"})]).observation == [
        {"role": "tool", "content": "18\n"}
    ]
    assert env.step("She makes #### 18", []).reward == 1.0
    assert env.step("The answer is 17.", []).reward == 0.0
    assert env.step("no number", []).reward == 0.0
    env.close()


def test_an_episode_that_is_given_up_leaves_no_process() -> None:
    with EnvironmentWorkers({"maths": EnvironmentSpec("python_maths")}) as pool:
        pool.open("key", "maths", {"answer": "1"}, 0)
        assert pool.poll(120.0)[0].fault is None
        pool.step("key", "", [ToolCall("python", {"code": "1"})])
        assert pool.poll(120.0)[0].messages[0]["content"] == "1\n"
        (host,) = children("mrl.agents.environment_host")
        below = host.children(recursive=True)
        pool.step("key", "", [ToolCall("python", {"code": "while True: pass"})])
        pool.close("key")
        _, left = psutil.wait_procs(below, timeout=60.0)
    assert len(below) > 1 and not left
    parents = [parent for parent, _ in cgroup._settings(0, 0)]
    assert not [folder for parent in parents for one in below for folder in parent.glob(f"mrl-{one.pid}-*")]
