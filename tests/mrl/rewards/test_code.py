"""The code verifier on honest programs: every kind of task, every outcome, and program extraction."""

import os
import signal
import subprocess
import time
from typing import Any

import pytest

from mrl.errors import DataError, RewardError
from mrl.rewards.code import sandbox
from mrl.rewards.code.code_rules import CodeRules
from mrl.rewards.code.code_verifier import verify_program
from mrl.rewards.code.tasks import CodeTask, parse_task
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rewards.pool.reward_pool import RewardPool
from mrl.rewards.verdict_json import decode_verdict
from mrl.samples import VerdictKind

PATIENT = CodeRules(seconds=60.0, cpu_seconds=60.0)
ADD = parse_task(
    {
        "entry_point": "add",
        "cases": [{"args": [a, b], "expected": a + b} for a, b in [(1, 2), (0, 0), (-5, 3)]],
    },
    place="x",
)
ECHO = parse_task({"inputs": ["1 2", "3 4\n"], "outputs": ["3", "7\n"]}, place="x")
CHECK = parse_task(
    {
        "prompt": "def add(a, b):\n    '''Sum.'''\n",
        "entry_point": "add",
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n"
        "    assert candidate(a=5, b=5) == 10\n",
    },
    place="x",
)


@pytest.mark.parametrize(
    ("program", "task"),
    [
        ("def add(a, b):\n    return a + b", ADD),
        ("add = lambda a, b: a + b", ADD),
        ("import sys\nprint('noise')\nsys.stderr.write('noise')\ndef add(a, b):\n    print(a)\n"
         "    return a + b", ADD),
        ("print(sum(map(int, input().split())))", ECHO),
        ("import sys\nif __name__ == '__main__':\n    print(sum(map(int, sys.stdin.read().split())), end='')",
         ECHO),
        ("    return a + b\n", CHECK),
        ("def add(a, b):\n    return a + b\n", CHECK),
        ("from functools import lru_cache\n"
         "import math, re, collections, itertools, heapq, json, datetime, random\n@lru_cache(None)\n"
         "def add(a, b):\n    return a + b", ADD),
        ("open('/tmp/own', 'w').write('x')\ndef add(a, b):\n    return a + b * len(open('/tmp/own').read())",
         ADD),
    ],
)  # fmt: skip
def test_right_programs_are_accepted(program: str, task: CodeTask) -> None:
    verdict = verify_program(program, task, PATIENT)
    assert (verdict.kind, verdict.value) == (VerdictKind.SCORED, 1.0), verdict.reason
    assert verdict.parts == {"code.accepted": 1.0}


@pytest.mark.parametrize(
    ("program", "task", "outcome"),
    [
        ("def add(a, b):\n    return a - b", ADD, "wrong"),
        ("def add(a, b):\n    return str(a + b)", ADD, "wrong"), ("def add(a, b):\n    pass", ADD, "wrong"),
        ("def add(a, b)\n    return a + b", ADD, "runtime error"),
        ("def sub(a, b):\n    return a + b", ADD, "runtime error"),
        ("def add(a):\n    return a", ADD, "runtime error"),
        ("def add(a, b):\n    raise ValueError", ADD, "runtime error"),
        ("def add(a, b):\n    while True: pass", ADD, "time limit"),
        ("def add(a, b):\n    return add(a, b)", ADD, "runtime error"),
        ("def add(a, b):\n    return len(' ' * 10**10)", ADD, "memory limit"),
        ("print(sum(map(int, input().split())) + 1)", ECHO, "wrong"), ("print(1/0)", ECHO, "runtime error"),
        ("print(3)\nprint(7)", ECHO, "wrong"), ("    return a - b\n", CHECK, "wrong"),
        ("    return None\n", CHECK, "wrong"), ("    return 1/0\n", CHECK, "runtime error"),
        ("", CHECK, "wrong"),
    ],
)  # fmt: skip
def test_wrong_programs_are_told_why(program: str, task: CodeTask, outcome: str) -> None:
    rules = CodeRules(seconds=0.5, cpu_seconds=0.5) if outcome == "time limit" else PATIENT
    verdict = verify_program(program, task, rules)
    assert (verdict.kind, verdict.value) == (VerdictKind.SCORED, 0.0)
    assert verdict.reason.startswith(outcome), verdict.reason


def test_partial_value_is_the_share_of_cases() -> None:
    verdict = verify_program("def add(a, b):\n    return abs(a) + b", ADD, CodeRules(partial=True))
    assert verdict.value == pytest.approx(2 / 3)


