"""Join an existing Ray cluster, or start one on this machine and stop it at the end.

A Ray that this code did not start is never stopped. A self-started cluster keeps its files in its own folder,
which a small watcher process removes even if the driver is killed. Only the user can read that folder, the
cluster listens on the loopback interface, and its secret is new.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from mrl.config.sections.launch import LaunchSection
from mrl.errors import ConfigError, WorkerLost
from mrl.files import folder_for_sockets
from mrl.launch.cluster import session_watcher
from mrl.processes.start import wait_or_kill

log = logging.getLogger(__name__)

SLOT = "slot"
"""Ray resource of one slot: one GPU, or on CPU a trainer rank with its share of an engine."""

UNUSED_SERVICES = ("start_monitor", "start_log_monitor", "start_api_server")
"""Methods of Ray's node that start the autoscaler, the log monitor, and the dashboard server."""

NO_TASK_EVENTS: dict[str, int] = {"task_events_report_interval_ms": 0}
"""Disables Ray's unused record of the last 100,000 calls: 350 MB of the head after 3,000 small steps."""
LOOPBACK = "127.0.0.1"
TOKEN = "RAY_AUTH_TOKEN"
"""Variable with the secret of a Ray cluster."""
RAY_FOLDER = "r"
"""Ray's part of a session's folder, which Ray opens to all users; the folder above keeps others out."""
HEAD_SECONDS = 5.0
"""Timeout for a response of the head of a Ray to join."""
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""Preface of a gRPC client with empty settings; a server responds with its settings (a frame of type 4)."""
OWN_RAY = ("gcs_server", "raylet")
"""Ray's process on the head, and its process on every node."""
SHARED_MEMORY = Path("/dev/shm")
LEAST_STORE_BYTES = 80 << 20
"""Ray rejects a smaller object store."""
WATCHER = Path(session_watcher.__file__)
AGENT = Path(__file__).with_name("plain_agent.py")


@contextlib.contextmanager
def cluster(launch: LaunchSection, *, num_slots: int) -> Iterator[OwnRay]:
    """Connect to a Ray with at least `num_slots` slots; processes started here are stopped afterwards."""
    from unittest.mock import patch

    from ray._private import worker

    def say(data: Mapping[str, Any], **options: Any) -> None:
        log.debug("%s", data["lines"])

    # Ray's messages about deaths may arrive as late as its shutdown; deaths.py explains each in one line.
    with patch.object(worker, "print_to_stdstream", say), _connected(launch, num_slots) as ray:
        yield ray


@contextlib.contextmanager
def _connected(launch: LaunchSection, num_slots: int) -> Iterator[OwnRay]:
    import ray

    address = address_of(launch)
    if address:
        with _own_signals():
            join(address)
        try:
            _check_slots(num_slots, address)
            yield OwnRay()
        finally:
            ray.shutdown()
        return
    _check_gpus(num_slots)
    # With Ray's default niceness of 15, training starves behind every ordinary process of the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    with session_folder() as folder, _own_token():
        with (
            _own_signals(),
            _start_named(),
            _few_services(),
            _alone(),
            _long_wait(launch.start_deadline_seconds),
        ):
            ray.init(
                address="local",
                num_cpus=num_slots,
                num_gpus=own_gpus(),
                resources={SLOT: float(launch.slots_per_node or num_slots)},
                object_store_memory=store_bytes(launch.object_store_bytes),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env=python_of_workers(),
                _temp_dir=str(folder / RAY_FOLDER),
                _node_ip_address=LOOPBACK,
                # Do not prestart workers that are never used.
                _system_config={"prestart_worker_first_driver": False, **NO_TASK_EVENTS},
            )
        try:
            _check_slots(num_slots, "started here")
            yield OwnRay()
        finally:
            ray.shutdown()


def python_of_workers() -> dict[str, str] | None:
    """Return a Ray runtime environment with this Python's quoted path, which Ray passes to a shell unquoted;
    None if it needs no quotes."""
    quoted = shlex.quote(sys.executable)
    return None if quoted == sys.executable else {"py_executable": quoted}


