"""One machine's part of a Ray cluster that a batch system or torchrun starts: up, then exactly this one down.

The node's number comes from the launcher and is its Ray label; ports are fixed and offset by the number, so that several
nodes fit on one machine. As a program (`python -m mrl.launch.cluster.ray_node`) it stays until SIGTERM, SIGINT, or a file that its
launcher makes (a batch system's signals would not leave it the time to clean up).
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
from mrl.own_code import child_path

NODE_LABEL = "mrl-node"
"""The label by which the placement finds a node of a number."""
PORT_BASE = 12000
"""Below the range that systems hand out on their own (32768 and up)."""
HEALTH = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "5",
}
"""How the head looks at its nodes: one that does not answer five times in a row is lost, after 20 s. (Ray's own 65 s are too long
for a run that stands still meanwhile; a network that is cut for less goes on.)"""
PORTS_PER_NODE = 200
NODES_PER_RANGE = 64
"""Port ranges repeat after so many nodes; more than that never share a machine."""
MOST_OPEN_FILES = 65536
"""What `ray.init` raises the limit of a process to, if the system allows as many."""
STARTED = b"Ray runtime started"
"""What `ray start` says when its node is up."""
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
    """What `ray start` is told."""

    number: int
    address: str
    """This machine's address, as other nodes reach it."""
    head: str
    """host:port of node 0's control service."""
    slots: int
    token: str
    """Secret that every process of the cluster shows; the launcher draws one per start and shares it."""
    gpus: int = 0
    port_base: int = PORT_BASE
    object_store_bytes: int | None = None
    """launch.object_store_bytes."""

    @property
    def first_port(self) -> int:
        return self.port_base + self.number % NODES_PER_RANGE * PORTS_PER_NODE

    def fixed_ports(self) -> dict[int, str]:
        """Port -> name of its option; the head's own comes first. Workers take free ones of the rest."""
        own = {int(self.head.rsplit(":", 1)[1]): "port"}
        shared = {self.first_port + offset: name for offset, name in enumerate(FIXED_PORTS, 2)}
        return shared if self.number else own | shared

    def command(self, folder: Path) -> list[str]:
        """Arguments of `ray start`."""
        first = self.first_port
        where = [f"--address={self.head}"] if self.number else ["--head", "--include-dashboard=false"]
        fixed = [f"--{name}={port}" for port, name in self.fixed_ports().items()]
        return [
            *(sys.executable, "-P", str(START), "start", *where, *fixed),
            f"--min-worker-port={first + 20}",
            f"--max-worker-port={first + PORTS_PER_NODE - 1}",
            f"--node-ip-address={self.address}",
            # Ray starts as many workers in advance: with one for each core of a large node they would take all the ports.
            f"--num-cpus={self.slots}",
            f"--num-gpus={self.gpus}",
            f"--resources={json.dumps({SLOT: self.slots})}",
            f"--labels={NODE_LABEL}={self.number}",
            f"--object-store-memory={store_bytes(self.object_store_bytes)}",
            f"--temp-dir={folder / RAY_FOLDER}",
            "--disable-usage-stats",
        ]


def head_address(address: str, port_base: int = PORT_BASE) -> str:
    """host:port of a cluster whose node 0 has this address."""
    return f"{address}:{port_base}"


def own_address() -> str:
    """This machine's address on the interface that routes outwards; the loopback without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: chooses an interface, sends nothing
        except OSError:
            return LOOPBACK
        return probe.getsockname()[0]


@contextlib.contextmanager
def ray_node(
    node: Node, *, deadline_seconds: float = 120.0, until: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The node is up while inside; yields the process that stays as long as it is. WorkerLost with Ray's own output where
    it did not come up in time, or with who holds one of its ports; SystemExit(0) where the file `until` appears before it is up."""
    if held := ports.taken(node.fixed_ports()):
        raise WorkerLost(
            f"node {node.number} ({node.address}) cannot start Ray: {'; '.join(held)}; end what holds them, or choose another "
            "first port (--port-base, MRL_PORT_BASE)"
        )
    raise_open_files()
    with session_folder() as folder:
        environment = {
            **os.environ,
            **child_path(),
            **token_environment(node.token),
            "MRL_SESSION": str(folder),
        }
        # Niceness as in launch/cluster/cluster.py; what the user has set stays.
        no_events = {f"RAY_{name}": str(value) for name, value in NO_TASK_EVENTS.items()}
        environment = {**HEALTH, **no_events, "RAY_worker_niceness": "0", **environment}
        try:
            yield _start(node, folder, environment, time.monotonic() + deadline_seconds, until)
        finally:
            _end_session(folder)


def raise_open_files() -> None:
    """Let this process and its children open as many files as the system allows.

    `ray.init` does so on one machine; `ray start` leaves a node's workers the 1024 that a user usually has.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _start(
    node: Node, folder: Path, environment: dict[str, str], deadline: float, until: Path | None
) -> subprocess.Popen[bytes]:
    """`ray start`, again while the head is not there yet.

    It blocks: Ray's processes stay its children, where a batch system that kills process trees finds them. They are in a group of
    their own: torchrun signals the group of what it started, and a node that hears SIGTERM is gone 10 s later, whether or not the
    driver has finished its step.
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
        _end_session(folder)  # what the attempt left holds the ports of the next one
        process.wait()
        if time.monotonic() > deadline:
            raise WorkerLost(
                f"Ray on node {node.number} ({node.address}) was not up in time; head {node.head}. "
                f"It said:\n{output.read_text(encoding='utf-8', errors='replace')[-3000:]}"
            )


def _end_session(folder: Path, *, grace_seconds: float = 4.0) -> None:
    """Ends the processes of the session whose files are in `folder`: asked first, then killed. Touches no other."""
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
    """The cluster's secret. ConfigError where there is none, or a short one."""
    token = os.environ.get(TOKEN, "")
    if len(token) < 32:
        raise ConfigError(
            f"{TOKEN} must hold the cluster's secret, at least 32 letters, the same on every node"
        )
    return token


def main(arguments: Sequence[str]) -> NoReturn:
    """Starts the node and stays; exits with 0 when told to leave."""
    parser = argparse.ArgumentParser(prog="python -m mrl.launch.cluster.ray_node", description=__doc__)
    parser.add_argument("--number", type=int, required=True, help="the node's number, 0 is the head")
    parser.add_argument("--head", required=True, help="host:port of the head")
    parser.add_argument(
        "--slots", type=int, default=0, help="slots of this node; 0: its GPUs, or one without"
    )
    parser.add_argument(
        "--gpus", type=int, default=None, help="GPUs of this node; absent: those that torch sees"
    )
    parser.add_argument(
        "--object-store-bytes", type=int, default=0, help="0: launch.object_store_bytes' default"
    )
    parser.add_argument("--address", default=None, help="this machine's address")
    parser.add_argument("--port-base", type=int, default=PORT_BASE)
    parser.add_argument("--until", default=None, help="leave when this file appears")
    options = parser.parse_args(arguments)

    def leave(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a batch system's warning concerns the driver
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
                raise WorkerLost(f"Ray on node {node.number} ended by itself with {process.returncode}")
            time.sleep(1.0)
    raise SystemExit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
