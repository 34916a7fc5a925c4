"""Explain in one line why a worker's process ended.

Ray knows if its memory monitor killed the process, else only that a connection was closed. The kernel counts
its out-of-memory kills. A worker that exits or crashes writes why to its log (actor_log.py).
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import psutil

from mrl.launch.workers.memory_watch import most_held
from mrl.observe.phases import PhaseClock

LOWER = (
    "lower rollout.kv_cache_bytes, training.microbatch_tokens or launch.object_store_bytes, "
    "or end other programs"
)
"""Advice: the settings with most influence on host memory."""
_MOST_USERS = 3
_NODE = re.compile(r"Memory on the node \(IP: (\S+), .*?\) was ([\d.]+)GB used / ([\d.]+)GB limit")
_KILLED = re.compile(r"pid=(\d+), actual memory used=([\d.]+)GB")
_USER = re.compile(r"^(\d+)\t([\d.]+)\t(.+)$", re.MULTILINE)
_WITHOUT_A_WORD = "unexpectedly exits"
_ADDRESS = re.compile(r"^\s*ip: (\S+)", re.MULTILINE)


def kernel_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Return the number of out-of-memory kills since the machine booted; 0 if the kernel has no count."""
    with contextlib.suppress(OSError):
        counts = dict(line.split() for line in vmstat.read_text().splitlines())
        return int(counts.get("oom_kill", 0))
    return 0


_KILLS_BEFORE = kernel_kills()


def death_cause(error: BaseException, clock: PhaseClock, *, here: str) -> str:
    """Return in one line why a process died, from Ray's `error`; `here`: this node's address."""
    text = str(error).strip()
    held = most_held(clock)
    if node := _NODE.search(text):
        return "; ".join(filter(None, [_by_the_monitor(text, node), held, LOWER]))
    if _WITHOUT_A_WORD not in text:
        first = text.splitlines()[0] if text else "no message"
        return f"{type(error).__name__}: {first}"
    address = _ADDRESS.search(text)
    if address and address[1] != here:
        return "; ".join(filter(None, [f"its process on {address[1]} was killed or crashed", held]))
    memory = psutil.virtual_memory()
    used = (
        f"{_gib(memory.total - memory.available)} of {_gib(memory.total)} GiB of this machine are in use now"
    )
    if killed := kernel_kills() - _KILLS_BEFORE:
        cause = f"killed for lack of memory: the kernel killed {killed} processes here since the run began"
        return "; ".join(filter(None, [cause, used, held, LOWER]))
    return "; ".join(filter(None, ["its process was killed or crashed", used, held]))


def _by_the_monitor(text: str, node: re.Match[str]) -> str:
    address, used, limit = node.groups()
    killed = _KILLED.findall(text)
    users = [f"{size} by the killed process (pid {pid})" for pid, size in killed]
    others = [user for user in _USER.findall(text) if user[0] not in [pid for pid, _ in killed]]
    users += [
        f"{size} by {Path(words.split()[0]).name} (pid {pid})" for pid, size, words in others[:_MOST_USERS]
    ]
    held = f": {', '.join(users)}" if users else ""
    return (
        f"killed by Ray's memory monitor, because {used} of {limit} GiB of node {address} were in use{held}"
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}"
