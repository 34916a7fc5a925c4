"""Which engine has which requests, and what waits to be sent to it. Pure: sends nothing. An engine here is one, or a dp rank of one.

A request is of one engine from `hand_in` until it arrives, finished or parked; those that an engine had which is lost are returned PARKED,
without new tokens, and whoever asked hands them in again. While no engine serves they are nobody's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from mrl.rollout.request import GenerationRequest, Response, Round, sample_of
from mrl.rollout.routing import Router
from mrl.samples import Status

Requested = Round | GenerationRequest


class RequestBook:
    """Of a run's engines."""

    def __init__(self, num_engines: int, *, by_index: bool) -> None:
        """`by_index`: a prompt's engine follows from its index alone."""
        self._router = Router(num_engines, by_index=by_index)
        self._outbox: list[list[Requested]] = [[] for _ in range(num_engines)]
        self._goes_on = [False] * num_engines
        """Whether the next message tells an engine to begin what waited since a park."""
        self._open: list[dict[str, None]] = [{} for _ in range(num_engines)]
        """Requests that an engine has, by id."""
        self._returned: list[Response] = []
        """What engines had that were lost, for whoever takes next."""
        self._homeless: list[Requested] = []
        self._resting: list[Requested] = []
        """Requests that no engine has, since none is left; those that were there at a park."""
        self.num_started_over = 0
        """Requests that were returned so far."""

    # -- to the engines ------------------------------------------------------------------------------------------

    def hand_in(self, requested: Iterable[Requested], *, serves: bool) -> None:
        """`serves`: whether any engine does."""
        waiting, self._homeless = [*self._homeless, *requested], []
        if not serves:
            self._homeless = waiting
            return
        for each in waiting:
            if isinstance(each, GenerationRequest):
                engine = self._router.send(sample_of(each.request_id)[0], 1)
                self._note(engine, each, [each.request_id])
                continue
            for engine, share in self.shares(each).items():
                self._note(engine, share, share.request_ids())

    def _note(self, engine: int, requested: Requested, ids: Sequence[str]) -> None:
        self._outbox[engine].append(requested)
        self._open[engine] |= dict.fromkeys(ids)

    def shares(self, requested: Round) -> dict[int, Round]:
        """The prompts of each engine that has any; from here on they count as its load."""
        shares: dict[int, list[Any]] = {}
        for prompt in requested.prompts:
            engine = self._router.send(prompt[0], requested.sampling.num_samples)
            shares.setdefault(engine, []).append(prompt)
        return {engine: Round(tuple(share), requested.sampling) for engine, share in shares.items()}

    def to_send(self, engine: int) -> list[Requested]:
        """What its next message brings it."""
        asked, self._outbox[engine] = self._outbox[engine], []
        return asked

    def to_go_on(self, engine: int) -> bool:
        """Whether its next message has it begin what waited."""
        goes_on, self._goes_on[engine] = self._goes_on[engine], False
        return goes_on

    def hold(self, parked: Iterable[Response], *, caches_stay: bool) -> None:
        """All engines have parked, which brought these; what they have not begun waits for `go_on`. `caches_stay`: what was parked
        has its cache still."""
        began = (r for r in parked if caches_stay and r.status is Status.PARKED)
        self._router.hold({sample_of(r.request_id)[0] for r in began})
        self._resting, self._homeless = self._resting + self._homeless, []

    def go_on(self) -> None:
        self._router.go_on()
        self._goes_on = [True] * len(self._goes_on)
        self._homeless, self._resting = self._resting + self._homeless, []

    # -- from the engines ----------------------------------------------------------------------------------------

    def arrived(self, responses: Iterable[Response]) -> None:
        """Their requests are no engine's any more."""
        for response in responses:
            prompt = sample_of(response.request_id)[0]
            engine = self._router.engine_of(prompt)
            self._router.ended(prompt)
            if engine is not None:
                self._open[engine].pop(response.request_id, None)

    def lose(self, engines: Sequence[int]) -> int:
        """These are gone with all that they had: how many requests that is."""
        count = 0
        for engine in engines:
            count += len(self._open[engine])
            self._returned += [Response.empty(name, Status.PARKED) for name in self._open[engine]]
            self._open[engine], self._outbox[engine], self._goes_on[engine] = {}, [], False
            self._router.lose(engine)
        self.num_started_over += count
        return count

    def regain(self, engine: int) -> None:
        """Another one is in the place of one that was lost."""
        self._router.regain(engine)

    def take_returned(self) -> list[Response]:
        """What was returned and not taken yet."""
        returned, self._returned = self._returned, []
        return returned

    # -- what there is -------------------------------------------------------------------------------------------

    def has_work(self, engines: Collection[int]) -> bool:
        """Whether any of these has requests to work at."""
        return any(map(self._router.load, engines))

    def waits_in_vain(self, engine: int, seats: int) -> bool:
        """Whether something waits to be sent to an engine that works at once at so many, and has fewer."""
        return bool(self._outbox[engine]) and len(self._open[engine]) <= seats

    def engine_of(self, prompt: int) -> int | None:
        """The engine of a prompt's unfinished requests; None without any."""
        return self._router.engine_of(prompt)
