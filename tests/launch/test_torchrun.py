"""`torchrun -m mrl.launch.torchrun` with two agents: one two-node cluster, two steps, one exit code."""

import contextlib
import time
from pathlib import Path

import pytest

from tests.launch.two_nodes import free_port_base, started, steps_done, write_run

pytestmark = pytest.mark.integration
SECONDS = 540.0


def agents(stack: contextlib.ExitStack, folder: Path, *arguments: str) -> list:
    base = free_port_base()
    torchrun = (
        "-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --max-restarts 0 "
        f"--local-addr 127.0.0.1 --rdzv-endpoint 127.0.0.1:{base + 399}"
    )
    return [
        stack.enter_context(
            started(
                [*torchrun.split(), "-m", "mrl.launch.torchrun", *arguments],
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
        codes = wait_for(agents(stack, tmp_path, str(config), "rollout.workers=node"), SECONDS)
    assert codes == [0, 0], text(tmp_path)
    for node in range(2):
        (log,) = (tmp_path / "runs" / "run" / "logs").rglob(f"rollouts-{node}.log")
        assert "verdicts by kind: {'scored': 8}" in log.read_text(), (
            "each node scored its prompt of both steps"
        )
    assert steps_done(tmp_path) == [1, 2]
    assert "preflight: node 0" in text(tmp_path)
    assert "preflight: node 1" in text(tmp_path)


def test_all_agents_leave_with_a_failure(tmp_path: Path) -> None:
    """A driver that refuses its data ends both agents; node 0 prints the message."""
    config = write_run(tmp_path)
    settings = ("data.max_prompt_tokens=1", "data.overlong=refuse")
    with contextlib.ExitStack() as stack:
        codes = wait_for(agents(stack, tmp_path, str(config), *settings), SECONDS)
    assert all(code != 0 for code in codes), text(tmp_path)
    assert "mrl: " in text(tmp_path)
    assert "max_prompt_tokens" in text(tmp_path)
    assert "preflight" not in text(tmp_path), "Ray was started for a run that cannot be"
