"""Two machines (linked network namespaces) under torchrun: one is lost, cut off and healed, or slow."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.resharding.limited_link import ADDRESSES, INTERFACE, NAMES, link
from tests.launch.two_nodes import free_port_base, started, steps_done, write_run
from tests.support.runs import until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]
SECONDS = 400.0
FEWER = "training.layout.dp=1"


class Machines:
    """One torchrun agent per namespace; the run starts on both and continues on the remaining one."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, *words: str) -> None:
        self.folder, self._port, self._base = folder, 29600, free_port_base()
        self._stack = stack
        elastic = f"launch.elastic=[[{FEWER}, training.layout.ep=1]]"
        self._words = [str(write_run(folder)), elastic, "loop.checkpoint.every_steps=1", *words]
        self.agents = [self.start(node) for node in range(len(NAMES))]

    def start(self, node: int) -> subprocess.Popen[bytes]:
        """Start torchrun on a machine; node 0 hosts the store."""
        torchrun = ["-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
        torchrun += ["--max-restarts", "3", "--local-addr", ADDRESSES[node], "--rdzv-backend", "c10d"]
        torchrun += ["--rdzv-endpoint", f"{ADDRESSES[0]}:{self._port}"]
        torchrun += ["--rdzv-conf", f"last_call_timeout=5,is_host={int(node == 0)}"]
        return self._stack.enter_context(
            started(
                [*torchrun, "-m", "mrl.launch.torchrun", *self._words],
                within=("ip", "netns", "exec", NAMES[node]),
                log=self.log(node),
                environment={"MRL_PORT_BASE": str(self._base), "OMP_NUM_THREADS": "1"},
            )
        )

    def log(self, node: int) -> Path:
        return self.folder / f"agent-{node}.log"

    def text(self, node: int = 0) -> str:
        return self.log(node).read_text(errors="replace")

    def wait_for(self, condition: Callable[[], bool], name: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"{name}: not within {SECONDS:g} s\n{self.text()[-6000:]}"
            assert self.agents[0].poll() in (None, 0), self.text()[-6000:]
            time.sleep(0.1)

    def wait_for_steps(self, number: int) -> None:
        """Wait until the run has made this many more steps."""
        goal = len(steps_done(self.folder)) + number
        self.wait_for(lambda: len(steps_done(self.folder)) >= goal, f"{goal} steps")

    def end(self) -> None:
        """Stop torchrun; check that the driver saves first, nothing is left, and each step was made once."""
        self.agents[0].send_signal(signal.SIGTERM)
        self.agents[0].wait(SECONDS)
        assert "SIGTERM: finishing this step, saving" in self.text() and "forcefully" not in self.text()
        until(lambda: not members(0), seconds=SECONDS)
        done = steps_done(self.folder)
        assert done == list(range(1, len(done) + 1))


def members(node: int) -> list[psutil.Process]:
    pids = subprocess.run(["ip", "netns", "pids", NAMES[node]], capture_output=True, text=True, timeout=30)
    processes = []
    for pid in map(int, pids.stdout.split()):
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    return processes


def ip(node: int, *words: str) -> None:
    subprocess.run(["ip", "-n", NAMES[node], *words], timeout=30, check=True)


def cut(node: int) -> None:
    ip(node, "link", "set", INTERFACE, "down")


def heal(node: int) -> None:
    ip(node, "link", "set", INTERFACE, "up")
    ip(node, "route", "add", "default", "dev", INTERFACE)


def power_off(node: int) -> None:
    """Kill a machine's processes without any message to the other."""
    cut(node)
    for process in members(node):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def lost(node: int) -> str:
    return f"node {node} ({ADDRESSES[node]}) lost: "


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Callable[..., Machines]]:
    if os.geteuid():
        pytest.skip("network namespaces need root")
    with link(10.0), contextlib.ExitStack() as stack:
        yield lambda *words: Machines(stack, tmp_path, *words)


@pytest.mark.long
def test_a_short_cut_heals_and_a_machine_without_power_is_named_and_gone_on_without(machines) -> None:
    both = machines("loop.steps=100000")
    both.wait_for_steps(2)
    cut(1)
    time.sleep(4)
    heal(1)
    both.wait_for_steps(2)
    assert "lost: " not in both.text()
    begun = time.monotonic()
    power_off(1)
    both.wait_for(lambda: lost(1) in both.text(), "the lost machine's name")
    seconds = time.monotonic() - begun
    assert seconds < 45, "Ray by itself takes 65 s"
    both.wait_for(lambda: f"1 of 2 slots available: continuing with {FEWER}" in both.text(), "the next start")
    both.wait_for(lambda: "resuming at step" in both.text(), "the resume")
    both.wait_for_steps(2)
    both.end()


@pytest.mark.slow
def test_a_machine_that_is_told_to_end_has_the_run_saved_and_gone_on_without(machines) -> None:
    """The only checkpoint is the one saved at the stop request."""
    both = machines("loop.steps=100000", "loop.checkpoint.every_steps=100000")
    both.wait_for_steps(2)
    both.agents[1].send_signal(signal.SIGTERM)
    both.wait_for(lambda: both.agents[1].poll() is not None, "the end of its agent")
    assert "SIGTERM: finishing this step, saving" in both.text() and "lost: " not in both.text()
    assert "forcefully" not in both.text(1)
    saved = steps_done(both.folder)[-1]
    both.wait_for(lambda: f"1 of 2 slots available: continuing with {FEWER}" in both.text(), "the next start")
    both.wait_for(lambda: f"resuming at step {saved + 1} " in both.text(), "the resume")
    both.wait_for_steps(2)
    both.end()


@pytest.mark.slow
def test_a_machine_that_is_cut_off_comes_back_and_one_that_stays_away_leaves_nothing(machines) -> None:
    both = machines("loop.steps=100000")
    both.wait_for_steps(2)
    cut(1)
    both.wait_for(lambda: lost(1) in both.text(), "the lost machine's name")
    heal(1)
    both.wait_for(lambda: both.text().count("2 trainer ranks and 2 engines") == 2, "a start with both")
    both.wait_for_steps(2)
    cut(1)
    both.wait_for(lambda: both.text(1).count("no heartbeat from node 0") > 0, "the other side's end")
    both.wait_for(lambda: len(members(1)) <= 1, "the end of all but its agent")
    both.wait_for(lambda: "1 trainer ranks and 1 engines" in both.text(), "a start with what is left")
    both.wait_for_steps(2)
    both.end()
