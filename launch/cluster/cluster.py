"""The Ray cluster of a run: an existing one is joined, else one is started on this machine and stopped at the
end.

Nothing here ever stops a Ray that we did not start. Ray's files of a self-started cluster lie in a folder of
their own that a small watcher process removes also when the driver is killed. That folder is the user's
alone, such a cluster listens on the loopback interface, and its secret is drawn anew.
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
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from mrl.config.sections.launch import LaunchSection
from mrl.errors import ConfigError, WorkerLost
from mrl.files import folder_for_sockets
from mrl.launch.cluster import session_watcher
from mrl.processes.start import wait_or_kill

SLOT = "slot"
"""Ray resource of one slot: one GPU, or on CPU a trainer rank together with its share of an engine."""

UNUSED_SERVICES = ("start_monitor", "start_log_monitor", "start_api_server")
"""Methods of Ray's node that start the autoscaler, the reader of all logs, and the dashboard's server."""

NO_TASK_EVENTS: dict[str, int] = {"task_events_report_interval_ms": 0}
"""Ray keeps what became of the last 100,000 calls for a state API that nobody here asks: 350 MB of its head after 3,000 small steps."""
LOOPBACK = "127.0.0.1"
TOKEN = "RAY_AUTH_TOKEN"
"""The variable that has the secret of a Ray cluster."""
RAY_FOLDER = "r"
"""Ray's part of a session's folder, which it opens to all users (mode 0777) and which nobody else gets to
through the folder above it."""
HEAD_SECONDS = 5.0
"""For an answer of the head of a Ray that is joined."""
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of gRPC begins with, and no settings; a server answers with its own (a frame of type 4)."""
OWN_RAY = ("gcs_server", "raylet")
"""What Ray has on every node, and on its head."""
SHARED_MEMORY = Path("/dev/shm")
LEAST_STORE_BYTES = 80 << 20
"""Ray refuses a smaller object store."""
WATCHER = Path(session_watcher.__file__)
AGENT = Path(__file__).with_name("plain_agent.py")


@contextlib.contextmanager
def cluster(launch: LaunchSection, *, num_slots: int) -> Iterator[OwnRay]:
    """A connected Ray with at least `num_slots` slots; what was started here is gone afterwards."""
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
    # Ray's default of 15 starves training behind every ordinary process of the machine.
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
                # None are started that nobody here would use.
                _system_config={"prestart_worker_first_driver": False, **NO_TASK_EVENTS},
            )
        try:
            _check_slots(num_slots, "started here")
            yield OwnRay()
        finally:
            ray.shutdown()


def python_of_workers() -> dict[str, str] | None:
    """Return the runtime environment of a job whose workers are started by this Python. Ray gives a shell their Python's path without
    quotes, so that none starts under a path with a space; None where there is nothing to quote, and each node takes its own."""
    quoted = shlex.quote(sys.executable)
    return None if quoted == sys.executable else {"py_executable": quoted}


def join(address: str, *, head_seconds: float = 0.0) -> None:
    """Connect to the Ray whose head has the address.

    Args:
        head_seconds: how long the head may take to start; 0 if it has to be up.

    Raises:
        ConfigError: within seconds after that, if none answers. Ray asks for 150 s, in lines of its own.
    """
    import ray

    try:
        if ":" in address:
            _await_head(address, head_seconds)
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env=python_of_workers(),
        )
    except (OSError, ValueError) as error:
        refused = "AuthenticationError" in str(error.__cause__)  # Ray's traceback as text
        reason = f"it refuses the token of this process ({TOKEN}, RAY_AUTH_MODE=token)" if refused else error
        raise ConfigError(
            f"cannot join Ray at {address} (launch.ray_address or RAY_ADDRESS): {reason}; start its head "
            "(docs/running.md), correct the address, or remove it: the run then starts a Ray of its own here"
        ) from error


def _await_head(address: str, seconds: float) -> None:
    """Raise what `_ask_head` does if no head answers within the seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return _ask_head(address)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _ask_head(address: str) -> None:
    """Raise OSError if no gRPC server answers at HOST:PORT, ValueError if the port is not a number."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=HEAD_SECONDS) as head:
        head.sendall(HTTP2)
        if head.recv(9)[3:4] != b"\x04":
            raise ConnectionError("what listens there is not Ray's head")