def join(address: str, *, head_seconds: float = 0.0) -> None:
    """Connect to the Ray with this head address.

    Args:
        head_seconds: How long the head may take to start; 0 if it must be up.

    Raises:
        ConfigError: No head responds, seconds after `head_seconds` (Ray itself retries for 150 s).
    """
    import ray

    try:
        if ":" in address:
            _await_head(address, head_seconds)
        ray.init(
            address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=python_of_workers()
        )
    except (OSError, ValueError) as error:
        refused = "AuthenticationError" in str(error.__cause__)  # Ray's traceback as text
        reason = f"it rejects the token of this process ({TOKEN}, RAY_AUTH_MODE=token)" if refused else error
        raise ConfigError(
            f"cannot join Ray at {address} (launch.ray_address or RAY_ADDRESS): {reason}; start its head "
            "(docs/running.md), correct the address, or remove it to start a Ray on this machine"
        ) from error


def _await_head(address: str, seconds: float) -> None:
    """Wait until the head responds; raise `_ask_head`'s error after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return _ask_head(address)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _ask_head(address: str) -> None:
    """Raise OSError if no gRPC server responds at HOST:PORT, ValueError if the port is not a number."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=HEAD_SECONDS) as head:
        head.sendall(HTTP2)
        if head.recv(9)[3:4] != b"\x04":
            raise ConnectionError("the server at this address is not Ray's head")


