"""Ray actor of one process of a vLLM engine: its environment, its log file, its threads.

Ray starts the process and carries commands (weight sync, sleep, manifests), but no tokens. One thread owns
the engine (mrl/rollout/engine_loop.py), another the driver's socket (engine_server.py).
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
from mrl.launch.workers import compile_watch, headless_actor, route_blocks
from mrl.models.families import family_of
from mrl.resharding.planner.manifest import RankManifest
from mrl.rollout import vllm_start
from mrl.rollout.end_of_text_ids import end_of_text
from mrl.rollout.engine_client import Address
from mrl.rollout.engine_process import EngineProcess

if TYPE_CHECKING:
    from mrl.resharding.transfer.session import Session
    from mrl.rollout.engine import RolloutEngine
    from mrl.rollout.engine_loop import EngineLoop

_MOST_PROBES = 100
BLAME_SECONDS = 5.0
"""Time after which a process's death on a living node is known everywhere."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineRank:
    """Facts about an engine rank for its trainer rank."""

    address: str
    """Address for the sender, in the form of the configured transport."""
    device: str
    """UUID of its GPU; "cpu" without one."""
    manifest: RankManifest
    """Place of each checkpoint tensor on it, by vLLM's loaders."""


class RolloutActor:
    """An engine, or one dp rank of it, in this process on the first of its nodes."""

    loop: EngineLoop

    def __init__(self, config: Config, part: EngineProcess, log_folder: str) -> None:
        from mrl.launch.cluster.node_facts import listen_on_own_node
        from mrl.launch.workers.actor_log import file_name, redirect

        gc.disable()  # until it has started: garbage collection takes a fifth of the import time
        self._config, self.part, self._log_folder = config, part, log_folder
        redirect(log_folder, file_name(self.part.name))
        listen_on_own_node()
        self._listener = socket.create_server((self.address(), 0))
        self._blocks: dict[int, Any] = {}
        """References to route blocks that the driver has not taken."""
        self._num_blocks = 0

    def address(self) -> str:
        """Return the address of this process's node."""
        import ray

        return ray.util.get_node_ip_address()

    def rendezvous(self) -> vllm_start.Rendezvous:
        """Return the rendezvous of this engine's processes, called on its first process before `start`: the
        first of two consecutive free ports of this node."""
        for _ in range(_MOST_PROBES):
            with socket.socket() as first, socket.socket() as second:
                first.bind(("", 0))
                port = first.getsockname()[1]
                try:
                    second.bind(("", port + 1))
                except OSError:
                    continue
                return self.address(), port
        raise RolloutError(f"{self.part.name}: no two consecutive ports are free on {self.address()}")

    def start(self, meeting: vllm_start.Rendezvous | None, secret: bytes, *further: Any) -> None:
        """Start vLLM without weights; it serves after the first weight sync.

        Args:
            meeting: Rendezvous of the engine's processes.
            secret: Secret that authenticates the driver at `address_for_driver`.
            further: Actors of the engine's other nodes, in order (headless_actor.py), which start at the same
            time.
        """
        from mrl.data.tokenise import decoder
        from mrl.launch.workers.actor_log import file_name
        from mrl.rollout.engine import RolloutEngine
        from mrl.rollout.engine_loop import EngineLoop
        from mrl.rollout.engine_server import EngineServer
        from mrl.tokenizer_folder import load_tokenizer

        names = [part.name for part in self.part.other_nodes()]
        headless_actor.watch(dict(zip(names, further, strict=True)), self._leave)
        path, options = self._config.model.path, vllm_start.run_arguments(self._config, self.part, meeting)
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
        with compile_watch.reporting(self._log_folder, file_name(self.part.name)):
            self.loop.ready.result()
        server.serve(self.loop)
        gc.enable()

    def _keep_block(self, block: np.ndarray) -> int:
        self._num_blocks += 1
        self._blocks[self._num_blocks] = route_blocks.share_block(block)
        return self._num_blocks

    def _blame(self, error: BaseException) -> None:
        """Delay a PeerLost failure: a death on another node of this rank then ends this process first."""
        if isinstance(error, PeerLost) and self.part.nodes > 1:
            time.sleep(BLAME_SECONDS)

    def _leave(self, process: str) -> None:
        headless_actor.leave_without(self.part, process)

    def address_for_driver(self) -> Address:
        """Return the address for the driver."""
        return self._listener.getsockname()[:2]

    def wait_until_free(self, seconds: float) -> None:
        """Wait until no client is connected and the engine has paused, after a rollout worker was lost."""
        self._server.wait_until_free(seconds)

    def take_block(self, number: int) -> list[Any]:
        """Return the reference to a route block, in a list, because Ray resolves a bare one."""
        return [self._blocks.pop(number)]

    def on_engine[R](self, function: Callable[[RolloutEngine], R]) -> R:
        """Run a function of the engine between two engine steps; return its result."""
        return self.loop.call(function).result()

    def receive(self, session: Session) -> None:
        """Run the engine's side of a weight sync, or load what `stage` took; the engine must be paused."""
        self.on_engine(lambda engine: engine.receive(session))

    def stage(self, session: Session) -> None:
        """Start to take a weight sync's bytes while the engine steps; `switch` ends it."""
        self.on_engine(lambda engine: engine.stage(session))
        self._staged_at = self.loop.num_steps

    def switch(self, session: Session) -> int:
        """Load what `stage` took; return the steps since then."""
        steps = self.loop.num_steps - self._staged_at
        self.receive(session)
        return steps

    def prepare_sync(self) -> list[tuple[str, str, str]]:
        """Return (address, device, manifest digest) of each rank of this engine or dp rank. Weights must be
        mapped: the loaders read a module's expert map."""
        from mrl.training.hf.hf_folder import read_config

        on_slot = self._config.sync.transport == "auto"
        host, config = None if on_slot else self.address(), read_config(self._config.model.path)
        tensors = family_of(config).checkpoint_tensors(config)
        addresses, devices, self._manifests = self.on_engine(
            lambda engine: (engine.prepare_sync(host), engine.devices(), engine.engine_manifests(tensors))
        )
        return list(zip(addresses, devices, [manifest.digest for manifest in self._manifests], strict=True))

    def replacement_facts(self) -> tuple[list[tuple[str, str, str]], Address]:
        """Return `prepare_sync` and `address_for_driver` of a replacement; weights follow."""
        return self.prepare_sync(), self.address_for_driver()

    def manifests(self, digests: Collection[str]) -> dict[str, RankManifest]:
        """Return the manifests of prepare_sync with these digests, by digest."""
        return {m.digest: m for m in self._manifests if m.digest in digests}

    def close(self) -> None:
        if hasattr(self, "loop"):
            self.loop.close()
