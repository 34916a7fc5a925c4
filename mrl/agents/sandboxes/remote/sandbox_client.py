"""Sandboxes of other machines, which `mrl sandboxes` serves there.

A sandbox is one connection, made from here, and ends with it. Calls go through it one after the other. So do
the connections of its programs to the model (`tunnel.py`). An event loop in a thread keeps it alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from mrl.agents.environment import Model, SandboxLost
from mrl.agents.sandboxes.providers import (
    KEPT_FILES,
    KEPT_MIB,
    OUTPUT_BYTES,
    WORK,
    Exit,
    Sandbox,
    SandboxLimits,
    TooLarge,
)
from mrl.agents.sandboxes.remote.sandbox_messages import (
    CALL,
    DATA,
    MOST_BYTES,
    PATH,
    data_messages,
    is_loopback,
    json_message,
    list_files,
    quiet_logger,
    read_files,
    read_key,
    total_bytes,
)
from mrl.agents.sandboxes.remote.tunnel import Streams, Tunnel
from mrl.agents.sandboxes.work_files import WorkFile
from mrl.errors import ConfigError

_ERRORS: dict[str, type[Exception]] = {
    "ConfigError": ConfigError,
    "TooLarge": TooLarge,
    "ValueError": ValueError,
}
"""Errors that the server may name; any other one is a lost sandbox."""
_SILENT_SECONDS = 30.0
"""Half of the longest silence of a server: between pings, and until the answer to one."""
_FILES_SECONDS = 300.0
_CLOSE_SECONDS = 30.0
_WAITING = 8

_T = TypeVar("_T")


class RemoteSandboxes:
    """Provider of sandboxes on other machines. What an image is depends on the server's kind of sandboxes."""

    def __init__(
        self,
        url: str | Sequence[str],
        key_file: str | None = None,
        certificate: str | None = None,
        plain: bool = False,
    ) -> None:
        """Check the addresses, and read the key.

        Args:
            url: https://HOST:PORT of a server, or several, of which each sandbox chooses one by chance.
            key_file: File of mode 0600 with the server's key; None: the variable MRL_SANDBOX_KEY has it.
            certificate: The server's certificate, or its authority's; None: those that this machine trusts.
            plain: Also send the key and everything else over networks without TLS.

        Raises:
            ConfigError: Names the option, and what is wrong.
        """
        self._urls = [url] if isinstance(url, str) else list(url)
        if not self._urls:
            raise ConfigError("sandbox.options.url names no server")
        for one in self._urls:
            _require_address(one, plain)
        self._key = read_key(key_file)
        self._context = None
        if any(one.startswith("https:") for one in self._urls):
            try:
                self._context = ssl.create_default_context(cafile=certificate)
            except OSError as error:
                raise ConfigError(f"sandbox.options.certificate = {certificate!r}: {error}") from error

    def open(
        self,
        *,
        image: str | None,
        mounts: Mapping[str, str],
        limits: SandboxLimits,
        model: Model | None,
        folders: Sequence[str] = (),
    ) -> RemoteSandbox:
        """Open a sandbox. Raises SandboxLost, or ConfigError."""
        if mounts:
            raise ConfigError(
                "sandbox.mounts: folders of this machine are not there on others; mount folders of the "
                "server's machine by `mrl sandboxes --mount`, or copy them by agent.program.files"
            )
        # Not by `random`, which the samples of a prompt seed alike.
        url = secrets.choice(self._urls)
        return RemoteSandbox(url, self._key, self._context, image, limits, model, folders)


