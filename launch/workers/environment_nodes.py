"""Environments on every node: an actor on each starts hosts, which the driver's pool reaches by a socket as it reaches its own by pipes.

An actor does nothing but start processes and end them; what a host is asked, and what it answers, passes it by. A node on which no host
can be started any more gets no more episodes; those that it had are answered as lost when their host is.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mrl.agents.deadlines import Deadlines
from mrl.agents.pool import EnvironmentPool
from mrl.agents.registry import EnvironmentSpec
from mrl.config.root import Config
from mrl.errors import WorkerLost
from mrl.launch.workers.actor_group import ActorGroup, close_all
from mrl.launch.workers.placement import node_strategies
from mrl.observe.phases import PhaseClock
from mrl.rewards.plugins.plugin import child_environment
from mrl.rewards.pool.channel import Line

CONNECT_SECONDS = 10.0
"""For a node that lives to take a connection, and for a process that has connected to say who it is."""
END_SECONDS = 5.0
"""For a node that lives to end a process."""
CLOSE_SECONDS = 30.0
_HELLO = struct.Struct("<16sQ")
"""What a connection begins with: the actor's secret, and the number of the host that it is for."""


class EnvironmentActor:
    """The hosts of one node."""

    def __init__(self, config: Config, number: int, log_folder: str) -> None:
        import ray

        from mrl.launch.workers.actor_log import redirect

        redirect(log_folder, f"environments-{number}")
        self._listener = socket.create_server((ray.util.get_node_ip_address(), 0))
        self._secret = secrets.token_bytes(16)
        self._hosts: dict[int, subprocess.Popen[bytes]] = {}

    def address(self) -> tuple[str, int, bytes]:
        """Where the driver connects, and the secret that it says."""
        host, port = self._listener.getsockname()
        return host, port, self._secret

    def start(self) -> None:
        """Starts a host of the next connection that knows the secret. It dies with this process."""
        connection, number = self._accepted()
        with connection:
            connection.settimeout(None)
            self._hosts[number] = subprocess.Popen(
                [sys.executable, "-P", "-m", "mrl.agents.host", str(os.getpid())],
                stdin=connection.fileno(),
                stdout=connection.fileno(),
                env=child_environment(),
                start_new_session=True,
            )

    def end(self, number: int) -> str:
        """Kills a host and its session; how it ended."""
        if (process := self._hosts.pop(number, None)) is None:
            return "it was not started"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return f"status {process.wait()}"

    def close(self) -> None:
        for number in [*self._hosts]:
            self.end(number)

    def _accepted(self) -> tuple[socket.socket, int]:
        deadline = time.monotonic() + CONNECT_SECONDS
        while True:
            self._listener.settimeout(max(0.0, deadline - time.monotonic()))
            connection, _ = self._listener.accept()
            connection.settimeout(CONNECT_SECONDS)
            with contextlib.suppress(OSError, struct.error):
                secret, number = _HELLO.unpack(connection.recv(_HELLO.size, socket.MSG_WAITALL))
                if secrets.compare_digest(secret, self._secret):
                    return connection, number
            connection.close()


class FarHost(Line):
    """A host of another node, as the pool has its own; what it writes to standard error is in its node's log."""

    def __init__(self, nodes: EnvironmentNodes, node: int, opening: Any) -> None:
        """`opening` is the first message that it gets. OSError where the node takes no connection."""
        self._nodes, self._node, self._number = nodes, node, next(nodes.hosts)
        host, port, secret = nodes.addresses[node]
        self._socket = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(_HELLO.pack(secret, self._number))
        nodes.start_on(node, EnvironmentActor.start)
        super().__init__(self._socket.fileno(), self._socket.fileno())
        self.send(opening)

    def finish(self) -> None:
        """Tells it that nothing more will come."""
        self.flush()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def end(self) -> str:
        """Kills it where its node lives; how it ended."""
        import ray
        from ray.exceptions import RayError

        self._socket.close()
        try:
            status = ray.get(
                self._nodes.start_on(self._node, EnvironmentActor.end, self._number), timeout=END_SECONDS
            )
        except RayError as error:
            return f"its node does not answer ({type(error).__name__})"
        return f"{status}, its words are in environments-{self._node}.log"


class EnvironmentNodes(ActorGroup[EnvironmentActor]):
    """One actor on each node of the connected cluster that has slots, and a pool over all of them."""

    kind = "environments of node"

    def __init__(
        self,
        config: Config,
        clock: PhaseClock,
        *,
        strategies: Sequence[Any] | None = None,
        environment: Mapping[str, str],
        log_folder: str,
    ) -> None:
        """`strategies`: where each actor lives, as Ray's scheduling strategy; by default one on each node."""
        super().__init__(
            EnvironmentActor,
            config,
            clock,
            strategies=strategies or node_strategies(),
            slot_share=0.0,
            gpus=0.0,
            environment=environment,
            log_folder=log_folder,
        )
        self.addresses: list[tuple[str, int, bytes]] = []
        self.hosts = itertools.count()
        """Gives each host its number."""

    @contextlib.contextmanager
    def pool(self) -> Iterator[EnvironmentPool]:
        """The configured environments, once each node has made each; all of it ends with the block. ConfigError with the node's name
        where it cannot be made, or is another one than elsewhere."""
        section = self._config.agent
        assert section is not None, "only where responses are episodes"
        try:
            self.addresses = self.on_all(EnvironmentActor.address)
            places = {self.name(n): functools.partial(self._start, n) for n in self.numbers()}
            with EnvironmentPool.of(section, places) as pool:
                for environment in section.environments():
                    pool.describe(environment)
                yield pool
        finally:
            close_all([self], deadline_seconds=CLOSE_SECONDS)

    def _start(self, node: int, spec: EnvironmentSpec, deadlines: Deadlines) -> FarHost:
        if node in self.dead():
            raise WorkerLost(f"{self.name(node)} died")
        try:
            return FarHost(self, node, (spec, deadlines))
        except OSError as error:
            raise WorkerLost(f"{self.name(node)} takes no connection: {error}") from error
