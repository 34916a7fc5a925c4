"""Workers of an engine on a further node: vLLM's executor without an engine, in this process.

It has the configuration of the engine on the first node, which calls these workers over sockets like its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mrl.rollout import scratch, vllm_start
from mrl.rollout.worker_watch import watch_workers


class HeadlessExecutor:
    """Executor whose workers run until `close` or until one of them ends."""

    def __init__(self, *, on_worker_lost: Callable[[str], None] = lambda name: None, **options: Any) -> None:
        """`options`: as for `vllm_start.arguments`. `on_worker_lost`: gets a dead worker's name, in a
        thread."""
        self._scratch = scratch.Scratch()
        with self._scratch.in_use():
            self._executor = vllm_start.start_headless(**options)
        self._scratch.note_segments()
        watch_workers(self._executor, on_worker_lost)

    def close(self) -> None:
        """End the workers."""
        self._executor.shutdown()
        self._scratch.close()
