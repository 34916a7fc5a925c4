"""Ray actor of an engine's workers on one of its further nodes, and how the engine's first process notices
their end.

vLLM's executor on the first node watches only that node's workers; it would wait for a dead worker on another
node until its deadline. So a process that lost a worker exits, and the first process, which has a pending
call to each, exits too. The driver sees that as any other death.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mrl.config.root import Config
from mrl.launch.workers.actor_group import ActorGroup
from mrl.rollout import vllm_start
from mrl.rollout.engine_process import EngineProcess

if TYPE_CHECKING:
    from mrl.rollout.headless import HeadlessExecutor

WORKER_LOST_EXIT_CODE = 71
THREADS = 3
"""Concurrent calls of an actor: `wait_closed`, `start` and `close`."""


class HeadlessActor:
    """Runs the executor of a further node; its process only waits."""

    executor: HeadlessExecutor

    def __init__(self, config: Config, part: EngineProcess, log_folder: str) -> None:
        from mrl.launch.cluster.node_facts import listen_on_own_node
        from mrl.launch.workers.actor_log import file_name, redirect

        self._config, self.part = config, part
        redirect(log_folder, file_name(part.name))
        listen_on_own_node()
        self._ended = threading.Event()

    def start(self, meeting: vllm_start.Rendezvous) -> None:
        """Start this node's workers; return when those of all nodes are up."""
        from mrl.rollout.headless import HeadlessExecutor

        options = vllm_start.run_arguments(self._config, self.part, meeting)
        self.executor = HeadlessExecutor(**options, on_worker_lost=self._leave)

    def _leave(self, worker: str) -> None:
        leave_without(self.part, worker)

    def wait_closed(self) -> None:
        """Return when this actor is closed."""
        self._ended.wait()

    def close(self) -> None:
        self._ended.set()
        if hasattr(self, "executor"):
            self.executor.close()


class HeadlessGroup(ActorGroup[HeadlessActor]):
    """Processes of all engines on their further nodes; empty if each engine is on one node."""

    kind = "engine"

    def __init__(
        self, config: Config, *arguments: Any, facts: Sequence[EngineProcess], **options: Any
    ) -> None:
        self._parts = facts
        super().__init__(HeadlessActor, config, *arguments, facts=facts, threads=THREADS, **options)

    def name(self, number: int) -> str:
        return self._parts[number].name

    def beside(self, first: EngineProcess) -> list[int]:
        """Return the numbers of the processes on the further nodes of `first`."""
        return [self._parts.index(part) for part in first.other_nodes()]


def leave_without(part: EngineProcess, process: str) -> None:
    """Exit, because an engine cannot work without one of its processes; the driver notices at once."""
    from mrl.launch.workers.actor_log import leave

    leave(f"{part.name} lost its process {process}", WORKER_LOST_EXIT_CODE)


def watch(further: Mapping[str, Any], on_lost: Callable[[str], None]) -> None:
    """Call `on_lost(name)` from its own thread if one of these actors, by name, ends without being closed."""
    if further:
        calls = {
            actor.__ray_call__.remote(HeadlessActor.wait_closed): name for name, actor in further.items()
        }
        threading.Thread(target=_watch, args=(calls, on_lost), name="further-nodes", daemon=True).start()


def _watch(calls: Mapping[Any, str], on_lost: Callable[[str], None]) -> None:
    import ray
    from ray.exceptions import RayError

    pending: Iterable[Any] = calls
    while pending:
        (ended,), pending = ray.wait(list(pending), num_returns=1)
        try:
            ray.get(ended)
        except RayError:
            on_lost(calls[ended])
