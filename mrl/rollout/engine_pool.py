"""All engines as one policy: `generate` returns a completion even if engines are lost.

A lost engine costs the tokens since the last snapshot: other engines continue its requests from there.
Requests wait while no engine serves.
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
    """Generator of completions."""

    async def generate(self, request: GenerationRequest, so_far: Completion | None = None) -> Completion:
        """Return the whole completion of a request; an earlier process generated `so_far` of it."""
        ...


class EngineControl(Protocol):
    """Pause and resume of the policy's engines, for a schedule."""

    newest_version: int
    """Newest weight version of the tokens that arrived since this was set to -1."""

    async def pause(self, *, snapshot: bool) -> PauseTotals:
        """Stop all engines at a token boundary; with `snapshot` fetch the partial rollouts."""
        ...

    def resume(self, *, training: bool = True) -> None:
        """Let the engines step again; with `training` False only requests of a validation run."""
        ...

    @property
    def is_stranded(self) -> bool:
        """Return True if requests wait and no engine serves."""
        ...


class Engines(Policy, EngineControl, Protocol):
    """The policy's engines, for rollouts."""

    def so_far(self, request_id: str) -> Completion | None:
        """Return the partial rollout of an open request as of the last snapshot."""
        ...

    def where(self, request_id: str) -> str:
        """Return which engine has an open request, for messages."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class PauseTotals:
    """Requests and tokens that a pause interrupted, over all engines."""

    num_requests: int = 0
    num_tokens: int = 0
    """Tokens that the engines compute again after the pause."""


@dataclasses.dataclass(slots=True)
class _Open:
    """A request that has no completion yet."""

    so_far: Completion | None
    """Tokens generated before the current engine got the request."""
    latest: Completion | None
    """`so_far` and the tokens of the last snapshot."""
    engine: int | None = None


class EnginePool(Engines):
    """Engines of a run, by number; paused until `resume`. Call all methods from one event loop."""

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
        """Create the pool, without connections.

        Args:
            names: Name of each engine, for messages.
            by_index: Choose a prompt's engine from the prompt's index alone.
            block_of: (engine, number) -> object reference of a block of routes.
            on_lost: Gets (engine, why, kind) when a connection ends; `kind` is its error's class or "".
        """
        self._names, self._secret, self._run_seed = names, secret, run_seed
        self._block_of, self._on_lost = block_of, on_lost
        self._clients: dict[int, EngineClient] = {}
        self._router = Router(len(names), by_index=by_index)
        self._serves = asyncio.Event()
        self._open: dict[str, _Open] = {}
        self.newest_version = -1
        self.num_started_over = 0
        """Requests continued or restarted on another engine."""

    async def connect(self, number: int, address: Address) -> None:
        """Connect a paused engine, which serves after the next `resume`; an unreachable one is lost."""
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

    async def generate(self, request: GenerationRequest, so_far: Completion | None = None) -> Completion:
        name, prompt = request.request_id, sample_of(request.request_id)[0]
        self._open[name] = entry = _Open(so_far, so_far)
        try:
            while True:
                if not self._clients:
                    await self._serves.wait()
                entry.engine = engine = self._router.send(prompt)
                begun = entry.so_far
                try:
                    remainder = request if begun is None else next_request(request, begun, self._run_seed)
                    completion = join_completions(begun, await self._clients[engine].submit(remainder))
                    break
                except EngineLost:
                    self.num_started_over += 1
                    entry.so_far = entry.latest = self._after_loss(entry.latest)
                    entry.engine = None
                finally:
                    self._router.ended(prompt, engine)
        finally:
            del self._open[name]
        if completion.segments:
            self.newest_version = max(self.newest_version, completion.segments[-1].version)
        return completion

    def _after_loss(self, latest: Completion | None) -> Completion | None:
        """Return the tokens to continue from: none if they have routes, which died with the engine."""
        return None if latest is not None and latest.routes is not None else latest

    async def pause(self, *, snapshot: bool) -> PauseTotals:
        pauses = await asyncio.gather(*(self._pause(client, snapshot) for client in self._clients.values()))
        return PauseTotals(sum(p.num_requests for p in pauses), sum(p.num_tokens for p in pauses))

    async def _pause(self, client: EngineClient, snapshot: bool) -> engine_messages.PauseDone | PauseTotals:
        try:
            done, parts = await client.pause(snapshot=snapshot)
        except EngineLost:
            return PauseTotals()
        for part in parts:
            if (entry := self._open.get(part.request_id)) is not None:
                entry.latest = join_completions(entry.so_far, part)
        return done

    def resume(self, *, training: bool = True) -> None:
        self._router.empty_caches()
        for client in self._clients.values():
            client.resume(training=training)

    def so_far(self, request_id: str) -> Completion | None:
        entry = self._open.get(request_id)
        return None if entry is None else entry.latest

    def where(self, request_id: str) -> str:
        entry = self._open.get(request_id)
        if entry is None or entry.engine is None:
            return "in no engine"
        return f"on {self._names[entry.engine]}"

    @property
    def is_stranded(self) -> bool:
        return bool(self._open) and not self._clients

    def late(self, seconds: float) -> list[int]:
        """Return the engines that have had work but made no step for `seconds`. Thread-safe."""
        return [number for number, client in list(self._clients.items()) if client.silent_seconds() > seconds]

    def silent_seconds(self) -> dict[int, float]:
        """Return the seconds since the last step of each engine that has work but does not step."""
        silent = {number: client.silent_seconds() for number, client in self._clients.items()}
        return {number: seconds for number, seconds in silent.items() if seconds}

    def give_up(self, number: int, why: str) -> None:
        """Disconnect an engine, so that others continue its requests; no-op if it is not connected."""
        if (client := self._clients.get(number)) is not None:
            client.give_up(why)

    def prefer(self, prompt: int, engine: int) -> None:
        """Send a prompt's requests to this engine while it serves, until `forget`."""
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
