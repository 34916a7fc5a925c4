"""Work in a forked child that is killed: after every failure the next request is served."""

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from mrl.rewards.pool.executor import ForkedExecutor


def work(request: Any) -> bytes:
    match request:
        case "sleep":
            time.sleep(1000)
        case "too much":
            return bytes(9_000_000)
        case "spin":
            while True:
                pass
        case "one long call":
            return str(len(str(9**9**9))).encode()
        case "ignore":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            while True:
                pass
        case "allocate":
            return bytes(bytearray(4 * 2**30)[:1])
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(0)
        case "raise":
            raise SystemExit(3)
    return json.dumps({"verdicts": [os.getpid()]}).encode()


@pytest.fixture
def executor() -> Iterator[ForkedExecutor]:
    """An executor with 2 GiB beyond the memory that this process, and so its fork, has mapped."""
    made = ForkedExecutor(work, memory_bytes=psutil.Process().memory_info().vms + 2 * 2**30)
    yield made
    made.close()
    assert not [
        c for c in psutil.Process().children() if c.ppid() == os.getpid() and c.name().startswith("zombie")
    ]


@pytest.mark.parametrize(
    ("request_", "deadline", "answer", "says"),
    [
        ("spin", 0.3, "limit", "time limit"), ("one long call", 0.3, "limit", "time limit"),
        ("ignore", 0.3, "limit", "time limit"), ("sleep", 0.3, "limit", "time limit"),
        ("too much", 5.0, "limit", "announces 9000000 bytes"), ("allocate", 5.0, "limit", "memory limit"),
        ("killed", 5.0, "failed", "status -9"), ("exit", 5.0, "failed", "status 0"),
        ("raise", 5.0, "failed", "status"),
    ],
)  # fmt: skip
def test_a_request_that_does_not_answer(executor, request_, deadline, answer, says) -> None:
    """A busy machine may starve the child; the request is then retried, as the pool does."""
    reply = next(
        reply
        for reply in (executor.run(request_, deadline_seconds=deadline) for _ in range(20))
        if not reply.get("starved")
    )
    assert says in reply[answer], reply
    assert list(executor.run("fine", deadline_seconds=20.0)) == ["verdicts"]


def test_one_child_serves_until_it_has_to_go(executor: ForkedExecutor) -> None:
    first = executor.run("fine", deadline_seconds=20.0)["verdicts"]
    assert executor.run("fine", deadline_seconds=20.0)["verdicts"] == first
    executor.run("spin", deadline_seconds=0.1)
    assert executor.run("fine", deadline_seconds=20.0)["verdicts"] != first
    executor.close()
    executor.close()
