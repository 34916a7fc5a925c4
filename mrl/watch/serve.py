"""A socket of this machine, and the server on it."""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from mrl.errors import ConfigError
from mrl.watch.app import make_app


def serve(folders: Sequence[Path], *, host: str, port: int) -> None:
    """Answers until it is interrupted. ConfigError where the port cannot be had, DataError where there is no run."""
    with listen(host, port) as listening:
        at = listening.getsockname()[1]
        token = secrets.token_urlsafe(24)
        app = make_app(folders, token=token, cookie=f"mrl_watch_{at}")
        print(f"http://{host}:{at}/?token={token}", flush=True)
        print(_how_to_reach(host, at), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server(app).run(sockets=[listening])


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any that is free."""
    try:
        return socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{host}:{port} cannot be listened on ({error}); --port 0 takes a free one"
        ) from None


def server(app):
    """Uvicorn for an application, quiet."""
    import uvicorn

    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", ws="none", server_header=False
    )
    return uvicorn.Server(settings)


def _how_to_reach(host: str, port: int) -> str:
    try:
        is_own = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_own = False
    if is_own:
        return f"from another machine: ssh -L {port}:{host}:{port} {socket.gethostname()}; Ctrl-C ends it"
    return "other machines can reach this, and nothing is encrypted: who reads the traffic has the token; Ctrl-C ends it"