def store_bytes(setting: int | None) -> int:
    """launch.object_store_bytes of this machine. Where it were larger than what /dev/shm has, Ray would take
    files."""
    if setting is not None:
        return setting
    tenth = psutil.virtual_memory().total // 10
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else tenth
    return max(LEAST_STORE_BYTES, min(tenth, free // 2))


def address_of(launch: LaunchSection) -> str | None:
    """Address of the Ray cluster that a run joins; nothing where it starts one on this machine."""
    return launch.ray_address or os.environ.get("RAY_ADDRESS") or None


def own_gpus() -> int:
    """The number of this machine's GPUs."""
    import torch

    return torch.cuda.device_count()


def has_gpus() -> bool:
    """Whether the connected cluster's slots have GPUs."""
    import ray

    return ray.cluster_resources().get("GPU", 0) > 0


@contextlib.contextmanager
def _start_named() -> Iterator[None]:
    """WorkerLost where Ray's own processes do not come up; it raises a bare Exception then."""
    try:
        yield
    except Exception as error:
        raise WorkerLost(
            f"Ray did not start on this machine: {str(error).strip()} Mostly other programs have its processors, its memory or its disk; "
            "wait for them, or join a Ray that runs (launch.ray_address)"
        ) from error


@contextlib.contextmanager
def _few_services() -> Iterator[None]:
    """Ray starts no service that a run on one machine leaves unused: each takes a second of processor and then some of every
    step, and `ray.init` waits for the dashboard's server even where it serves no dashboard. It has settings for none of them.
    Each node's agent is started as where the dashboard's packages are missing (plain_agent.py)."""
    from unittest.mock import patch

    from ray._private import ray_constants, services, utils
    from ray._private.node import Node

    python = services._build_python_executable_command_memory_profileable

    def command(component: str, session_dir: str, unbuffered: bool = True) -> list[str]:
        is_agent = component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT
        return [*python(component, session_dir, unbuffered), *([str(AGENT)] if is_agent else [])]

    missing = ImportError("a dashboard is not asked for")
    with contextlib.ExitStack() as changed:
        for name in UNUSED_SERVICES:
            changed.enter_context(patch.object(Node, name, lambda node, **settings: None))
        changed.enter_context(patch.object(services, python.__name__, command))
        changed.enter_context(patch.object(utils, "get_dashboard_dependency_error", lambda: missing))
        yield


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Let Ray start its processes in sessions of their own and on the loopback interface.

    A signal to the driver's process group (a terminal, `timeout`, a batch system) is meant for the driver,
    which needs Ray to finish its step. By itself Ray replaces a loopback address by one of the network.
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
    """Draw a token for the Ray that starts inside. By itself Ray keeps one for all runs, in a file of the
    user's home that others may read."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined] compiled

    before = {name: os.environ.get(name) for name in token_environment("")}
    os.environ.update(token_environment(secrets.token_hex(32)))
    Config.initialize("")  # this process reads both anew
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


def token_environment(token: str) -> dict[str, str]:
    """Variables with which Ray's processes and drivers show the token."""
    return {"RAY_AUTH_MODE": "token", TOKEN: token}


@contextlib.contextmanager
def _long_wait(seconds: float) -> Iterator[None]:
    """Ray asks for its node until it has come up, and gives up after 30 s, which no setting moves and which a busy machine needs more than
    once. Here it is asked for as long as its process lives, at most so many seconds."""
    from unittest.mock import patch

    from ray._private import services

    with patch.object(services, "get_node", asked_again(services.get_node, seconds, _has_raylet)):
        yield


def _has_raylet() -> bool:
    return any(child.name() == "raylet" and lives(child) for child in psutil.Process().children())


def asked_again[**P, R](ask: Callable[P, R], seconds: float, lives: Callable[[], bool]) -> Callable[P, R]:
    """`ask`, which raises RuntimeError where there is no answer yet, again while what is asked for `lives`, at most so many seconds."""

    def asked(*arguments: P.args, **named: P.kwargs) -> R:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return ask(*arguments, **named)
            except RuntimeError:
                if time.monotonic() > deadline or not lives():
                    raise
            time.sleep(0.1)

    return asked


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray installs a handler for SIGTERM that leaves at once; the one that was there is put back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def _check_gpus(num_slots: int) -> None:
    """ConfigError where this machine alone is too small: Ray would wait for GPUs that never come."""
    if 0 < own_gpus() < num_slots:
        raise ConfigError(
            f"the layout needs {num_slots} GPUs and this machine has {own_gpus()}; start it on a cluster (sbatch, torchrun or "
            "RAY_ADDRESS), choose a smaller layout, or hide the GPUs (CUDA_VISIBLE_DEVICES=) for a run on CPU"
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
    """A folder that is this user's alone, with its watcher. MRL_SESSION, by which the session's processes are
    known, is its path."""
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
    """The process that cleans up after this one (session_watcher.py); another one comes where it dies."""

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
                with contextlib.suppress(OSError):  # no process or no memory left: asked again a second later
                    self._process = self._started()

    def close(self) -> None:
        """Tells it that this process ends by itself, and waits until the session is clean."""
        self._over.set()
        self._keeper.join()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(session_watcher.CLOSES.encode())
        wait_or_kill(self._process, session_watcher.LONGEST_SECONDS + 5)


class OwnRay:
    """Ray's processes that this one started; none where it joined a cluster. Without one of them a run goes on for a minute at most, and
    then Ray ends it."""

    def __init__(self) -> None:
        self._processes = {
            each.name(): each for each in psutil.Process().children() if each.name() in OWN_RAY
        }
        self._looked = 0.0

    def require(self, phase: str) -> None:
        """WorkerLost where one has ended; looks once a second at most."""
        now = time.monotonic()
        if now - self._looked < 1.0:
            return
        self._looked = now
        if gone := self.gone():
            raise WorkerLost(f"Ray's {' and '.join(gone)} of this node died in phase {phase}")

    def gone(self) -> list[str]:
        """Those that have ended."""
        return [name for name, each in self._processes.items() if not lives(each)]


def lives(process: psutil.Process) -> bool:
    """Not one that has ended and nobody has waited for."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
