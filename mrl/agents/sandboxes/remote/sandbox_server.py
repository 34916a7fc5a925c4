"""Server of this machine's sandboxes for runs on other machines: `mrl sandboxes`.

| waits for | unblocked by |
|---|---|
| a connection, which is one sandbox | clients with the key |
| a place, and a slot to boot | the end of another sandbox, the end of its boot |
| messages of a client, and of the sandbox's process | both; a client that is silent for the lease is gone |
| connections of a sandbox to its model | its programs; they pass to the client (`tunnel.py`) |

A sandbox's process dies with this one, and the sandbox with its process (bubblewrap.py, containers.py), so
nothing remains to be swept if this process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import http
import json
import os
import signal
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.protocol import State

from mrl.agents.sandboxes.remote.sandbox_messages import (
    CALL,
    DATA,
    KEY_VARIABLE,
    MOST_BYTES,
    PATH,
    is_loopback,
    quiet_logger,
)
from mrl.agents.sandboxes.remote.sandbox_session import SandboxRules
from mrl.agents.sandboxes.remote.tunnel import Tunnel
from mrl.errors import ConfigError
from mrl.processes.framing import frame, read_frame_async
from mrl.processes.start import child_environment, module_command
from mrl.rewards.code import cgroup

_END_SECONDS = 15.0
"""Time for a sandbox's process to close it."""
_CLOSE_SECONDS = 5.0
"""Time for a client to agree to the end of its connection."""
_PIPE_BYTES = 256 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class ServerOptions:
    """Arguments of `mrl sandboxes`."""

    host: str
    port: int
    key: str
    rules: SandboxRules
    certificate: str | None = None
    private_key: str | None = None
    plain: bool = False
    """Listen on networks without TLS."""
    sandboxes: int = 32
    boots: int = 8
    lease_seconds: float = 60.0

    def context(self) -> ssl.SSLContext | None:
        """Return the certificate for connections. Raise ConfigError if it cannot be read, or is missing."""
        if self.certificate is None:
            if not self.plain and not is_loopback(self.host):
                raise ConfigError(
                    f"--listen {self.host} without TLS would show the key to the network; give a "
                    "--certificate, or listen on 127.0.0.1 and use an SSH tunnel, or add --plain if you "
                    "trust the network"
                )
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.private_key)
        except OSError as error:
            raise ConfigError(f"--certificate {self.certificate}: {error}") from error
        return context


def serve_sandboxes(options: ServerOptions) -> None:
    """Serve until SIGINT or SIGTERM; then end all sandboxes."""
    cgroup.remove_empty_cgroups()  # of a server that was killed
    context = options.context()
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listener = socket.create_server((options.host, options.port), family=family)
    except OSError as error:
        raise ConfigError(f"--listen {options.host}:{options.port}: {error.strerror or error}") from error
    with listener:
        asyncio.run(_Server(options).serve(listener, context))


class _Server:
    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._places = asyncio.Semaphore(options.sandboxes)
        self._boots = asyncio.Semaphore(options.boots)
        self._environment = {k: v for k, v in child_environment().items() if k != KEY_VARIABLE}

    async def serve(self, listener: socket.socket, context: ssl.SSLContext | None) -> None:
        """Serve until SIGINT or SIGTERM."""
        options, stop = self._options, asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with serve(
            self._handle,
            sock=listener,
            ssl=context,
            process_request=self._refusal,
            compression=None,
            ping_interval=options.lease_seconds / 2,
            ping_timeout=options.lease_seconds / 2,
            close_timeout=_CLOSE_SECONDS,
            max_size=MOST_BYTES,
            max_queue=4,
            server_header=None,
            logger=quiet_logger(),
        ):
            port = listener.getsockname()[1]
            scheme = "http" if context is None else "https"
            host = f"[{options.host}]" if ":" in options.host else options.host
            print(f"serving {options.rules.kind} sandboxes at {scheme}://{host}:{port}", flush=True)
            await stop.wait()

    def _refusal(self, connection: ServerConnection, request: Request) -> Response | None:
        """Return the answer to a request without the key; None if it has the key."""
        given = request.headers.get_all("Authorization")
        if len(given) != 1 or not hmac.compare_digest(
            given[0].encode("utf-8", "surrogateescape"), f"Bearer {self._options.key}".encode()
        ):
            return connection.respond(http.HTTPStatus.UNAUTHORIZED, "the key is missing or incorrect\n")
        if request.path != PATH:
            return connection.respond(http.HTTPStatus.NOT_FOUND, f"there is only {PATH}\n")
        return None

    async def _handle(self, connection: ServerConnection) -> None:
        async with self._places:
            if connection.state is not State.OPEN:
                return  # the client did not wait so long
            try:
                opening = await connection.recv(decode=False)
                with tempfile.TemporaryDirectory(prefix="mrl-sandbox-") as folder:
                    await self._session(connection, opening, f"{folder}/door")
            except ConnectionClosed:
                return

    async def _session(self, connection: ServerConnection, opening: bytes, door: str) -> None:
        """Serve one sandbox, as long as its client and its process are there."""
        rules = dataclasses.asdict(self._options.rules) | {"door": door}
        tunnel = Tunnel(connection.send)
        async with await asyncio.start_unix_server(tunnel.accept, door):
            try:
                async with _process(self._environment) as process:
                    async with self._boots:
                        await _send(process, json.dumps(rules).encode())
                        await _send(process, opening)
                        first = await read_frame_async(_stdout(process))
                    if first is not None:
                        await connection.send(first)
                        await _first_of(_calls(connection, process, tunnel), _answers(process, connection))
                    await connection.close(1011, "the sandbox's process ended")
            except ValueError as error:  # of a message
                await connection.close(1008, str(error)[:100])
            finally:
                await tunnel.close()


async def _calls(connection: ServerConnection, process: asyncio.subprocess.Process, tunnel: Tunnel) -> None:
    """Pass a client's messages on, until it closes the connection."""
    while True:
        message = await connection.recv(decode=False)
        if message[:1] in (CALL, DATA):
            await _send(process, message)
        else:
            await tunnel.take(message)


async def _answers(process: asyncio.subprocess.Process, connection: ServerConnection) -> None:
    """Pass a process's messages on, until it ends."""
    while (message := await read_frame_async(_stdout(process))) is not None:
        await connection.send(message)


async def _first_of(*works: Awaitable[None]) -> None:
    """Wait until one ends, and cancel the others. Raises its error."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def _process(environment: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a sandbox's process; at the end it closes the sandbox, or is killed."""
    process = await asyncio.create_subprocess_exec(
        *module_command("mrl.agents.sandboxes.remote.sandbox_session", str(os.getpid())),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
        start_new_session=True,
        limit=_PIPE_BYTES,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(_END_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        cgroup.kill_owned_by(process.pid)


async def _send(process: asyncio.subprocess.Process, message: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # `_answers` sees its end
        process.stdin.write(frame(message))
        await process.stdin.drain()


def _stdout(process: asyncio.subprocess.Process) -> asyncio.StreamReader:
    assert process.stdout is not None
    return process.stdout
