"""A run in simulated time: the schedule's real admission, ledger and router over engines and a trainer that are times.

A step goes as in mrl/loops/stream.py; what it would wait for is an event, and the clock goes from one to the next.

| event | leads to |
|---|---|
| a response ends | its engine begins what waits; the group's last one asks for its verdicts |
| a group's verdicts are there | kept, or dropped by the filter, and then another prompt is admitted |

`on_policy` is a stream of age 0: without a filter they ask for the same groups at the same time.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq

from mrl.pool.ledger import Admission, End, Ledger, State
from mrl.rollout.routing import Router
from mrl.simulation.engine import NEVER, Asked, Engine, Running
from mrl.simulation.leaves import Leaves
from mrl.simulation.load import Load

_VERDICTS = -1
"""Stands for an engine's number in the events of the reward workers."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepTimes:
    """One simulated step; seconds are of simulated time."""

    seconds: float
    waited_seconds: float
    """Of the trainer, for its groups."""
    verdict_seconds: float
    """Of these, those in which the oldest group lacked nothing but verdicts."""
    train_seconds: float
    busy_seconds: float
    """Of all engines together."""
    held_seconds: float
    """Of all engines together: free, and idle, because admission gave them nothing to do."""
    tokens: int
    """Trained, prompts counted."""
    ages: dict[int, int]
    """Tokens of the policy by their age in versions."""
    dropped: int
    """Groups that the filter dropped since the step before."""


@dataclasses.dataclass(slots=True)
class _Making:
    """A group on its way."""

    left: int
    """Responses that did not end."""
    versions: dict[int, int]
    """Tokens by the version that made them."""
    tokens: int
    """Of all its samples in the end, prompts counted."""


