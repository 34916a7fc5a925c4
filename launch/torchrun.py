"""A training run on all machines of a torchrun: `torchrun --nnodes N --nproc-per-node 1 ... -m mrl.launch.torchrun CONFIG...`.

torchrun's rendezvous says which node this is and gives a store. Every node starts its part of a Ray cluster; node 0 then
looks at all nodes (preflight) and runs `mrl train`; all leave with the driver's exit code. Signals to node 0's process go to
the driver. (torchrun itself ends with 1 whenever the code is not 0.)

With `--nnodes MIN:MAX --max-restarts N` torchrun starts the nodes that are left anew when one is lost, and all when one joins; the
run resumes, on fewer slots with what launch.elastic has for them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

from mrl.config.load import load_config
from mrl.errors import ConfigError, WorkerLost
from mrl.launch.cluster.ray_node import Node, head_address, own_address, ray_node, token_environment
from mrl.launch.slots import node_slots, told, words_for

POLL_SECONDS = 5.0
SILENCE_SECONDS = 60.0
"""A node leaves when node 0 has not written to the store for so long."""
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
            print(told(config, words, slots * num_nodes), flush=True)
    address = own_address()
    if code := _checked(store, [*arguments, f"launch.slots_per_node={slots}"], number, num_nodes):
        return code
    if number == 0:
        base = int(os.environ.get("MRL_PORT_BASE", "12000"))
        store.set("cluster", f"{head_address(address, base)} {secrets.token_hex(32)} {base}")
    head, token, base = store.get("cluster").decode().split()
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
            return _lead(store, arguments, node, num_nodes)
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
        command = [sys.executable, "-m", "mrl.cli", "train", *arguments, "--dry-run"]
        code = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
        store.set("checked", str(code))
        if code:
            _wait_for_readers(store, num_nodes)
        return code
    if code := int(store.get("checked")):
        store.add("readers", 1)
    return code


def _lead(store: Any, arguments: Sequence[str], node: Node, num_nodes: int) -> int:
    """Node 0: preflight, then the driver; tells the others the exit code and waits until they have it."""
    environment = {**os.environ, **token_environment(node.token), "RAY_ADDRESS": node.head}
    environment.pop("MRL_SESSION", None)  # the driver is no part of the node it runs on
    code = 1
    try:
        commands = (
            ["mrl.launch.preflight", *arguments, "--nodes", str(num_nodes)],
            ["mrl.cli", "train", *arguments],
        )
        for command in commands:
            code = _run([sys.executable, "-m", *command], environment, store)
            if code:
                break
    finally:
        store.set("exit_code", str(code))
        _wait_for_readers(store, num_nodes)
    return code


def _run(command: list[str], environment: dict[str, str], store: Any) -> int:
    """The command's exit code; signals are passed on, and the others hear that node 0 lives."""
    process = subprocess.Popen(command, env=environment)
    with _forwarding(process):
        while True:
            store.set("alive", str(time.time()))
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(POLL_SECONDS)
                return 128 - code if code < 0 else code


@contextlib.contextmanager
def _forwarding(process: subprocess.Popen[bytes]) -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        if process.poll() is None:
            process.send_signal(number)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    old = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _wait_for_readers(store: Any, num_nodes: int) -> None:
    deadline = time.monotonic() + LEAVE_SECONDS
    while store.add("readers", 0) < num_nodes - 1 and time.monotonic() < deadline:
        time.sleep(0.2)


def _follow(store: Any, number: int) -> int:
    """Another node: stays until node 0 tells the exit code, or is silent for too long."""
    news: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(store, news), daemon=True).start()
    while True:
        try:
            if code := news.get(timeout=SILENCE_SECONDS):
                return int(code)
        except queue.Empty:
            raise WorkerLost(
                f"node {number}: node 0 said nothing for {SILENCE_SECONDS:g} s; leaving"
            ) from None


def _listen(store: Any, news: queue.SimpleQueue[bytes]) -> None:
    """Tells what node 0 says: that it lives (nothing), and at last its exit code. A thread of its own, because a question
    that the network swallows is answered when the kernel gives it up, after a quarter of an hour."""
    word = b""
    while True:
        if code := _read(store, "exit_code"):
            store.add("readers", 1)
            news.put(code)
            return
        latest = _read(store, "alive")
        if latest != word:
            word = latest
            news.put(b"")
        time.sleep(1.0)


def _read(store: Any, key: str) -> bytes:
    """A value of node 0's; nothing before it is set or when its store is gone."""
    try:
        return store.get(key) if store.check([key]) else b""
    except RuntimeError:
        return b""


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
