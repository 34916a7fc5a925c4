"""The thin Ray actor around the workers of an engine on one of its further nodes, and how the engine's first process hears of
their end.

vLLM's executor on the first node watches that node's workers alone: a death elsewhere would be a wait there until its deadline.
So a process that lost a worker ends itself, and the first process, which holds a call of each, ends itself too; the driver
hears of that as of any death.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mrl.config.root import Config
from mrl.launch.workers.actor_group import ActorGroup
from mrl.rollout import vllm_start
from mrl.rollout.part import Part

if TYPE_CHECKING:
    from mrl.rollout.headless import HeadlessExecutor

WORKER_LOST_EXIT_CODE = 71
THREADS = 3
"""Of an actor: the call that lasts, the start, the end."""


class HeadlessActor:
    """The executor of a further node in this process, which only waits."""

    executor: HeadlessExecutor

    def __init__(self, config: Config, part: Part, log_folder: str) -> None:
        from mrl.launch.cluster.node_facts import listen_on_own_node
        from mrl.launch.workers.actor_log import file_name, redirect

        self._config, self.part = config, part
        redirect(log_folder, file_name(part.name))
        listen_on_own_node()
        self._ended = threading.Event()

    def start(self, meeting: vllm_start.Meeting) -> None:
        """Starts this node's workers; returns when they, and those of the other nodes, are up."""
        from mrl.rollout.headless import HeadlessExecutor

        options = vllm_start.of_run(self._config, self.part, meeting)
        self.executor = HeadlessExecutor(**options, on_worker_lost=self._leave)

    def _leave(self, worker: str) -> None:
        leave_without(self.part, worker)

    def lasts(self) -> None:
        """Returns when this process was closed."""
        self._ended.wait()

    def close(self) -> None:
        self._ended.set()
        if hasattr(self, "executor"):
            self.executor.close()


class HeadlessGroup(ActorGroup[HeadlessActor]):
    """The processes of all engines on their further nodes; there are none where each engine lies on one."""

    kind = "engine"

    def __init__(self, config: Config, *arguments: Any, told: Sequence[Part], **options: Any) -> None:
        self._parts = told
        super().__init__(HeadlessActor, config, *arguments, told=told, threads=THREADS, **options)

    def name(self, number: int) -> str:
        return self._parts[number].name

    def beside(self, first: Part) -> list[int]:
        """The numbers of those that the process of a first node goes with."""
        return [self._parts.index(part) for part in first.further()]


def leave_without(part: Part, process: str) -> None:
    """Ends this process, because an engine without one of its processes can do nothing more; the driver hears of it at once."""
    from mrl.launch.workers.actor_log import leave

    leave(f"{part.name} lost its process {process}", WORKER_LOST_EXIT_CODE)


def watch(further: Mapping[str, Any], on_lost: Callable[[str], None]) -> None:
    """Calls `on_lost(name)`, from a thread of its own, when one of these actors, by name, is gone without having been closed."""
    if further:
        calls = {actor.__ray_call__.remote(HeadlessActor.lasts): name for name, actor in further.items()}
        threading.Thread(target=_watch, args=(calls, on_lost), name="further-nodes", daemon=True).start()


def _watch(calls: Mapping[Any, str], on_lost: Callable[[str], None]) -> None:
    import ray
    from ray.exceptions import RayError

    left: Iterable[Any] = calls
    while left:
        (ended,), left = ray.wait(list(left), num_returns=1)
        try:
            ray.get(ended)
        except RayError:
            on_lost(calls[ended])