def test_values_of_many_types_cross() -> None:
    values: list[Any] = [
        None, True, 3, 2**200, 1.5, float("inf"), "text \u00e9 \x00", [1, [2]], {"a": [1], "b": None},
    ]  # fmt: skip
    task = parse_task(
        {"entry_point": "same", "cases": [{"args": [v], "expected": v} for v in values]}, place="x"
    )
    assert verify_program("def same(x):\n    return x", task, PATIENT).value == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "def add(a, b):\n    return type('\x1b[2J\\n\u202e', (), {})()",
        "def add(a, b):\n    raise type('\x1b[2J\\n\u202e', (Exception,), {})",
    ],
)
def test_reasons_carry_no_control_characters(program: str) -> None:
    verdict = verify_program(program, ADD, PATIENT)
    assert verdict.value == 0.0
    assert verdict.reason.isprintable() and r"\x1b[2J\n\u202e" in verdict.reason
    reply = {"kind": "scored", "value": 0.0, "reason": "\x1b[2J"}
    decoded = decode_verdict(reply, verifier="x", version="1", num_tokens=None)
    assert decoded is not None and decoded.reason == r"\x1b[2J"


def test_a_program_over_the_size_limit_is_refused_unread() -> None:
    start = time.process_time()
    assert verify_program("x = 1\n" * 100_000, ADD, PATIENT).kind is VerdictKind.REJECTED
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize(
    "raw",
    [None, 3, "no json", {}, {"entry_point": "f"}, {"entry_point": "f", "cases": [{"args": [1]}]},
     {"inputs": ["a"], "outputs": []}, {"test": "assert f() == 1"},
     {"entry_point": "f", "test": "def check(:"}, {"cases": [{"args": [1], "expected": 2}]}],
    ids=str,
)  # fmt: skip
def test_bad_tasks_are_named(raw: Any) -> None:
    with pytest.raises(DataError, match="rows:4"):
        parse_task(raw, place="rows:4")


def test_no_sandbox_means_no_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The verifier refuses to start without a working bubblewrap."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RewardError, match="bubblewrap"):
        sandbox.find_sandbox.__wrapped__()
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho no namespaces here >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    with pytest.raises(RewardError, match="no namespaces here"):
        sandbox.find_sandbox.__wrapped__()


def test_the_boundary_says_what_holds() -> None:
    description = sandbox.find_sandbox().describe()
    assert "no network" in description
    assert "cgroup" in description


def test_groups_of_killed_processes_are_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = sandbox.cgroup.make_cgroup(memory_bytes=2**28, processes=8)
    if made is None:
        assert "no cgroup here" in sandbox.find_sandbox().describe()
        return
    gone = subprocess.Popen(["true"])
    gone.wait()
    made.close()
    monkeypatch.setattr(sandbox.cgroup.os, "getpid", lambda: gone.pid)
    left = sandbox.cgroup.make_cgroup(memory_bytes=2**28, processes=8)
    monkeypatch.undo()
    assert left is not None and all(folder.is_dir() for folder in left.folders)
    sandbox.cgroup.remove_empty_cgroups()
    assert not any(folder.exists() for folder in left.folders)
    left.close()


def test_the_groups_of_one_killed_process_are_removed_and_what_runs_in_them_is_ended(monkeypatch) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setattr(sandbox.cgroup.os, "getpid", lambda: gone.pid)
    left = sandbox.cgroup.make_cgroup(memory_bytes=2**28, processes=8)
    monkeypatch.undo()
    if left is None:
        assert "no cgroup here" in sandbox.find_sandbox().describe()
        return
    with subprocess.Popen(["sleep", "1000"]) as sleeper:
        for descriptor in left.procs:
            os.write(descriptor, str(sleeper.pid).encode())
        sandbox.cgroup.kill_owned_by(sleeper.pid)
        assert all(folder.is_dir() for folder in left.folders), "another process'"
        sandbox.cgroup.kill_owned_by(gone.pid, deadline_seconds=30.0)
        assert sleeper.wait(30) == -signal.SIGKILL
    assert not any(folder.exists() for folder in left.folders)
    left.close()


def test_code_in_the_pool(make_pair: Any, score_all: Any) -> None:
    section = RewardSection(kind="code", workers=2)
    response = "```python\ndef add(a, b):\n    return a + b\n```"
    with RewardPool(section) as pool:
        verdicts = score_all(pool, [make_pair(n, response, ADD) for n in range(12)])
    assert [v.value for v in verdicts.values()] == [1.0] * 12
