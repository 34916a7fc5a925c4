"""The thin Ray actor around one process of a vLLM engine: its environment, its log file, its threads.

Ray starts the process and carries commands (weight syncs, sleep, manifests); no token passes it. One thread owns the engine
(mrl/rollout/engine_loop.py), another the socket of the driver (engine_server.py).
"""

from __future__ import annotations

import dataclasses
import gc
import socket
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from mrl.config.root import Config
from mrl.errors import PeerLost, RolloutError
from mrl.launch.workers import headless_actor, route_blocks
from mrl.models.families import family_of
from mrl.resharding.planner.manifest import RankManifest
from mrl.rollout import vllm_start
from mrl.rollout.end_of_text_ids import end_of_text
from mrl.rollout.engine_client import Address
from mrl.rollout.part import Part

if TYPE_CHECKING:
    from mrl.rollout.engine import RolloutEngine
    from mrl.rollout.engine_loop import EngineLoop

_MOST_PROBES = 100
BLAME_SECONDS = 5.0
"""In which the death of a process on a living node is known everywhere."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineRank:
    """What a trainer rank must know of the engine rank on its slot."""

    address: str
    """Where its sender connects, as the configured transport needs it."""
    device: str
    """The UUID of its GPU; "cpu" without one."""
    manifest: RankManifest
    """Where each checkpoint tensor lands on it, by vLLM's own loaders."""


class RolloutActor:
    """An engine, or one dp rank of it, in this process, which is on the first of its nodes."""

    loop: EngineLoop

    def __init__(self, config: Config, part: Part, log_folder: str) -> None:
        from mrl.launch.cluster.node_facts import listen_on_own_node
        from mrl.launch.workers.actor_log import file_name, redirect

        gc.disable()  # until it has started: a fifth of the time of imports, which keep what they make
        self._config, self.part = config, part
        redirect(log_folder, file_name(self.part.name))
        listen_on_own_node()
        self._listener = socket.create_server((self.address(), 0))
        self._blocks: dict[int, Any] = {}
        """Handles of blocks of routes that the driver has not taken."""
        self._num_blocks = 0

    def address(self) -> str:
        """This process's node."""
        import ray

        return ray.util.get_node_ip_address()

    def meeting(self) -> vllm_start.Meeting:
        """Where the processes of this engine find each other: two ports in a row that are free on this node; asked of an
        engine's first process before `start`."""
        for _ in range(_MOST_PROBES):
            with socket.socket() as first, socket.socket() as second:
                first.bind(("", 0))
                port = first.getsockname()[1]
                try:
                    second.bind(("", port + 1))
                except OSError:
                    continue
                return self.address(), port
        raise RolloutError(f"{self.part.name}: no two ports in a row are free on {self.address()}")

    def start(self, meeting: vllm_start.Meeting | None, secret: bytes, *further: Any) -> None:
        """Start vLLM with the model's shape and no weights; it serves after the first weight sync.

        Args:
            meeting: Where the processes of the engine find each other.
            secret: What the driver proves to know when it connects to `door`.
            further: Actors of the engine's other nodes (headless_actor.py), in their order, which are started at the same
                time.
        """
        from mrl.data.tokenise import decoder
        from mrl.rollout.engine import RolloutEngine
        from mrl.rollout.engine_loop import EngineLoop
        from mrl.rollout.engine_server import EngineServer
        from mrl.tokenizer_folder import load_tokenizer

        names = [part.name for part in self.part.further()]
        headless_actor.watch(dict(zip(names, further, strict=True)), self._leave)
        path, options = self._config.model.path, vllm_start.of_run(self._config, self.part, meeting)
        tokenizer = load_tokenizer(path, trust_remote_code=self._config.model.trust_remote_code)
        ends = end_of_text(tokenizer, path)
        self._server = server = EngineServer(
            self._listener,
            secret,
            decoder(tokenizer, ends),
            keep_block=self._keep_block,
            before_failing=self._blame,
        )
        self.loop = EngineLoop(
            lambda: RolloutEngine(
                **options,
                sync=self._config.sync,
                stop_token_ids=ends,
                keeps_caches=self._config.keeps_caches,
                on_worker_lost=self._leave,
            ),
            server,
        )
        self.loop.start()
        self.loop.ready.result()
        server.serve(self.loop)
        gc.enable()

    def _keep_block(self, block: np.ndarray) -> int:
        self._num_blocks += 1
        self._blocks[self._num_blocks] = route_blocks.share_block(block)
        return self._num_blocks

    def _blame(self, error: BaseException) -> None:
        """If others are gone and one may be of another node of this rank's, the engine's failure is told only after that would
        have ended this process, by its name."""
        if isinstance(error, PeerLost) and self.part.nodes > 1:
            time.sleep(BLAME_SECONDS)

    def _leave(self, process: str) -> None:
        headless_actor.leave_without(self.part, process)

    def door(self) -> Address:
        """Return where the driver connects."""
        return self._listener.getsockname()[:2]

    def wait_until_free(self, seconds: float) -> None:
        """Return once no client is connected and the engine has paused since (a lost rollout worker's)."""
        self._server.wait_until_free(seconds)

    def take_block(self, number: int) -> list[Any]:
        """Return the handle of a block of routes, in a list because Ray would send the block itself."""
        return [self._blocks.pop(number)]

    def on_engine[R](self, function: Callable[[RolloutEngine], R]) -> R:
        """Run a function of the engine between two of its steps; return its value."""
        return self.loop.call(function).result()

    def prepare_sync(self) -> list[tuple[str, str, str]]:
        """Address, device and manifest's digest of this engine's ranks, or of this dp rank's. Their weights must be
        mapped: the loaders read a module's map of experts."""
        from mrl.training.hf.hf_folder import read_config

        on_slot = self._config.sync.transport == "auto"
        host, config = None if on_slot else self.address(), read_config(self._config.model.path)
        tensors = family_of(config).checkpoint_tensors(config)
        addresses, devices, self._manifests = self.on_engine(
            lambda engine: (engine.prepare_sync(host), engine.devices(), engine.engine_manifests(tensors))
        )
        return list(zip(addresses, devices, [manifest.digest for manifest in self._manifests], strict=True))

    def arrive(self) -> tuple[list[tuple[str, str, str]], Address]:
        """Return what `prepare_sync` and `door` do, of an engine that comes later: the driver asks it nothing more before it has its
        weights."""
        return self.prepare_sync(), self.door()

    def manifests(self, digests: Collection[str]) -> dict[str, RankManifest]:
        """Those of prepare_sync, by digest."""
        return {m.digest: m for m in self._manifests if m.digest in digests}

    def close(self) -> None:
        if hasattr(self, "loop"):
            self.loop.close()
