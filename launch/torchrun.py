"""A training run on all machines of a torchrun: `torchrun --nnodes N --nproc-per-node 1 ... -m mrl.launch.torchrun CONFIG...`.

torchrun's rendezvous says which node this is and gives a store, which whoever reaches its port reads and
writes: the secret of the cluster is not in it. Every node starts its part of a Ray cluster; node 0 then looks
at all nodes (preflight) and runs `mrl train`; all leave with the driver's exit code. Signals to node 0's
process go to the driver, and another node that is told to end asks it to save and leave. (torchrun itself
ends with 1 whenever the code is not 0.)

With `--nnodes MIN:MAX --max-restarts N` torchrun starts the nodes that are left anew when one is lost, and all when one joins; the
run resumes, on fewer slots with what launch.elastic has for them.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import queue
import re
import secrets
import signal
import stat
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
from mrl.launch.cluster.cluster import token_environment
from mrl.launch.cluster.ray_node import TOKEN, Node, head_address, own_address, ray_node, token_of_environment
from mrl.launch.slots import node_slots, slots_message, words_for
from mrl.own_code import child_path
from mrl.processes.start import exit_code, lifeline_words, module_words

POLL_SECONDS = 1.0
SILENCE_SECONDS = 60.0
"""A node leaves when node 0 has not written to the store for so long."""
SECRET_FILE = "cluster-secret"
"""In the run folder, while the run lasts."""
LEAVE_SECONDS = 15.0
"""Node 0 waits this long for the others to read the exit code; one that is gone never does."""


def main(arguments: Sequence[str]) -> int:
    """This node's part; returns the driver's exit code."""
    config = load_config(*arguments)
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) != 1:
        raise ConfigError("mrl.launch.torchrun wants one process per node: torchrun --nproc-per-node 1")
    store, number, num_nodes = _rendezvous(config.launch.start_deadline_seconds)
    _forget_torchrun()
    slots, gpus = node_slots(config, num_nodes)
    if words := words_for(config, slots * num_nodes):
        arguments = [*arguments, *words]
        if number == 0:
            print(slots_message(config, words, slots * num_nodes), flush=True)
    address = own_address()
    if code := _checked(store, [*arguments, f"launch.slots_per_node={slots}"], number, num_nodes):
        return code
    folder = Path(config.run_folder)
    if number == 0:
        base = int(os.environ.get("MRL_PORT_BASE", "12000"))
        tell_cluster(store, folder, f"{head_address(address, base)} {base}")
    where, token = hear_cluster(store, folder, number, config.launch.start_deadline_seconds)
    head, base = where.split()
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
    """(store of this start alone, this node's number, nodes) from torchrun's environment."""
    from torch.distributed.rendezvous import rendezvous

    if "RANK" not in os.environ:
        raise ConfigError("RANK is not set: start this with torchrun, or use `mrl train` on one machine")
    store, number, num_nodes = next(rendezvous("env://", timeout=timedelta(seconds=deadline_seconds)))
    return _of_this_start(store, number, num_nodes, deadline_seconds), number, num_nodes


def _of_this_start(store: Any, number: int, num_nodes: int, deadline_seconds: float) -> Any:
    """torchrun keeps one store over all its restarts, so what the last start wrote is still there. Node 0 draws a name under which
    this one writes, and tells it to every node that asks; those of earlier starts do not hear the answer."""
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

    if number:
        me = secrets.token_hex(8)
        store.set(f"asks-{store.add('asking', 1)}", me)
        own = PrefixStore(store.get(f"start-of-{me}").decode(), store)
        own.add("here", 1)
        return own
    name, answered, deadline = secrets.token_hex(8), 0, time.monotonic() + deadline_seconds
    own = PrefixStore(name, store)
    while own.add("here", 0) < num_nodes - 1:
        if time.monotonic() > deadline:
            raise WorkerLost(
                f"{own.add('here', 0)} of {num_nodes - 1} nodes met node 0 within {deadline_seconds:g} s"
            )
        while answered < store.add("asking", 0):
            answered += 1
            store.set(f"start-of-{store.get(f'asks-{answered}').decode()}", name)
        time.sleep(0.05)
    return own


def tell_cluster(store: Any, folder: Path, where: str) -> None:
    """Tell the other nodes where the cluster's head is, signed with the cluster's secret (HMAC).

    The secret is RAY_AUTH_TOKEN of the nodes' environment. Without it one is drawn here and written to the
    run folder, which all nodes see, in a file of mode 0600.
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


def hear_cluster(store: Any, folder: Path, number: int, deadline_seconds: float) -> tuple[str, str]:
    """Return where the head is and the cluster's secret; nobody without the secret can name another head.

    Raises:
        ConfigError: this node has no secret that fits what node 0 said, within the deadline.
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
                f"all nodes, or on none; then all need the same {folder} (run.folder), where they read it in "
                f"{SECRET_FILE}, a file of this user with mode 0600"
            )
        time.sleep(0.2)


def _signed(where: str, token: str) -> str:
    return hmac.digest(token.encode(), where.encode(), "sha256").hex()


def _read_secret(path: Path) -> str:
    """Return the secret, or nothing if the file is not there yet or others could have read or written it."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
            status = os.fstat(file.fileno())
            is_own = status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
            return file.read() if is_own else ""
    except OSError:
        return ""


def _forget_torchrun() -> None:
    """Drops torchrun's variables: trainer ranks inherit this environment, and would take torchrun's store for theirs."""
    own = re.compile(
        r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*)"
    )
    for name in [name for name in os.environ if own.fullmatch(name)]:
        del os.environ[name]


