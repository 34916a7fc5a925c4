"""The leg of two machines: a run on two Ray nodes in network namespaces whose link is slow for some steps."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.resharding.limited_link import ADDRESSES, INTERFACE, NAMES, link
from benchmarks.soak.life import Life, SoakError
from benchmarks.soak.recipe import Recipe, environment

FAST_GBIT = 10.0
SLOW = "rate 2mbit burst 16kb latency 400ms"
FAST = f"rate {FAST_GBIT:g}gbit burst 5000000 latency 50ms"
PORT = 29617
PORT_BASE = 31600


def impossible() -> str:
    """Return why network namespaces cannot be made here; empty if they can."""
    if os.geteuid():
        return "network namespaces need root"
    return "" if shutil.which("tc") and shutil.which("ip") else "iproute2 is not installed"


def run(recipe: Recipe, out: Path, *, slow: range) -> float:
    """Run the recipe over both machines in OUT/run, with a slow link in steps `slow`; return their seconds.
    Raise SoakError if it fails or stalls."""
    turned: list[float] = []

    def look() -> None:
        """Slow the link, and make it fast again."""
        goal = (slow.start, slow.stop)[len(turned)] if slow and len(turned) < 2 else None
        if goal is not None and life.step >= goal - 1:
            _limit((SLOW, FAST)[len(turned)])
            turned.append(time.monotonic())

    with link(FAST_GBIT), _agent(recipe, out, 0) as life, _agent(recipe, out, 1) as other:
        codes = [life.follow(look), other.follow()]
    if any(codes):
        raise SoakError(f"the run over two machines ended with {codes}; see {out}")
    return turned[-1] - turned[0] if turned else 0.0


def _agent(recipe: Recipe, out: Path, node: int) -> Life:
    """Start torchrun of a machine; node 0 has the store."""
    torchrun = ["-m", "torch.distributed.run", "--nnodes", str(len(NAMES)), "--node-rank", str(node)]
    torchrun += ["--nproc-per-node", "1"]
    torchrun += ["--master-addr", ADDRESSES[0], "--master-port", str(PORT), "-m", "mrl.launch.torchrun"]
    words = recipe.words(out, "launch.slots_per_node=1")
    command = ["ip", "netns", "exec", NAMES[node], sys.executable, *torchrun, *words]
    return Life(command, log=out / f"node-{node}.log", environment=environment(MRL_PORT_BASE=str(PORT_BASE)))


def _limit(how: str) -> None:
    for name in NAMES:
        words = ["tc", "-n", name, "qdisc", "change", "dev", INTERFACE, "root", "tbf", *how.split()]
        subprocess.run(words, timeout=30, check=True)
