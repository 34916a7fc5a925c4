"""Tells at once when one of vLLM's worker processes ended by itself.

vLLM's own monitor first takes seconds to end the other workers, while calls fail with what follows from the death.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any


def watch_workers(executor: Any, on_lost: Callable[[str], None]) -> None:
    """Calls `on_lost(name)`, from a thread of its own, unless vLLM's executor is being shut down. Workers inside this process need no watch."""
    processes = [handle.proc for handle in getattr(executor, "workers", ())]
    if processes:
        args = (executor, {process.sentinel: process.name for process in processes}, on_lost)
        threading.Thread(target=_watch, args=args, name="vllm-workers", daemon=True).start()


def _watch(executor: Any, names: dict[int, str], on_lost: Callable[[str], None]) -> None:
    ended = wait(list(names))
    # vLLM's monitor may have been faster: it says that the executor failed before it shuts that down.
    if getattr(executor, "is_failed", False) or not getattr(executor, "shutting_down", False):
        on_lost(names[ended[0]])  # type: ignore[index] sentinels are descriptors
