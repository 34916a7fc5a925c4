"""Immediate report of a vLLM worker process that died.

vLLM's own monitor first takes seconds to end the other workers; meanwhile calls fail with its consequences.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any


def watch_workers(executor: Any, on_lost: Callable[[str], None]) -> None:
    """Call `on_lost(name)` in its own thread when a worker process dies before vLLM's executor shuts down."""
    processes = [handle.proc for handle in getattr(executor, "workers", ())]
    if processes:  # workers inside this process need no watch
        args = (executor, {process.sentinel: process.name for process in processes}, on_lost)
        threading.Thread(target=_watch, args=args, name="vllm-workers", daemon=True).start()


def _watch(executor: Any, names: dict[int, str], on_lost: Callable[[str], None]) -> None:
    ended = wait(list(names))
    # vLLM's monitor may have been faster: it marks the executor as failed before it shuts it down.
    if getattr(executor, "is_failed", False) or not getattr(executor, "shutting_down", False):
        on_lost(names[ended[0]])  # type: ignore[index] sentinels are descriptors
