"""Run the weight sync benchmark on two simulated machines with a link of a given rate between them.

    python -m benchmarks.resharding.limited_link --gbit 10 --slots 2 -- \\
        --model qwen3-30b-a3b --scale 0.1 --train 2,1,4 --rollout 2

Each machine is a network namespace with half of the slots. `tc` limits both ends of their pair of interfaces
(a token bucket: nothing is lost, nothing delayed beyond the rate). Arguments after `--` go to
`benchmarks.resharding`. Needs root, iproute2, and a kernel with veth and sch_tbf.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from mrl.errors import ConfigError

NAMES = ("mrl-link-0", "mrl-link-1")
ADDRESSES = ("10.97.0.1", "10.97.0.2")
INTERFACE = "mrl-link"
PORT = 29517
LOCK = Path(tempfile.gettempdir()) / "mrl-link.lock"
_TICKS = 250
"""Ticks per second of the slowest kernel clocks: a token bucket contains what passes in one tick."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the benchmark's exit status; raise ConfigError if the link cannot be made."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    own_words, bench = (
        (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    )
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gbit", type=float, default=10.0, help="rate of the link in Gbit/s, each way")
    parser.add_argument("--slots", type=int, default=2, help="slots per machine")
    parser.add_argument("--seconds", type=float, default=1800.0, help="deadline of the whole run in seconds")
    options = parser.parse_args(own_words)
    with link(options.gbit):
        ranks = [_start(node, options.slots, bench) for node in range(len(NAMES))]
        try:
            return max(rank.wait(options.seconds) for rank in ranks)
        finally:
            for rank in ranks:
                rank.terminate()


@contextlib.contextmanager
def link(gbit: float) -> Iterator[None]:
    """Join two namespaces by a pair of interfaces, then remove both. Wait for another process's link."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise ConfigError(f"{' and '.join(missing)} not found: install iproute2")
    with os.fdopen(os.open(LOCK, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _remove()
        try:
            _make(gbit)
            yield
        finally:
            _remove()


def _make(gbit: float) -> None:
    for name in NAMES:
        _ip("netns", "add", name)
    first, second = NAMES
    _ip(*f"link add {INTERFACE} netns {first} type veth peer name {INTERFACE} netns {second}".split())
    for name, address in zip(NAMES, ADDRESSES, strict=True):
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
        for interface in ("lo", INTERFACE):
            _ip("-n", name, "link", "set", interface, "up")
        _ip("-n", name, "route", "add", "default", "dev", INTERFACE)  # programs find their address by it
        run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *token_bucket(gbit).split())


def token_bucket(gbit: float) -> str:
    """Return the words for `tc` that limit an interface to a rate."""
    burst = max(int(gbit * 1e9 / 8 / _TICKS), 128 << 10)
    return f"tbf rate {gbit}gbit burst {burst} latency 50ms"


def _start(node: int, slots: int, bench: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start torchrun of one machine."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(NAMES))]
    torchrun += ["--node-rank", str(node), "--nproc-per-node", str(slots)]
    torchrun += ["--master-addr", ADDRESSES[0], "--master-port", str(PORT)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
    command = ["ip", "netns", "exec", NAMES[node], *torchrun, "-m", "benchmarks.resharding", *bench]
    return subprocess.Popen(command, env=environment)


def _remove() -> None:
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, timeout=30, check=False)


def _ip(*words: str) -> None:
    run("ip", *words)


def run(*words: str) -> None:
    """Run a command of iproute2; raise ConfigError with its message if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise ConfigError(f"{' '.join(words)}: {done.stderr.strip()} (it needs root, veth and sch_tbf)")


if __name__ == "__main__":
    sys.exit(main())
