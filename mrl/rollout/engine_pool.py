"""All engines as one policy: `generate` returns a completion, wherever engines live and whatever becomes of them.

A lost engine costs the tokens since the last snapshot: what it had is generated elsewhere from there. While no engine serves
requests wait.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from msgspec import MsgspecError

from mrl.rollout import engine_messages
from mrl.rollout.engine_client import Address, EngineClient, EngineLost
from mrl.rollout.request import Completion, GenerationRequest, join_completions, next_request
from mrl.rollout.router import Router
from mrl.rollout.seeds import sample_of


class Policy(Protocol):
    """Whoever generates."""

    async def generate(self, asked: GenerationRequest, so_far: Completion | None = None) -> Completion:
        """Return the whole completion of a request, of which `so_far` came before this process began."""
        ...


class EngineControl(Protocol):
    """The policy's engines, as a schedule needs them."""

    newest_version: int
    """Newest version on the tokens that came since it was set to -1."""

    async def pause(self, *, snapshot: bool) -> Interrupted:
        """Stop all engines at a token boundary. `snapshot`: fetch what has come so far, for checkpoints and
        for losses."""
        ...

    def resume(self, *, training: bool = True) -> None:
        """Let the engines step again; with `training` False only requests of a validation."""
        ...

    @property
    def is_stranded(self) -> bool:
        """Return True if requests wait and no engine serves."""
        ...


class Engines(Policy, EngineControl, Protocol):
    """The policy's engines, as rollouts need them."""

    def so_far(self, request_id: str) -> Completion | None:
        """Return what the last snapshot has of an open request, earlier parts included."""
        ...

    def where(self, request_id: str) -> str:
        """Return who has an open request, for people."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Interrupted:
    """What a pause interrupted, over all engines."""

    num_requests: int = 0
    num_tokens: int = 0
    """Tokens that are computed again after it."""


@dataclasses.dataclass(slots=True)
class _Open:
    """A request that has no completion yet."""

    so_far: Completion | None
    """What came before the engine that has it got it."""
    latest: Completion | None
    """The same with the last snapshot."""
    engine: int | None = None


class EnginePool(Engines):
    """The engines of a run, by number; paused until `resume`. All methods belong to one event loop."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        secret: bytes,
        run_seed: int,
        by_index: bool = True,
        block_of: Callable[[int, int], Awaitable[Any]] | None = None,
        on_lost: Callable[[int, str, str], None] = lambda number, why, kind: None,
    ) -> None:
        """`names`: of each engine, for people. `by_index`: a prompt's engine follows from its index alone. `block_of(engine,
        number)`: the handle of a block of routes. `on_lost(engine, why, kind)`: called when an engine's connection ends; `kind` is
        the class of the error if the engine said that it failed, else empty."""
        self._names, self._secret, self._run_seed = names, secret, run_seed
        self._block_of, self._on_lost = block_of, on_lost
        self._clients: dict[int, EngineClient] = {}
        self._router = Router(len(names), by_index=by_index)
        self._serves = asyncio.Event()
        self._open: dict[str, _Open] = {}
        self.newest_version = -1
        self.num_started_over = 0
        """Requests that were generated again elsewhere."""

    async def connect(self, number: int, address: Address) -> None:
        """Connect an engine, which is paused and serves from the next `resume` on. One that cannot be reached is lost."""
        block_of = self._block_of
        client = EngineClient(
            self._names[number],
            on_lost=lambda why: self._lost(number, client, why),
            block_of=None if block_of is None else lambda block: block_of(number, block),
        )
        try:
            await client.connect(address, self._secret)
        except (OSError, MsgspecError) as error:
            self._on_lost(number, f"{self._names[number]} could not be reached: {error!r}", "")
            return
        self._clients[number] = client
        self._router.add(number)
        self._serves.set()

    async def generate(self, asked: GenerationRequest, so_far: Completion | None = None) -> Completion:
        name, prompt = asked.request_id, sample_of(asked.request_id)[0]
        self._open[name] = own = _Open(so_far, so_far)
        try:
            while True:
                if not self._clients:
                    await self._serves.wait()
                own.engine = engine = self._router.send(prompt)
                begun = own.so_far
                try:
                    request = asked if begun is None else next_request(asked, begun, self._run_seed)
                    completion = join_completions(begun, await self._clients[engine].submit(request))
                    break
                except EngineLost:
                    self.num_started_over += 1
                    own.so_far = own.latest = self._after_loss(own.latest)
                    own.engine = None
                finally:
                    self._router.ended(prompt, engine)
        finally:
            del self._open[name]
        if completion.segments:
            self.newest_version = max(self.newest_version, completion.segments[-1].version)
        return completion

    def _after_loss(self, latest: Completion | None) -> Completion | None:
        """Return what a request continues from; its routes end with the process that has them."""
        return None if latest is not None and latest.routes is not None else latest

    async def pause(self, *, snapshot: bool) -> Interrupted:
        done = await asyncio.gather(*(self._pause(client, snapshot) for client in self._clients.values()))
        return Interrupted(sum(each.num_requests for each in done), sum(each.num_tokens for each in done))

    async def _pause(self, client: EngineClient, snapshot: bool) -> engine_messages.PauseDone | Interrupted:
        try:
            done, parts = await client.pause(snapshot=snapshot)
        except EngineLost:
            return Interrupted()
        for part in parts:
            if (own := self._open.get(part.request_id)) is not None:
                own.latest = join_completions(own.so_far, part)
        return done

    def resume(self, *, training: bool = True) -> None:
        self._router.empty_caches()
        for client in self._clients.values():
            client.resume(training=training)

    def so_far(self, request_id: str) -> Completion | None:
        own = self._open.get(request_id)
        return None if own is None else own.latest

    def where(self, request_id: str) -> str:
        own = self._open.get(request_id)
        if own is None or own.engine is None:
            return "in no engine"
        return f"on {self._names[own.engine]}"

    @property
    def is_stranded(self) -> bool:
        return bool(self._open) and not self._clients

    def late(self, seconds: float) -> list[int]:
        """Return the engines that have had work and made no step for so long. May be called in any thread."""
        return [number for number, client in list(self._clients.items()) if client.silent_seconds() > seconds]

    def silent_seconds(self) -> dict[int, float]:
        """Return how long each engine has had work and made no step; without those that step."""
        silent = {number: client.silent_seconds() for number, client in self._clients.items()}
        return {number: seconds for number, seconds in silent.items() if seconds}

    def give_up(self, number: int, why: str) -> None:
        """Take what an engine has elsewhere; nothing if it is not connected."""
        if (client := self._clients.get(number)) is not None:
            client.give_up(why)

    def prefer(self, prompt: int, engine: int) -> None:
        """Let an engine take a prompt's requests while it serves, whatever the router would choose, until
        `forget`."""
        self._router.prefer(prompt, engine)

    def forget(self, prompt: int) -> None:
        """Undo `prefer`."""
        self._router.forget(prompt)

    def close(self) -> None:
        """End all connections."""
        for client in list(self._clients.values()):
            client.give_up("the run ended")

    def _lost(self, number: int, client: EngineClient, why: str) -> None:
        if self._clients.get(number) is not client:
            return
        del self._clients[number]
        self._router.remove(number)
        if not self._clients:
            self._serves.clear()
        self._on_lost(number, why, client.failure.kind if client.failure is not None else "")