def store_bytes(setting: int | None) -> int:
    """Return launch.object_store_bytes for this machine; by default it fits /dev/shm, else Ray uses files."""
    if setting is not None:
        return setting
    tenth = psutil.virtual_memory().total // 10
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else tenth
    return max(LEAST_STORE_BYTES, min(tenth, free // 2))


def address_of(launch: LaunchSection) -> str | None:
    """Return the address of the Ray cluster to join; None to start one on this machine."""
    return launch.ray_address or os.environ.get("RAY_ADDRESS") or None


def own_gpus() -> int:
    """Return the number of this machine's GPUs."""
    import torch

    return torch.cuda.device_count()


def has_gpus() -> bool:
    """Return True if the connected cluster has GPUs."""
    import ray

    return ray.cluster_resources().get("GPU", 0) > 0


@contextlib.contextmanager
def _start_named() -> Iterator[None]:
    """Turn Ray's bare Exception for processes that do not start into WorkerLost."""
    try:
        yield
    except Exception as error:
        raise WorkerLost(
            f"Ray did not start on this machine: {str(error).strip()} Usually other programs use up its CPU, "
            "memory or disk: wait for them, or join a running Ray (launch.ray_address)"
        ) from error


@contextlib.contextmanager
def _few_services() -> Iterator[None]:
    """Keep Ray from starting services that a run on one machine does not use; Ray has no settings for them.

    Each costs a second of CPU and a part of every step; `ray.init` even waits for the dashboard server. Each
    node's agent starts as if the dashboard's packages were missing (plain_agent.py).
    """
    from unittest.mock import patch

    from ray._private import ray_constants, services, utils
    from ray._private.node import Node

    python = services._build_python_executable_command_memory_profileable

    def command(component: str, session_dir: str, unbuffered: bool = True) -> list[str]:
        is_agent = component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT
        return [*python(component, session_dir, unbuffered), *([str(AGENT)] if is_agent else [])]

    missing = ImportError("the dashboard is not used")
    with contextlib.ExitStack() as changed:
        for name in UNUSED_SERVICES:
            changed.enter_context(patch.object(Node, name, lambda node, **settings: None))
        changed.enter_context(patch.object(services, python.__name__, command))
        changed.enter_context(patch.object(utils, "get_dashboard_dependency_error", lambda: missing))
        yield


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Make Ray start its processes in their own sessions and on the loopback interface.

    A signal to the driver's process group (a terminal, `timeout`, a batch system) is for the driver, which
    needs Ray to finish its step. By default Ray replaces a loopback address with one of the network.
    """
    from unittest.mock import patch

    from ray._private import services

    with (
        patch.object(
            services, "ConsolePopen", functools.partial(services.ConsolePopen, start_new_session=True)
        ),
        patch.object(services, "resolve_ip_for_localhost", lambda host: host),
    ):
        yield


@contextlib.contextmanager
def _own_token() -> Iterator[None]:
    """Create a token for the Ray started inside. Ray's default token is shared by all runs, in a file of the
    user's home that others may be able to read."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined] compiled

    before = {name: os.environ.get(name) for name in token_environment("")}
    os.environ.update(token_environment(secrets.token_hex(32)))
    Config.initialize("")  # make this process read both variables again
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


def token_environment(token: str) -> dict[str, str]:
    """Return the variables with which Ray's processes and drivers present the token."""
    return {"RAY_AUTH_MODE": "token", TOKEN: token}


@contextlib.contextmanager
def _long_wait(seconds: float) -> Iterator[None]:
    """Wait for Ray's node while its process lives, at most `seconds`; Ray's fixed 30 s are often too
    short."""
    from unittest.mock import patch

    from ray._private import services

    with patch.object(services, "get_node", with_retries(services.get_node, seconds, _has_raylet)):
        yield


def _has_raylet() -> bool:
    return any(child.name() == "raylet" and lives(child) for child in psutil.Process().children())


def with_retries[**P, R](ask: Callable[P, R], seconds: float, lives: Callable[[], bool]) -> Callable[P, R]:
    """Return `ask` with retries: repeat it on RuntimeError while `lives()`, at most for `seconds`."""

    def with_retries(*arguments: P.args, **named: P.kwargs) -> R:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return ask(*arguments, **named)
            except RuntimeError:
                if time.monotonic() > deadline or not lives():
                    raise
            time.sleep(0.1)

    return with_retries


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the SIGTERM handler, which Ray replaces with one that exits at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def _check_gpus(num_slots: int) -> None:
    """Raise ConfigError if this machine has too few GPUs: Ray would wait for them forever."""
    if 0 < own_gpus() < num_slots:
        raise ConfigError(
            f"the layout needs {num_slots} GPUs and this machine has {own_gpus()}; start on a cluster "
            "(sbatch, torchrun or RAY_ADDRESS), choose a smaller layout, or hide the GPUs "
            "(CUDA_VISIBLE_DEVICES=) for a run on CPU"
        )


def _check_slots(num_slots: int, where: str) -> None:
    import ray

    present = int(ray.cluster_resources().get(SLOT, 0))
    if present < num_slots:
        raise ConfigError(
            f"the Ray cluster ({where}) has {present} slots, the layout needs {num_slots}; "
            f"start its nodes with --resources '{{\"{SLOT}\": N}}' or choose a smaller layout"
        )


@contextlib.contextmanager
def session_folder() -> Iterator[Path]:
    """Create a private session folder with its watcher; MRL_SESSION is its path and marks its processes."""
    folder = Path(tempfile.mkdtemp(prefix="mrl-", dir=folder_for_sockets()))
    os.environ["MRL_SESSION"] = str(folder)
    watcher = Watcher(folder)
    try:
        yield folder
    finally:
        os.environ.pop("MRL_SESSION", None)
        watcher.close()
        shutil.rmtree(folder, ignore_errors=True)


class Watcher:
    """Process that cleans up after this one (session_watcher.py); restarted if it dies."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._over = folder, threading.Event()
        self._process = self._started()
        self._keeper = threading.Thread(target=self._keep, name="watcher", daemon=True)
        self._keeper.start()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-SP", str(WATCHER), str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", "")},
        )

    def _keep(self) -> None:
        while not self._over.wait(1.0):
            if self._process.poll() is not None:
                with contextlib.suppress(OSError):  # out of processes or memory: retried a second later
                    self._process = self._started()

    def close(self) -> None:
        """Announce that this process ends by itself, and wait until the session is cleaned up."""
        self._over.set()
        self._keeper.join()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(session_watcher.CLOSES.encode())
        wait_or_kill(self._process, session_watcher.LONGEST_SECONDS + 5)


class OwnRay:
    """Ray's processes that this process started, if any. If one dies, Ray ends the run within a minute."""

    def __init__(self) -> None:
        self._processes = {
            child.name(): child for child in psutil.Process().children() if child.name() in OWN_RAY
        }
        self._looked = 0.0

    def require(self, phase: str) -> None:
        """Raise WorkerLost if one has ended; checks at most once per second."""
        now = time.monotonic()
        if now - self._looked < 1.0:
            return
        self._looked = now
        if gone := self.gone():
            raise WorkerLost(f"Ray's {' and '.join(gone)} of this node died in phase {phase}")

    def gone(self) -> list[str]:
        """Return the names of those that have ended."""
        return [name for name, process in self._processes.items() if not lives(process)]


def lives(process: psutil.Process) -> bool:
    """Return True if a process runs and is not a zombie."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
