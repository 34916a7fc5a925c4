"""Megatron-only programs under torchrun on this machine, without Ray: starting the ranks, and the worker of one rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from mrl.config.root import Config
from mrl.errors import WorkerLost

GRACE_SECONDS = 20.0


def run_torchrun(
    module: str, arguments: Sequence[str], config: Config, *, deadline_seconds: float = 3600.0
) -> int:
    """`torchrun --nproc-per-node WORLD -m module ARGUMENTS` on this machine; its exit code, or WorkerLost at the deadline."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(config.training.layout.world_size), "-m", module, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": str(config.training.num_threads)}
    process = subprocess.Popen(command, env=environment)
    try:
        return process.wait(deadline_seconds)
    except subprocess.TimeoutExpired:
        raise WorkerLost(f"{module} was not done after {deadline_seconds:g} s and was ended") from None
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
