"""The workers of an engine on one of its further nodes: vLLM's executor without an engine, in this process.

Made from the same configuration as the engine on the first node, which asks these workers over sockets as it asks its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mrl.rollout import scratch, vllm_start
from mrl.rollout.worker_watch import watch_workers


class HeadlessExecutor:
    """Workers that are up, until `close` or until one of them ends."""

    def __init__(self, *, on_worker_lost: Callable[[str], None] = lambda name: None, **options: Any) -> None:
        """`options`: those of vllm_start.arguments, as the engine has them. `on_worker_lost`: called with its name, in a thread of
        its own, when a worker process ended by itself."""
        self._scratch = scratch.Scratch()
        with self._scratch.in_use():
            self._executor = vllm_start.start_headless(**options)
        self._scratch.note_segments()
        watch_workers(self._executor, on_worker_lost)

    def close(self) -> None:
        """Ends the workers."""
        self._executor.shutdown()
        self._scratch.close()
