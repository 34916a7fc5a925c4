"""Megatron-only programs under torchrun on this machine, without Ray: starting the ranks, and the worker of one rank."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mrl.config.root import Config

GRACE_SECONDS = 40.0
"""torchrun itself gives its ranks 30 s."""
POLL_SECONDS = 0.5


def run_torchrun(
    module: str,
    arguments: Sequence[str],
    config: Config,
    *,
    environment: Mapping[str, str],
    while_it_runs: Callable[[], None],
) -> int:
    """`torchrun --nproc-per-node WORLD -m module ARGUMENTS` on this machine; its exit code.

    It has a session of its own, so that a terminal's signals reach this process alone; `while_it_runs` is called every
    POLL_SECONDS. torchrun is ended when this function is left by an exception.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(config.training.layout.world_size), "-m", module, *arguments]
    threads = {"OMP_NUM_THREADS": str(config.training.num_threads)}
    process = subprocess.Popen(command, env={**os.environ, **threads, **environment}, start_new_session=True)
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(POLL_SECONDS)
            while_it_runs()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # torchrun ends its ranks
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start_worker(config: Config, **changes: Any) -> Any:
    """The MegatronWorker of this rank, by torchrun's environment."""
    from mrl.training.worker import MegatronWorker

    options = {"model": config.model, "training": config.in_updates().training, **changes}
    return MegatronWorker(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        master_address=os.environ["MASTER_ADDR"],
        master_port=int(os.environ["MASTER_PORT"]),
        seed=config.run.seed,
        **options,
    )
