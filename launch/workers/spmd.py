"""Megatron-only programs on this machine, without Ray: start the ranks, and the worker of one rank."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mrl.config.root import Config
from mrl.processes.start import exit_code, module_command, terminate_all
from mrl.user_code import child_path

GRACE_SECONDS = 30.0
"""Between SIGTERM to the ranks and SIGKILL."""
POLL_SECONDS = 0.5
STORE = "MRL_RANKS_STORE"
"""Variable with the rendezvous file of this machine's ranks, in a folder that only this user can read."""
STARTER = "MRL_RANKS_STARTER"
"""Variable with the pid of the process that started the ranks."""


def run_local_ranks(
    module: str, arguments: Sequence[str], config: Config, *, while_they_run: Callable[[], None]
) -> int:
    """Run `python -m module ARGUMENTS` once for each rank of the training layout; all end together.

    Ranks rendezvous at a file in a folder that only the user can read, and communicate over the loopback
    interface; torchrun would open a port and unpickle what it receives. Each rank has its own session: a
    terminal's signals reach only this process. `while_they_run` is called every POLL_SECONDS.

    Returns:
        0 if all end with 0, else the code of the first failed rank (128 + n if signal n ended it).
    """
    size = config.training.layout.world_size
    with tempfile.TemporaryDirectory(prefix="mrl-ranks-", ignore_cleanup_errors=True) as folder:
        shared = {STORE: f"{folder}/store", STARTER: str(os.getpid()), "WORLD_SIZE": str(size)}
        shared |= {"OMP_NUM_THREADS": str(config.training.num_threads)}
        interface = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(size):
                environment = interface | os.environ | child_path() | shared | {"RANK": str(rank)}
                ranks.append(
                    subprocess.Popen(
                        module_command(module, *arguments), env=environment, start_new_session=True
                    )
                )
            while True:
                codes = [rank.poll() for rank in ranks]
                if failed := [code for code in codes if code]:
                    return exit_code(failed[0])
                if None not in codes:
                    return 0
                while_they_run()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    ranks[codes.index(None)].wait(POLL_SECONDS)
        finally:
            terminate_all(ranks, GRACE_SECONDS)


def starter_is_gone() -> bool:
    """Return True if the process that started this rank has ended; never under torchrun."""
    starter = os.environ.get(STARTER)
    return starter is not None and os.getppid() != int(starter)


def forget_meeting_place() -> None:
    """Remove the ranks' folder if the process that started them has ended and so cannot do it."""
    if starter_is_gone() and STORE in os.environ:
        shutil.rmtree(Path(os.environ[STORE]).parent, ignore_errors=True)


def start_worker(config: Config, **changes: Any) -> Any:
    """Return this rank's MegatronWorker, from the environment of `run_local_ranks` or torchrun."""
    from mrl.resharding.wire.meeting import TCP
    from mrl.training.worker import MegatronWorker

    store = os.environ.get(STORE) or f"{TCP}{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    options = {"model": config.model, "training": config.in_updates().training, **changes}
    return MegatronWorker(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        store=store,
        seed=config.run.seed,
        **options,
    )
