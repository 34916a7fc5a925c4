"""`torchrun -m mrl.launch.torchrun` with two agents on this machine: one cluster of two nodes, two steps, one exit code."""

import contextlib
import time
from pathlib import Path

import pytest

from mrl.observe.metrics_log import read
from tests.launch.acting_runs import words
from tests.launch.two_nodes import free_port_base, started, steps_done, write_run

pytestmark = pytest.mark.integration
SECONDS = 540.0


def agents(stack: contextlib.ExitStack, folder: Path, *arguments: str) -> list:
    base = free_port_base()
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--rdzv-backend",
        "c10d",
    ]
    torchrun += [
        "--rdzv-endpoint",
        f"127.0.0.1:{base + 399}",
        "--local-addr",
        "127.0.0.1",
        "--max-restarts",
        "0",
    ]
    return [
        stack.enter_context(
            started(
                [*torchrun, "-m", "mrl.launch.torchrun", *arguments],
                log=folder / f"agent-{number}.log",
                environment={"MRL_PORT_BASE": str(base), "OMP_NUM_THREADS": "1"},
            )
        )
        for number in range(2)
    ]


def wait_for(processes: list, seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    return [process.wait(max(1.0, deadline - time.monotonic())) for process in processes]


def text(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("agent-*.log")))


@pytest.mark.slow  # tests/launch/test_two_machines.py has two agents in the short form
def test_two_agents_train_two_steps(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    with contextlib.ExitStack() as stack:
        codes = wait_for(agents(stack, tmp_path, str(config), "reward.nodes=all"), SECONDS)
    assert codes == [0, 0], text(tmp_path)
    for node in range(2):
        (log,) = (tmp_path / "runs" / "run" / "logs").rglob(f"rewards-{node}.log")
        assert "verdicts by kind: {'scored': 8}" in log.read_text(), (
            "each node scored its prompt of both steps"
        )
    assert steps_done(tmp_path) == [1, 2]
    assert "preflight: node 0" in text(tmp_path)
    assert "preflight: node 1" in text(tmp_path)


@pytest.mark.slow
def test_two_agents_have_episodes_on_both(acting: Path, tmp_path: Path) -> None:
    (hosts := tmp_path / "hosts").mkdir()
    more = ["loop.steps=2", "training.layout={ep: 2, dp: 2}", "launch.slots_per_node=1"]
    more += ["agent.nodes=all", f"agent.options={{hosts: {hosts}}}"]
    with contextlib.ExitStack() as stack:
        codes = wait_for(agents(stack, tmp_path, *words(acting, tmp_path, "run", *more)), SECONDS)
    assert codes == [0, 0], text(tmp_path)
    assert len(list(hosts.iterdir())) == 2, "one of each node"
    rows = [row for row in read(tmp_path / "run/metrics.jsonl") if row["step"]]
    assert [row["agent/episodes"] for row in rows] == [16, 16]
    assert all(row["agent/retries"] == row["reward/no_reward_frac"] == 0 for row in rows)


def test_all_agents_leave_with_a_failure(tmp_path: Path) -> None:
    """A driver that refuses its data ends both agents; the message is node 0's."""
    config = write_run(tmp_path)
    more = ("data.max_prompt_tokens=1", "data.overlong=refuse")
    with contextlib.ExitStack() as stack:
        codes = wait_for(agents(stack, tmp_path, str(config), *more), SECONDS)
    assert all(code != 0 for code in codes), text(tmp_path)
    assert "mrl: " in text(tmp_path)
    assert "max_prompt_tokens" in text(tmp_path)
    assert "preflight" not in text(tmp_path), "Ray was started for a run that cannot be"
