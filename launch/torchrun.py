"""Run one training on all nodes of a torchrun.

`torchrun --nnodes N --nproc-per-node 1 ... -m mrl.launch.torchrun CONFIG...`

torchrun's rendezvous gives this node's number and a store. Anyone who reaches the store's port can read and
write it, so the cluster's secret is not in it. Every node starts its part of a Ray cluster; node 0 checks all
nodes (preflight) and runs `mrl train`; all exit with the driver's exit code (torchrun itself exits with 1 if
it is not 0). Signals to node 0 go to the driver; a signal to another node asks the driver to save and exit.

With `--nnodes MIN:MAX --max-restarts N` torchrun restarts the remaining nodes if one is lost, and all nodes
if one joins; the run resumes, with the overrides of launch.elastic if there are fewer slots.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import queue
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from mrl.config.load import load_config
from mrl.errors import ConfigError, WorkerLost
from mrl.files import read_private
from mrl.launch.cluster.cluster import token_environment
from mrl.launch.cluster.ray_node import TOKEN, Node, head_address, own_address, ray_node, token_of_environment
from mrl.launch.slots import node_slots, overrides_for, slots_message
from mrl.processes.start import exit_code, module_command, with_lifeline
from mrl.user_code import child_path

POLL_SECONDS = 1.0
SILENCE_SECONDS = 60.0
"""A node exits if node 0 sends no heartbeat to the store for this long."""
SECRET_FILE = "cluster-secret"
"""File in the run folder, for the duration of the run."""
LEAVE_SECONDS = 15.0
"""Node 0 waits at most this long for the other nodes to read the exit code."""


def main(arguments: Sequence[str]) -> int:
    """Run this node's part; return the driver's exit code."""
    config = load_config(*arguments)
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) != 1:
        raise ConfigError("mrl.launch.torchrun needs one process per node: set torchrun --nproc-per-node 1")
    store, number, num_nodes = _rendezvous(config.launch.start_deadline_seconds)
    _forget_torchrun()
    slots, gpus = node_slots(config, num_nodes)
    if words := overrides_for(config, slots * num_nodes):
        arguments = [*arguments, *words]
        if number == 0:
            print(slots_message(config, words, slots * num_nodes), flush=True)
    address = own_address()
    if code := _checked(store, [*arguments, f"launch.slots_per_node={slots}"], number, num_nodes):
        return code
    folder = Path(config.run_folder)
    if number == 0:
        base = int(os.environ.get("MRL_PORT_BASE", "12000"))
        publish_head(store, folder, f"{head_address(address, base)} {base}")
    head_and_base, token = read_head(store, folder, number, config.launch.start_deadline_seconds)
    head, base = head_and_base.split()
    node = Node(
        number=number,
        address=address,
        head=head,
        slots=slots,
        token=token,
        gpus=gpus,
        port_base=int(base),
        object_store_bytes=config.launch.object_store_bytes,
    )
    with ray_node(node, deadline_seconds=config.launch.start_deadline_seconds):
        if number == 0:
            try:
                return _lead(store, arguments, node, num_nodes)
            finally:
                (folder / SECRET_FILE).unlink(missing_ok=True)
        return _follow(store, number)


def _rendezvous(deadline_seconds: float) -> tuple[Any, int, int]:
    """Return (store of this start only, this node's number, number of nodes) from torchrun's environment."""
    from torch.distributed.rendezvous import rendezvous

    if "RANK" not in os.environ:
        raise ConfigError("RANK is not set: start with torchrun, or use `mrl train` on one machine")
    store, number, num_nodes = next(rendezvous("env://", timeout=timedelta(seconds=deadline_seconds)))
    return _of_this_start(store, number, num_nodes, deadline_seconds), number, num_nodes


def _of_this_start(store: Any, number: int, num_nodes: int, deadline_seconds: float) -> Any:
    """Return a view of the store under a random prefix of this start, which node 0 sends to every node that
    requests it: torchrun keeps one store over all its restarts, with the entries of earlier starts."""
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

    if number:
        me = secrets.token_hex(8)
        store.set(f"asks-{store.add('asking', 1)}", me)
        view = PrefixStore(store.get(f"start-of-{me}").decode(), store)
        view.add("here", 1)
        return view
    prefix, num_answered, deadline = secrets.token_hex(8), 0, time.monotonic() + deadline_seconds
    view = PrefixStore(prefix, store)
    while view.add("here", 0) < num_nodes - 1:
        if time.monotonic() > deadline:
            raise WorkerLost(
                f"{view.add('here', 0)} of {num_nodes - 1} nodes met node 0 within {deadline_seconds:g} s"
            )
        while num_answered < store.add("asking", 0):
            num_answered += 1
            store.set(f"start-of-{store.get(f'asks-{num_answered}').decode()}", prefix)
        time.sleep(0.05)
    return view


def publish_head(store: Any, folder: Path, where: str) -> None:
    """Publish the address of the cluster's head, signed with the cluster's secret (HMAC).

    The secret is RAY_AUTH_TOKEN of the nodes' environment. If it is not set, a new one is written to the run
    folder, which all nodes see, in a file of mode 0600.
    """
    if TOKEN in os.environ:
        token = token_of_environment()
    else:
        token = secrets.token_hex(32)
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{SECRET_FILE}-{secrets.token_hex(8)}"
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token)
        partial.replace(folder / SECRET_FILE)
    store.set("cluster", f"{where} {_signed(where, token)}")


def read_head(store: Any, folder: Path, number: int, deadline_seconds: float) -> tuple[str, str]:
    """Return the head's address and the cluster's secret; only a holder of the secret can publish an address.

    Raises:
        ConfigError: Within the deadline, this node has no secret that matches node 0's signature.
    """
    where, _, signature = store.get("cluster").decode().rpartition(" ")
    deadline = time.monotonic() + deadline_seconds
    while True:
        token = token_of_environment() if TOKEN in os.environ else _read_secret(folder / SECRET_FILE)
        if token and hmac.compare_digest(_signed(where, token), signature):
            return where, token
        if TOKEN in os.environ or time.monotonic() > deadline:
            raise ConfigError(
                f"node {number} does not have the secret of node 0's Ray: set {TOKEN} to the same value on "
                f"all nodes; or unset it on all, and let them share {folder} (run.folder) with its file "
                f"{SECRET_FILE}, which must belong to this user and have mode 0600"
            )
        time.sleep(0.2)


def _signed(where: str, token: str) -> str:
    return hmac.digest(token.encode(), where.encode(), "sha256").hex()


def _read_secret(path: Path) -> str:
    """Return the secret; empty if the file does not exist yet or other users can read or write it."""
    try:
        return read_private(path) or ""
    except OSError:
        return ""


def _forget_torchrun() -> None:
    """Remove torchrun's variables: trainer ranks inherit this environment and would use torchrun's store."""
    variables = re.compile(
        r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*)"
    )
    for name in [name for name in os.environ if variables.fullmatch(name)]:
        del os.environ[name]


def _checked(store: Any, arguments: Sequence[str], number: int, num_nodes: int) -> int:
    """Return the exit code of the run's checks, which node 0 runs before any Ray starts."""
    if number == 0:
        command = module_command("mrl.cli", "train", *arguments, "--dry-run")
        environment = {**os.environ, **child_path()}
        code = subprocess.run(command, stdout=subprocess.DEVNULL, env=environment).returncode
        store.set("checked", str(code))
        if code:
            _wait_for_readers(store, num_nodes)
        return code
    if code := int(store.get("checked")):
        store.add("readers", 1)
    return code


def _lead(store: Any, arguments: Sequence[str], node: Node, num_nodes: int) -> int:
    """Run preflight and the driver on node 0, publish the exit code, and wait until all have read it."""
    environment = {**os.environ, **child_path(), **token_environment(node.token), "RAY_ADDRESS": node.head}
    environment.pop("MRL_SESSION", None)  # the driver does not belong to its node's Ray session
    code = 1
    try:
        commands = (
            ["mrl.launch.preflight", *arguments, "--nodes", str(num_nodes)],
            ["mrl.cli", "train", *arguments],
        )
        for command in commands:
            code = _run(module_command(*command), environment, store)
            if code:
                break
    finally:
        store.set("exit_code", str(code))
        _wait_for_readers(store, num_nodes)
    return code


def _run(command: list[str], environment: dict[str, str], store: Any) -> int:
    """Run a command and return its exit code; forward signals and stop requests to it, and send heartbeats.
    Its process group is its own, which torchrun does not signal; it dies with this process."""
    process = subprocess.Popen(with_lifeline(command), env=environment, start_new_session=True)
    senders: list[str] = []

    def forward(sender: str, number: int) -> None:
        """Send a signal on; one node's stop request and the first SIGTERM may be the same event, and count
        once."""
        senders.append(sender)
        is_duplicate = senders in (["node", "signal"], ["signal", "node"]) and number == signal.SIGTERM
        if not is_duplicate and process.poll() is None:
            process.send_signal(number)

    with _handling(lambda number: forward("signal", number)):
        while True:
            store.set("alive", str(time.time()))
            if "node" not in senders and store.check(["told to end"]):
                forward("node", signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return exit_code(process.wait(POLL_SECONDS))


@contextlib.contextmanager
def _handling(handle: Callable[[int], None]) -> Iterator[None]:
    """Pass SIGTERM, SIGINT and SIGUSR1 to `handle` inside the block."""

    def handler(number: int, frame: FrameType | None) -> None:
        handle(number)

    old = {n: signal.signal(n, handler) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, previous in old.items():
            signal.signal(number, previous)


def _wait_for_readers(store: Any, num_nodes: int) -> None:
    deadline = time.monotonic() + LEAVE_SECONDS
    while store.add("readers", 0) < num_nodes - 1 and time.monotonic() < deadline:
        time.sleep(0.2)


def _follow(store: Any, number: int) -> int:
    """Wait on another node for the exit code; raise WorkerLost if node 0's heartbeats stop. A signal is
    reported to node 0, and this node stays: the current step needs its workers."""
    updates: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    stop_requested = threading.Event()
    threading.Thread(target=_listen, args=(store, updates, stop_requested), daemon=True).start()
    with _handling(lambda number: stop_requested.set()):
        while True:
            try:
                if code := updates.get(timeout=SILENCE_SECONDS):
                    return int(code)
            except queue.Empty:
                raise WorkerLost(
                    f"node {number}: no heartbeat from node 0 for {SILENCE_SECONDS:g} s; exiting"
                ) from None


def _listen(store: Any, updates: queue.SimpleQueue[bytes], stop_requested: threading.Event) -> None:
    """Forward node 0's heartbeats (empty) and exit code; report a stop request of this node.

    Its own thread, because a request lost in the network blocks for 15 minutes, until the kernel gives up.
    """
    heartbeat = b""
    while True:
        if stop_requested.is_set():
            with contextlib.suppress(RuntimeError):
                store.set("told to end", "yes")
        if code := _read(store, "exit_code"):
            store.add("readers", 1)
            updates.put(code)
            return
        latest = _read(store, "alive")
        if latest != heartbeat:
            heartbeat = latest
            updates.put(b"")
        time.sleep(POLL_SECONDS)


def _read(store: Any, key: str) -> bytes:
    """Return a value that node 0 has set; empty if it is not set or the store is gone."""
    try:
        return store.get(key) if store.check([key]) else b""
    except RuntimeError:
        return b""


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
