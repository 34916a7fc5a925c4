"""Start and stop one machine's part of a Ray cluster, for a batch system or torchrun.

The launcher gives the node its number, which is its Ray label. Ports are fixed and offset by the number, so
that several nodes fit on one machine. The program (`python -m mrl.launch.cluster.ray_node`) runs until
SIGTERM, SIGINT, or a file that its launcher creates (a batch system's signals leave no time to clean up).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from mrl.errors import ConfigError, WorkerLost
from mrl.launch.cluster import ports
from mrl.launch.cluster.cluster import (
    LOOPBACK,
    NO_TASK_EVENTS,
    RAY_FOLDER,
    SLOT,
    TOKEN,
    own_gpus,
    session_folder,
    store_bytes,
    token_environment,
)
from mrl.launch.cluster.session_watcher import members
from mrl.user_code import child_path

NODE_LABEL = "mrl-node"
"""Ray label that contains the launcher's node number."""
PORT_BASE = 12000
"""Below the ephemeral range (32768 and up)."""
HEALTH = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "5",
}
"""Ray's health checks: a node that fails five in a row is lost, after 20 s. Ray's default of 65 s stops a run
too long; shorter network outages are survived."""
PORTS_PER_NODE = 200
NODES_PER_RANGE = 64
"""Port ranges repeat after this many nodes; no machine runs more."""
MOST_OPEN_FILES = 65536
"""Limit that `ray.init` sets for a process, if the system allows it."""
STARTED = b"Ray runtime started"
"""Output of `ray start` when its node is up."""
START = Path(__file__).with_name("plain_start.py")
FIXED_PORTS = (
    "node-manager-port",
    "object-manager-port",
    "runtime-env-agent-port",
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
    "metrics-export-port",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """Arguments of `ray start` for one node."""

    number: int
    address: str
    """Address at which other nodes reach this machine."""
    head: str
    """host:port of node 0's GCS."""
    slots: int
    token: str
    """Secret that every process of the cluster presents; the launcher creates one per start and shares it."""
    gpus: int = 0
    port_base: int = PORT_BASE
    object_store_bytes: int | None = None
    """launch.object_store_bytes."""

    @property
    def first_port(self) -> int:
        return self.port_base + self.number % NODES_PER_RANGE * PORTS_PER_NODE

    def fixed_ports(self) -> dict[int, str]:
        """Return port -> option name, the head's port first; workers use other ports of the range."""
        head_port = {int(self.head.rsplit(":", 1)[1]): "port"}
        shared = {self.first_port + offset: name for offset, name in enumerate(FIXED_PORTS, 2)}
        return shared if self.number else head_port | shared

    def command(self, folder: Path) -> list[str]:
        """Return the command line of `ray start`."""
        first = self.first_port
        role = [f"--address={self.head}"] if self.number else ["--head", "--include-dashboard=false"]
        fixed = [f"--{name}={port}" for port, name in self.fixed_ports().items()]
        return [
            *(sys.executable, "-P", str(START), "start", *role, *fixed),
            f"--min-worker-port={first + 20}",
            f"--max-worker-port={first + PORTS_PER_NODE - 1}",
            f"--node-ip-address={self.address}",
            # Ray prestarts this many workers: one per core of a large node would use up all ports.
            f"--num-cpus={self.slots}",
            f"--num-gpus={self.gpus}",
            f"--resources={json.dumps({SLOT: self.slots})}",
            f"--labels={NODE_LABEL}={self.number}",
            f"--object-store-memory={store_bytes(self.object_store_bytes)}",
            f"--temp-dir={folder / RAY_FOLDER}",
            "--disable-usage-stats",
        ]


def head_address(address: str, port_base: int = PORT_BASE) -> str:
    """Return host:port of a cluster whose node 0 has this address."""
    return f"{address}:{port_base}"


def own_address() -> str:
    """Return this machine's address on the outbound interface; the loopback address if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # documentation address: selects an interface, sends nothing
        except OSError:
            return LOOPBACK
        return probe.getsockname()[0]


@contextlib.contextmanager
def ray_node(
    node: Node, *, deadline_seconds: float = 120.0, until: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Ray node inside the block; yield its `ray start` process.

    Raises WorkerLost if a port is in use (naming the process) or the node is not up in time (with Ray's
    output), SystemExit(0) if the file `until` appears first.
    """
    if conflicts := ports.ports_in_use(node.fixed_ports()):
        raise WorkerLost(
            f"node {node.number} ({node.address}) cannot start Ray: {'; '.join(conflicts)}; end these "
            "processes, or choose another first port (--port-base, MRL_PORT_BASE)"
        )
    raise_open_files()
    with session_folder() as folder:
        environment = {
            **os.environ,
            **child_path(),
            **token_environment(node.token),
            "MRL_SESSION": str(folder),
        }
        # Niceness as in launch/cluster/cluster.py; variables that the user has set stay.
        no_events = {f"RAY_{name}": str(value) for name, value in NO_TASK_EVENTS.items()}
        environment = {**HEALTH, **no_events, "RAY_worker_niceness": "0", **environment}
        try:
            yield _start(node, folder, environment, time.monotonic() + deadline_seconds, until)
        finally:
            _end_session(folder)


def raise_open_files() -> None:
    """Raise the open-file limit of this process and its children to MOST_OPEN_FILES or the hard limit.

    `ray.init` does this on one machine; `ray start` leaves workers at the user's limit, usually 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _start(
    node: Node, folder: Path, environment: dict[str, str], deadline: float, until: Path | None
) -> subprocess.Popen[bytes]:
    """Run `ray start`, and retry while the head is not up.

    It blocks, so that Ray's processes stay its children and a batch system that kills process trees finds
    them. They have their own process group, because torchrun signals the group of its child, and a node exits
    10 s after SIGTERM even if the driver has not finished its step.
    """
    output = folder / "start.log"
    while True:
        with output.open("wb") as stream:
            process = subprocess.Popen(
                [*node.command(folder), "--block"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            while process.poll() is None and time.monotonic() < deadline:
                if STARTED in output.read_bytes():
                    return process
                if until is not None and until.exists():
                    raise SystemExit(0)
                time.sleep(0.2)
        except BaseException:
            process.kill()
            process.wait()
            raise
        _end_session(folder)  # processes of a failed attempt would hold the ports
        process.wait()
        if time.monotonic() > deadline:
            raise WorkerLost(
                f"Ray on node {node.number} ({node.address}) was not up in time; head {node.head}. "
                f"Its output:\n{output.read_text(encoding='utf-8', errors='replace')[-3000:]}"
            )


def _end_session(folder: Path, *, grace_seconds: float = 4.0) -> None:
    """End only the processes of the session of `folder`: with SIGTERM, after a grace period with SIGKILL."""
    deadline = time.monotonic() + grace_seconds
    number = signal.SIGTERM
    while pids := members(str(folder), {os.getpid()}):
        if time.monotonic() > deadline:
            number = signal.SIGKILL
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(0.5)
        if time.monotonic() > deadline + 10:
            raise WorkerLost(f"processes {pids} of session {folder.name} did not end")


def token_of_environment() -> str:
    """Return the cluster's secret. Raises ConfigError if it is missing or short."""
    token = os.environ.get(TOKEN, "")
    if len(token) < 32:
        raise ConfigError(
            f"{TOKEN} must contain the cluster's secret: at least 32 characters, the same on every node"
        )
    return token


def main(arguments: Sequence[str]) -> NoReturn:
    """Start the node and wait; exit with 0 on SIGTERM, SIGINT or the file --until."""
    parser = argparse.ArgumentParser(prog="python -m mrl.launch.cluster.ray_node", description=__doc__)
    parser.add_argument("--number", type=int, required=True, help="node number; 0 is the head")
    parser.add_argument("--head", required=True, help="host:port of the head")
    parser.add_argument(
        "--slots", type=int, default=0, help="slots of this node; 0: one per GPU, or 1 without GPUs"
    )
    parser.add_argument(
        "--gpus", type=int, default=None, help="GPUs of this node; by default those that torch sees"
    )
    parser.add_argument(
        "--object-store-bytes", type=int, default=0, help="0: the default of launch.object_store_bytes"
    )
    parser.add_argument("--address", default=None, help="this machine's address")
    parser.add_argument("--port-base", type=int, default=PORT_BASE)
    parser.add_argument("--until", default=None, help="exit when this file appears")
    options = parser.parse_args(arguments)

    def leave(number: int, frame: FrameType | None) -> None:
        for ignored in (signal.SIGTERM, signal.SIGINT):
            signal.signal(ignored, signal.SIG_IGN)
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a batch system's warning is for the driver
    gpus = own_gpus() if options.gpus is None else options.gpus
    slots = options.slots or gpus or 1
    node = Node(
        number=options.number,
        address=options.address or own_address(),
        head=options.head,
        slots=slots,
        token=token_of_environment(),
        gpus=min(gpus, slots),
        port_base=options.port_base,
        object_store_bytes=options.object_store_bytes or None,
    )
    until = Path(options.until) if options.until else None
    with ray_node(node, until=until) as process:
        print(
            f"Ray node {node.number} is up on {node.address} with {node.slots} slots, {node.gpus} GPUs",
            flush=True,
        )
        while until is None or not until.exists():
            if process.poll() is not None:
                raise WorkerLost(f"Ray on node {node.number} exited unexpectedly with {process.returncode}")
            time.sleep(1.0)
    raise SystemExit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