class World:
    """One run. The ledger is there to be looked at."""

    def __init__(self, leaves: Leaves, admission: Admission, load: Load, *, by_index: bool = False) -> None:
        """`by_index`: a prompt's engine follows from its index, as under on_policy."""
        self.ledger, self.admission, self.now = Ledger(), admission, 0.0
        self._leaves, self._load = leaves, load
        self._engines = [Engine(leaves.engine) for _ in range(leaves.num_engines)]
        self._router = Router(len(self._engines), by_index=by_index)
        self._making: dict[int, _Making] = {}
        self._parked: list[Asked] = []
        self._events: list[tuple[float, int, int]] = []
        """(time, engine, its stamp), or (time, _VERDICTS, group)."""
        self._trained_version = self._served_version = 0
        self._works = False
        """Whether the engines do."""
        self._idle_since: dict[int, float] = {}
        """Engines without work while they could have some."""
        self._held, self._dropped = 0.0, 0

    def run(self, steps: int) -> list[StepTimes]:
        """So many steps from the start of a run."""
        return [self._step() for _ in range(steps)]

    # -- a step --------------------------------------------------------------------------------------------------

    def _step(self) -> StepTimes:
        leaves, start = self._leaves, self.now
        busy, held, dropped = self._busy(), self._held, self._dropped
        waited, verdicts, indices = self._take()
        groups = [self._making.pop(index) for index in indices]
        ages = self._ages(groups)
        tokens = sum(group.tokens for group in groups)
        seconds = leaves.train_seconds(tokens)
        self._learn(seconds)
        self._trained_version += 1
        if self.admission.sync_due(self.ledger, shared=leaves.shares_slots):
            self._sync()
        return StepTimes(
            seconds=self.now - start,
            waited_seconds=waited,
            verdict_seconds=verdicts,
            train_seconds=seconds,
            busy_seconds=self._busy() - busy,
            held_seconds=self._held - held,
            tokens=tokens,
            ages=ages,
            dropped=self._dropped - dropped,
        )

    def _take(self) -> tuple[float, float, list[int]]:
        """Waits for the next groups; (seconds, those for verdicts alone, indices)."""
        self._go_on()
        start, verdicts = self.now, 0.0
        while (indices := self.admission.next_batch(self.ledger)) is None:
            verdicts += self._wait_for_oldest()
        self.ledger.take(indices, version=self._trained_version)
        return self.now - start, verdicts, indices

    def _wait_for_oldest(self) -> float:
        """Until the oldest group that is being made is judged; the seconds in which it lacked verdicts alone."""
        oldest = next(entry.index for entry in self.ledger.entries(State.MAKING))
        answered = None
        while oldest in self.ledger and self.ledger[oldest].state is State.MAKING:
            if answered is None and not self._making[oldest].left:
                answered = self.now
            self._event()
        return 0.0 if answered is None else self.now - answered

    def _learn(self, seconds: float) -> None:
        leaves = self._leaves
        if leaves.shares_slots:
            self._park()
            self._pass(leaves.turn_seconds)
        self._pass(seconds)

    def _sync(self) -> None:
        self._park()
        self._pass(self._leaves.sync_seconds)
        self._served_version = self._trained_version
        self.ledger.commit(self._served_version)

    def _ages(self, groups: list[_Making]) -> dict[int, int]:
        ages: collections.Counter[int] = collections.Counter()
        for group in groups:
            for version, tokens in group.versions.items():
                ages[self._trained_version - version] += tokens
        return dict(ages)

    def _busy(self) -> float:
        return sum(engine.busy_seconds for engine in self._engines)

    # -- events --------------------------------------------------------------------------------------------------

    def _pass(self, seconds: float) -> None:
        """So much time, with all that happens in it."""
        until = self.now + seconds
        while self._events and self._events[0][0] <= until:
            self._event()
        self.now = until

    def _event(self) -> None:
        """The next one."""
        time, number, which = heapq.heappop(self._events)
        if number == _VERDICTS:
            self.now = max(self.now, time)
            self._book(which)
            return
        engine = self._engines[number]
        if which != engine.stamp:
            return  # it was given something, or stopped, since
        self.now = time
        ended = engine.end(time)
        self._begin(number)
        samples, served = self._load.samples, self._served_version
        for response in ended:
            index = response.number // samples
            self._router.ended(index)
            self._answered(index, served, response)

    def _answered(self, index: int, version: int, response: Running) -> None:
        group = self._making[index]
        group.left -= 1
        group.versions[version] = group.versions.get(version, 0) + response.tokens
        if group.left:
            return
        if self._leaves.verdict_seconds:
            heapq.heappush(self._events, (self.now + self._leaves.verdict_seconds, _VERDICTS, index))
        else:
            self._book(index)

    def _book(self, index: int) -> None:
        if self._load.is_kept(index):
            self.ledger.keep(index, handle=index)
            return
        del self._making[index]
        self._dropped += 1
        self.ledger.drop(index, End.FILTERED)
        if self._works:
            self._admit()

    # -- engines -------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Engines that have the newest weights they are to have work again."""
        if self._works or self.ledger.uncommitted:
            return
        self._works = True
        self._router.go_on()
        samples = self._load.samples
        for asked in self._parked:
            self._engines[self._router.send(asked.number // samples, 1)].submit(asked)
        self._parked = []
        self._admit()
        for number in range(len(self._engines)):
            self._begin(number)

    def _admit(self) -> None:
        count = self.admission.room(self.ledger)
        if not count:
            return
        load, given = self._load, set()
        for index in self.ledger.admit(count, version=self._served_version):
            lengths, first = load.lengths(index), index * load.samples
            number = self._router.send(index, load.samples)
            engine, given = self._engines[number], given | {number}
            for sample, tokens in enumerate(lengths):
                engine.submit(Asked(first + sample, tokens, load.prompt_tokens))
            self._making[index] = _Making(load.samples, {}, sum(lengths) + load.samples * load.prompt_tokens)
        for number in given:
            self._begin(number)

    def _begin(self, number: int) -> None:
        engine = self._engines[number]
        time = engine.begin(self.now)
        if time < NEVER:
            heapq.heappush(self._events, (time, number, engine.stamp))
        self._note_idle(number)

    def _note_idle(self, number: int) -> None:
        if self._works and self._engines[number].is_idle:
            self._idle_since.setdefault(number, self.now)
        elif number in self._idle_since:
            self._held += self.now - self._idle_since.pop(number)

    def _park(self) -> None:
        """No engine works afterwards; what they had begun goes on at the next `_go_on`."""
        if not self._works:
            return
        self._pass(self._leaves.park_seconds)
        self._works = False
        for number in range(len(self._engines)):
            self._parked += self._taken_out(number)
            self._note_idle(number)
        self._router.hold()

    def _taken_out(self, number: int) -> list[Asked]:
        """What an engine had begun, with what is left of it."""
        parked = []
        for response, left in self._engines[number].park(self.now):
            index = response.number // self._load.samples
            versions, made = self._making[index].versions, response.tokens - left
            if made:
                versions[self._served_version] = versions.get(self._served_version, 0) + made
            self._router.ended(index)
            parked.append(Asked(response.number, left, response.size - left))
        return parked