class RemoteSandbox(Sandbox):
    """An open sandbox (`providers.Sandbox`)."""

    def __init__(
        self,
        url: str,
        key: str,
        context: ssl.SSLContext | None,
        image: str | None,
        limits: SandboxLimits,
        model: Model | None,
        folders: Sequence[str],
    ) -> None:
        self._url, self._limits = url, limits
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mrl-remote-sandbox", daemon=True)
        self._thread.start()
        self._link: _Link | None = None
        try:
            deadline = time.monotonic() + limits.boot_seconds
            self._link = self._awaited(_opened(url, key, context, model, deadline), limits.boot_seconds)
            opening = {"call": "open", "image": image, "limits": dataclasses.asdict(limits)}
            opening |= {"model": model is not None, "folders": list(folders)}
            self._about, self._model = self._call(
                opening, deadline - time.monotonic(), lambda answer, _: _model_of(answer, model)
            )
        except BaseException:
            self.close()
            raise

    @property
    def model(self) -> Model | None:
        return self._model

    def describe(self) -> str:
        """Return one line for the log: the boundary, and the limits that apply."""
        return f"{self._url}: {self._about}"

    def close(self) -> None:
        """End all its processes and remove its files."""
        if self._loop.is_closed():
            return
        if self._link is not None:
            with contextlib.suppress(SandboxLost):
                self._awaited(self._link.close(), _CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, command: Sequence[str], *, seconds: float, env: Mapping[str, str] | None = None) -> Exit:
        """Run a command in WORK to its end, and end all processes that it leaves."""
        call = {"call": "run", "command": list(command), "seconds": seconds, "env": dict(env or {})}
        longest = seconds + self._limits.boot_seconds + _CLOSE_SECONDS
        return self._call(call, longest, lambda answer, _: _exit_of(answer["exit"]))

    def write(self, files: Mapping[str, WorkFile], folder: str = WORK) -> None:
        """Write files by their paths below a folder; replace what is there. Raises TooLarge."""
        listed = list_files(files)
        if total_bytes(listed) > self._limits.disk_mib << 20:
            raise TooLarge(f"{len(files)} files do not fit into the disk of {self._limits.disk_mib} MiB")
        call = {"call": "write", "folder": folder, "files": listed}
        self._call(call, _FILES_SECONDS, lambda *_: None, files)

    def read(self, patterns: Sequence[str], folder: str = WORK) -> dict[str, WorkFile]:
        """Return the matching regular files below a folder. Raises TooLarge."""
        call = {"call": "read", "folder": folder, "patterns": list(patterns)}
        return self._call(call, _FILES_SECONDS, _regular_files)

    def _call(
        self,
        call: Mapping[str, Any],
        seconds: float,
        read: Callable[[dict[str, Any], bytes], _T],
        files: Mapping[str, WorkFile] | None = None,
    ) -> _T:
        """Send a call and files; return what `read` makes of the answer and the bytes of the files in it."""
        link = self._link
        assert link is not None

        async def answered() -> tuple[str | None, Any]:
            answer, data = await link.call(call, files or {})
            if (name := answer.get("error")) is not None:
                return str(name), answer.get("reason")
            return None, read(answer, data)

        error, result = self._awaited(answered(), seconds)
        if error is not None:
            raise _ERRORS.get(error, SandboxLost)(f"{self._url}: {result}")
        return result

    def _awaited(self, work: Coroutine[Any, Any, _T], seconds: float) -> _T:
        """Wait for work of the event loop. Raise SandboxLost if it fails, or takes longer."""

        async def within() -> _T:
            async with asyncio.timeout(max(0.0, seconds)):
                return await work

        try:
            return asyncio.run_coroutine_threadsafe(within(), self._loop).result()
        except TimeoutError as error:
            raise SandboxLost(f"{self._url} did not answer within {seconds:.0f} s") from error
        except ConfigError:  # a ValueError, too
            raise
        except (
            OSError,
            EOFError,
            WebSocketException,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:
            raise SandboxLost(f"{self._url}: {type(error).__name__}: {error}") from error


class _Link:
    """Connection of a sandbox. Its methods belong to the event loop."""

    def __init__(self, connection: ClientConnection, model: Model | None) -> None:
        self._connection = connection
        self._answers: asyncio.Queue[bytes] = asyncio.Queue(_WAITING)
        self._tunnel = Tunnel(connection.send, None if model is None else lambda: _gateway(model))
        self._receiving = asyncio.ensure_future(self._receive())

    async def call(
        self, call: Mapping[str, Any], files: Mapping[str, WorkFile]
    ) -> tuple[dict[str, Any], bytes]:
        """Send a call and files; return its answer, and the bytes of the files that it lists."""
        await self._connection.send(json_message(call))
        for message in data_messages(files):
            await self._connection.send(message)
        answer = json.loads((await self._next(CALL))[1:])
        listed = answer.get("files", [])
        if len(listed) > KEPT_FILES or any(size < 0 for *_, size in listed):
            raise ValueError("an answer with too many files")
        left, parts = total_bytes(listed), list[bytes]()
        if left > KEPT_MIB << 20:
            raise ValueError("an answer with too large files")
        while left > 0:
            parts.append((await self._next(DATA))[1:])
            left -= len(parts[-1])
        return answer, b"".join(parts)

    async def close(self) -> None:
        """Close the connection: the server ends the sandbox then."""
        await self._tunnel.close()
        await self._connection.close()
        await asyncio.gather(self._receiving, return_exceptions=True)

    async def _next(self, kind: bytes) -> bytes:
        """Return the next message of an answer. Raise the connection's error if there will be none."""
        get = asyncio.ensure_future(self._answers.get())
        try:
            await asyncio.wait([get, self._receiving], return_when=asyncio.FIRST_COMPLETED)
            if not get.done():
                await self._receiving
                raise ConnectionResetError("the server ended the connection")
            if not get.result().startswith(kind):
                raise ValueError(f"a message of kind {get.result()[:1]!r}, which was not expected")
            return get.result()
        finally:
            get.cancel()

    async def _receive(self) -> None:
        while True:
            message = await self._connection.recv(decode=False)
            if message[:1] in (CALL, DATA):
                await self._answers.put(message)
            else:
                await self._tunnel.take(message)


def _model_of(answer: Mapping[str, Any], model: Model | None) -> tuple[str, Model | None]:
    """Return an open sandbox's description, and its model."""
    inside = None if model is None else Model(str(answer["url"]), model.key, model.name)
    return str(answer["about"]), inside


def _exit_of(end: Mapping[str, Any]) -> Exit:
    return Exit(
        int(end["status"]),
        float(end["seconds"]),
        str(end["output"])[-OUTPUT_BYTES:],
        timed_out=bool(end["timed_out"]),
        out_of_memory=bool(end["out_of_memory"]),
    )


def _regular_files(answer: Mapping[str, Any], data: bytes) -> dict[str, WorkFile]:
    files = read_files(answer["files"], data)
    if any(file.kind != "file" for file in files.values()):
        raise ValueError("an answer with files that are not regular")
    return files


async def _opened(
    url: str, key: str, context: ssl.SSLContext | None, model: Model | None, deadline: float
) -> _Link:
    """Connect to a server. Raises ConfigError if it refuses the key."""
    parts = urllib.parse.urlsplit(url)
    is_secure = parts.scheme == "https"
    where = (parts.hostname or "", parts.port or (443 if is_secure else 80))
    seconds = max(0.1, deadline - time.monotonic())
    endpoint = socket.create_connection(where, timeout=seconds)  # the loop has nothing else to do yet
    endpoint.setblocking(False)
    try:
        # Over a socket of our own no redirect can be followed.
        connection = await connect(
            f"{'wss' if is_secure else 'ws'}://{parts.netloc}{PATH}",
            sock=endpoint,
            proxy=None,
            additional_headers={"Authorization": f"Bearer {key}"},
            compression=None,
            open_timeout=seconds,
            ping_interval=_SILENT_SECONDS,
            ping_timeout=_SILENT_SECONDS,
            close_timeout=_CLOSE_SECONDS / 2,
            max_size=MOST_BYTES,
            logger=quiet_logger(),
            ssl=context if is_secure else None,
        )
    except InvalidStatus as error:
        if error.response.status_code == 401:
            raise ConfigError(f"{url} refuses the key; copy the server's key file") from error
        raise
    return _Link(connection, model)


async def _gateway(model: Model) -> Streams:
    """Connect to the model's server, on this machine."""
    address = urllib.parse.urlsplit(model.url)
    return await asyncio.open_connection(address.hostname, address.port)


def _require_address(url: str, plain: bool) -> None:
    """Raise ConfigError if an address is malformed, or would carry the key in the clear."""
    parts = urllib.parse.urlsplit(url)
    named = f"sandbox.options.url = {url!r}"
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
        raise ConfigError(f"{named} must look like https://HOST:PORT")
    if parts.username or parts.password:
        raise ConfigError("sandbox.options.url has a password; put the server's key into key_file")
    if parts.scheme == "http" and not plain and not is_loopback(parts.hostname):
        raise ConfigError(
            f"{named} would send the key over a network without TLS; use https, or an SSH tunnel and its "
            "address on this machine, or set sandbox.options.plain=true in a network that you trust"
        )
