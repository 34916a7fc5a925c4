"""The thin Ray actor around one process of a vLLM engine: its environment, its log file, and rounds in few messages."""

from __future__ import annotations

import dataclasses
import functools
import gc
import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Concatenate

from mrl.config.root import Config
from mrl.errors import PeerLost, RolloutError
from mrl.launch.workers import headless_actor, route_blocks
from mrl.models.families import family_of
from mrl.resharding.planner.manifest import RankManifest
from mrl.rollout import vllm_start
from mrl.rollout.end_of_text_ids import end_of_text
from mrl.rollout.part import Part
from mrl.rollout.request import GenerationRequest, Response, ResponseBatch, Round
from mrl.rollout.stint import Bell, Stint
from mrl.rollout.texts import Texts

if TYPE_CHECKING:
    from mrl.rollout.engine import RolloutEngine

_MOST_PROBES = 100
BLAME_SECONDS = 5.0
"""In which the death of a process on a living node is known everywhere."""


def _blames[**P, R](
    call: Callable[Concatenate[RolloutActor, P], R],
) -> Callable[Concatenate[RolloutActor, P], R]:
    """Where others are gone and one may be of another node of this rank's, the call fails only after that would have ended this
    process, by its name."""

    @functools.wraps(call)
    def waited(actor: RolloutActor, *arguments: P.args, **options: P.kwargs) -> R:
        try:
            return call(actor, *arguments, **options)
        except PeerLost:
            time.sleep(BLAME_SECONDS if actor.part.nodes > 1 else 0.0)
            raise

    return waited


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
    """An engine, or one dp rank of it, stepped in this process, which is on the first of its nodes."""

    engine: RolloutEngine
    texts: Texts

    def __init__(self, config: Config, part: Part, log_folder: str) -> None:
        from mrl.launch.cluster.node_facts import listen_on_own_node
        from mrl.launch.workers.actor_log import file_name, redirect

        gc.disable()  # until it has started: a fifth of the time of imports, which keep what they make
        self._config, self.part = config, part
        redirect(log_folder, file_name(self.part.name))
        listen_on_own_node()
        self.bell = Bell(self.address())

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

    def start(self, meeting: vllm_start.Meeting | None, *further: Any) -> None:
        """Starts vLLM with the model's shape and no weights; it serves after the first weight sync. `further`: the actors of its
        other nodes (headless_actor.py), in their order, which are started at the same time."""
        from mrl.data.tokenise import decoder
        from mrl.rollout.engine import RolloutEngine
        from mrl.tokenizer_folder import load_tokenizer

        names = [part.name for part in self.part.further()]
        headless_actor.watch(dict(zip(names, further, strict=True)), self._leave)
        path, options = self._config.model.path, vllm_start.of_run(self._config, self.part, meeting)
        tokenizer = load_tokenizer(path, trust_remote_code=self._config.model.trust_remote_code)
        ends = end_of_text(tokenizer, path)
        self.texts = Texts(decoder(tokenizer, ends))
        self.engine = RolloutEngine(
            **options,
            sync=self._config.sync,
            stop_token_ids=ends,
            keeps=self._config.keeps_caches,
            on_worker_lost=self._leave,
        )
        gc.enable()

    def _leave(self, process: str) -> None:
        headless_actor.leave_without(self.part, process)

    @_blames
    def tick(
        self, asked: Sequence[Round | GenerationRequest], beat_steps: int, goes_on: bool, *numbers: Any
    ) -> ResponseBatch:
        """Takes new requests, and with `goes_on` those that waited since a park, then steps the engine, so often in a beat, for as many
        as the stint of these numbers says, or until nothing is left; what finished, with its text."""
        stint = Stint(*numbers)
        self._take(asked)
        if goes_on:
            self.engine.go_on()
        since, is_awaited = time.monotonic(), self.engine.works_for(stint.awaited)
        finished, beats = self.engine.step(beat_steps), 1
        while self.engine.goes_on_working(
            self.bell.wants_more(stint, made=beats, since=since)
            and not (is_awaited and not self.engine.works_for(stint.awaited))
        ):
            finished += self.engine.step(beat_steps)
            beats += 1
        return self._told(self.texts.told(finished))

    @_blames
    def park(self, asked: Sequence[Round | GenerationRequest], max_steps: int) -> ResponseBatch:
        """What had finished, and every request that was begun, PARKED, or whole where so many steps end them all; the
        others, `asked` too, wait."""
        self._take(asked)
        return self._told(self.texts.told(self.engine.park(max_steps)))

    def _take(self, asked: Sequence[Round | GenerationRequest]) -> None:
        for each in asked:
            requests = each.requests() if isinstance(each, Round) else [each]
            self.texts.expect(requests)
            self.engine.submit(requests)

    @_blames
    def generate(self, share: Round, deadline_seconds: float) -> ResponseBatch:
        """All responses to this engine's prompts in one call, without their texts."""
        deadline = time.monotonic() + deadline_seconds
        return self._told(self.engine.generate(share.requests(), deadline=deadline))

    def _told(self, responses: Sequence[Response]) -> ResponseBatch:
        """What the driver gets of responses: of their routes a handle."""
        batch = ResponseBatch.of(responses, route_blocks.share_block)
        return dataclasses.replace(batch, bell=self.bell.address)

    def prepare_sync(self) -> list[tuple[str, str, str]]:
        """Address, device and manifest's digest of this engine's ranks, or of this dp rank's. Their weights must be
        mapped: the loaders read a module's map of experts."""
        from mrl.training.hf.hf_folder import read_config

        on_slot = self._config.sync.transport == "auto"
        addresses = self.engine.prepare_sync(None if on_slot else self.address())
        config = read_config(self._config.model.path)
        self._manifests = self.engine.engine_manifests(family_of(config).checkpoint_tensors(config))
        digests = [manifest.digest for manifest in self._manifests]
        return list(zip(addresses, self.engine.devices(), digests, strict=True))

    def manifests(self, digests: Collection[str]) -> dict[str, RankManifest]:
        """Those of prepare_sync, by digest."""
        return {m.digest: m for m in self._manifests if m.digest in digests}

    def close(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()
