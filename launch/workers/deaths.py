"""Why a worker's process ended, in one line.

Ray knows whether its memory monitor killed the process; of every other death it knows that a connection was closed. The kernel
counts what it killed for want of memory. A worker that leaves by itself, or crashes, says why in its own log (actor_log.py).
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from mrl.launch.workers.memory_watch import most_held
from mrl.observe.phases import PhaseClock

log = logging.getLogger(__name__)

LOWER = "lower rollout.kv_cache_bytes, training.microbatch_tokens or launch.object_store_bytes, or end other programs"
"""Settings that a host's memory depends on most."""
_MOST_USERS = 3
_NODE = re.compile(r"Memory on the node \(IP: (\S+), .*?\) was ([\d.]+)GB used / ([\d.]+)GB limit")
_KILLED = re.compile(r"pid=(\d+), actual memory used=([\d.]+)GB")
_USER = re.compile(r"^(\d+)\t([\d.]+)\t(.+)$", re.MULTILINE)
_WITHOUT_A_WORD = "unexpectedly exits"
_ADDRESS = re.compile(r"^\s*ip: (\S+)", re.MULTILINE)


def kernel_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Return how many processes the kernel of this machine has killed for want of memory since it started; 0 where it does not say."""
    with contextlib.suppress(OSError):
        counts = dict(line.split() for line in vmstat.read_text().splitlines())
        return int(counts.get("oom_kill", 0))
    return 0


_KILLS_BEFORE = kernel_kills()


@contextlib.contextmanager
def without_rays_words() -> Iterator[None]:
    """Ray's paragraphs on a death go to the log of this process at its lowest level, not to the screen; `why` gives the line of it."""
    from unittest.mock import patch

    from ray._private import worker

    def say(data: Mapping[str, Any], **options: Any) -> None:
        log.debug("%s", data["lines"])

    with patch.object(worker, "print_to_stdstream", say):
        yield


def why(error: BaseException, clock: PhaseClock, *, here: str) -> str:
    """Return why the process of a call that failed with Ray's `error` is gone, in one line. `here`: this node's address."""
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
        by = f"killed for want of memory: the kernel did so to {killed} processes of this machine since the run began"
        return "; ".join(filter(None, [by, used, held, LOWER]))
    return "; ".join(filter(None, ["its process was killed or crashed", used, held]))


def _by_the_monitor(text: str, node: re.Match[str]) -> str:
    address, used, limit = node.groups()
    killed = _KILLED.findall(text)
    users = [f"{size} by what it killed (pid {pid})" for pid, size in killed]
    others = [user for user in _USER.findall(text) if user[0] not in [pid for pid, _ in killed]]
    users += [
        f"{size} by {Path(words.split()[0]).name} (pid {pid})" for pid, size, words in others[:_MOST_USERS]
    ]
    held = f": {', '.join(users)}" if users else ""
    return f"killed by Ray's memory monitor, as {used} of {limit} GiB of node {address} were in use{held}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}"