def _checked(store: Any, arguments: Sequence[str], number: int, num_nodes: int) -> int:
    """The exit code of the run's checks, which node 0 makes before Ray starts anywhere and tells the others."""
    if number == 0:
        command = module_words("mrl.cli", "train", *arguments, "--dry-run")
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
    """Node 0: preflight, then the driver; tells the others the exit code and waits until they have it."""
    environment = {**os.environ, **child_path(), **token_environment(node.token), "RAY_ADDRESS": node.head}
    environment.pop("MRL_SESSION", None)  # the driver is no part of the node it runs on
    code = 1
    try:
        commands = (
            ["mrl.launch.preflight", *arguments, "--nodes", str(num_nodes)],
            ["mrl.cli", "train", *arguments],
        )
        for command in commands:
            code = _run(module_words(*command), environment, store)
            if code:
                break
    finally:
        store.set("exit_code", str(code))
        _wait_for_readers(store, num_nodes)
    return code


def _run(command: list[str], environment: dict[str, str], store: Any) -> int:
    """The command's exit code; it hears what this process and the other nodes are told, and they that node 0 lives. It is in a
    group of its own, which torchrun does not signal, and does not outlive this process."""
    process = subprocess.Popen(lifeline_words(command), env=environment, start_new_session=True)
    asked: list[str] = []

    def ask(by: str, number: int) -> None:
        """Where a node is told to end torchrun may tell all: its word and the first SIGTERM are one request, in either order."""
        asked.append(by)
        is_again = asked in (["node", "signal"], ["signal", "node"]) and number == signal.SIGTERM
        if not is_again and process.poll() is None:
            process.send_signal(number)

    with _handling(lambda number: ask("signal", number)):
        while True:
            store.set("alive", str(time.time()))
            if "node" not in asked and store.check(["told to end"]):
                ask("node", signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return exit_code(process.wait(POLL_SECONDS))


@contextlib.contextmanager
def _handling(handle: Callable[[int], None]) -> Iterator[None]:
    """Requests to leave are given to `handle`."""

    def handler(number: int, frame: FrameType | None) -> None:
        handle(number)

    old = {n: signal.signal(n, handler) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before)


def _wait_for_readers(store: Any, num_nodes: int) -> None:
    deadline = time.monotonic() + LEAVE_SECONDS
    while store.add("readers", 0) < num_nodes - 1 and time.monotonic() < deadline:
        time.sleep(0.2)


def _follow(store: Any, number: int) -> int:
    """Another node: stays until node 0 tells the exit code, or is silent for too long. Where it is told to end it says so, and
    stays too: the step that is under way needs its workers."""
    news: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    is_told = threading.Event()
    threading.Thread(target=_listen, args=(store, news, is_told), daemon=True).start()
    with _handling(lambda number: is_told.set()):
        while True:
            try:
                if code := news.get(timeout=SILENCE_SECONDS):
                    return int(code)
            except queue.Empty:
                raise WorkerLost(
                    f"node {number}: node 0 said nothing for {SILENCE_SECONDS:g} s; leaving"
                ) from None


def _listen(store: Any, news: queue.SimpleQueue[bytes], is_told: threading.Event) -> None:
    """Tells what node 0 says: that it lives (nothing), and at last its exit code; and node 0 that this node is told to end. A
    thread of its own, because a question that the network swallows is answered when the kernel gives it up, after a quarter of
    an hour."""
    word = b""
    while True:
        if is_told.is_set():
            with contextlib.suppress(RuntimeError):
                store.set("told to end", "yes")
        if code := _read(store, "exit_code"):
            store.add("readers", 1)
            news.put(code)
            return
        latest = _read(store, "alive")
        if latest != word:
            word = latest
            news.put(b"")
        time.sleep(POLL_SECONDS)


def _read(store: Any, key: str) -> bytes:
    """A value of node 0's; nothing before it is set or when its store is gone."""
    try:
        return store.get(key) if store.check([key]) else b""
    except RuntimeError:
        return b""


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
