"""Environments on every node: an actor on each starts hosts, which the driver's pool reaches by a socket as it reaches its own by pipes.

An actor does nothing but start processes and end them; what a host is asked, and what it answers, passes it by. A node on which no host
can be started any more gets no more episodes; those that it had are answered as lost when their host is.

A connection begins with a proof that it knows the actor's secret, which Ray carries: the secret itself never crosses, and a proof
serves one host. What follows is JSON in clear.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import itertools
import os
import secrets
import select
import socket
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mrl.agents.environment_limits import Deadlines
from mrl.agents.environment_registry import EnvironmentSpec
from mrl.agents.host_messages import opening_message
from mrl.agents.pool import EnvironmentPool
from mrl.config.root import Config
from mrl.errors import WorkerLost
from mrl.launch.workers.actor_group import ActorGroup, close_all
from mrl.launch.workers.placement import node_strategies
from mrl.observe.phases import PhaseClock
from mrl.processes.channel import Line
from mrl.processes.start import child_environment, kill_session, module_words

CONNECT_SECONDS = 10.0
"""For a node that lives to take a connection, and for a host's to be found among those that came."""
MOST_UNPROVED = 64
"""Connections that are listened to at once and have proved nothing; the oldest are closed."""
END_SECONDS = 5.0
"""For a node that lives to end a process."""
CLOSE_SECONDS = 30.0
_NUMBER = struct.Struct("<Q")
_PROOF_BYTES = _NUMBER.size + hashlib.sha256().digest_size


class EnvironmentActor:
    """The hosts of one node."""

    def __init__(self, config: Config, number: int, log_folder: str) -> None:
        import ray

        from mrl.launch.workers.actor_log import redirect

        redirect(log_folder, f"environments-{number}")
        self._listener = socket.create_server((ray.util.get_node_ip_address(), 0))
        self._secret = secrets.token_bytes(32)
        self._door = Door(self._listener, self._secret)
        self._hosts: dict[int, subprocess.Popen[bytes]] = {}

    def address(self) -> tuple[str, int, bytes]:
        """Where the driver connects, and the secret that it proves to know."""
        host, port = self._listener.getsockname()
        return host, port, self._secret

    def start(self, number: int) -> None:
        """Starts the host of a number on the connection that proves to be for it. It dies with this process."""
        with self._door.connection(number, CONNECT_SECONDS) as connection:
            connection.setblocking(True)
            self._hosts[number] = subprocess.Popen(
                module_words("mrl.agents.host", str(os.getpid())),
                stdin=connection.fileno(),
                stdout=connection.fileno(),
                env=child_environment(),
                start_new_session=True,
            )

    def end(self, number: int) -> str:
        """Kills a host and its session; how it ended."""
        if (process := self._hosts.pop(number, None)) is None:
            return "it was not started"
        kill_session(process.pid)
        return f"status {process.wait()}"

    def close(self) -> None:
        for number in [*self._hosts]:
            self.end(number)


def proof(secret: bytes, number: int) -> bytes:
    """Return what the connection of a host begins with: its number, and what only one who knows the secret can say of it."""
    said = _NUMBER.pack(number)
    return said + hmac.digest(secret, said, "sha256")


class Door:
    """A listener's connections, by the number of the host that each has proved to be for. Those that say something else, or nothing,
    hold nobody up. Numbers grow; a proof is taken once."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        listener.setblocking(False)
        self._listener, self._secret, self._last = listener, secret, -1
        self._said: dict[socket.socket, bytes] = {}
        """By connections that have proved nothing yet, the oldest first."""
        self._proved: dict[int, socket.socket] = {}

    def connection(self, number: int, seconds: float) -> socket.socket:
        """Return that of a host. TimeoutError if it does not come in time."""
        deadline = time.monotonic() + seconds
        while number not in self._proved:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError(f"no connection proved in {seconds:g} s to be for host {number}")
            for ready in select.select([self._listener, *self._said], [], [], left)[0]:
                if ready is self._listener:
                    self._accept()
                elif ready in self._said:  # it was not closed as the oldest meanwhile
                    self._hear(ready)
        self._last = number
        return self._proved.pop(number)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # whoever it was has left
            return
        connection.setblocking(False)
        self._said[connection] = b""
        if len(self._said) > MOST_UNPROVED:
            oldest = next(iter(self._said))
            del self._said[oldest]
            oldest.close()

    def _hear(self, connection: socket.socket) -> None:
        """Reads no more than a proof: what follows is for the host."""
        said = self._said.pop(connection)
        try:
            said += (data := connection.recv(_PROOF_BYTES - len(said)))
            if data and len(said) < _PROOF_BYTES:
                self._said[connection] = said
                return
            (number,) = _NUMBER.unpack_from(said)
            is_new = number > self._last and number not in self._proved
            if is_new and hmac.compare_digest(said, proof(self._secret, number)):
                self._proved[number] = connection
                return
        except (OSError, struct.error):
            pass
        connection.close()


class FarHost(Line):
    """A host of another node, as the pool has its own; what it writes to standard error is in its node's log."""

    def __init__(self, nodes: EnvironmentNodes, node: int, opening: bytes) -> None:
        """`opening` is the first message that it gets. OSError where the node takes no connection."""
        self._nodes, self._node, self._number = nodes, node, next(nodes.hosts)
        host, port, secret = nodes.addresses[node]
        self._socket = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(proof(secret, self._number))
        nodes.start_on(node, EnvironmentActor.start, self._number)
        super().__init__(self._socket.fileno(), self._socket.fileno())
        self.send_bytes(opening)

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
            return FarHost(self, node, opening_message(spec, deadlines))
        except OSError as error:
            raise WorkerLost(f"{self.name(node)} takes no connection: {error}") from error
