"""The producer: keeps as many groups on their way as admission allows, and books what becomes of them.

| done in a pump | by |
|---|---|
| prompts are admitted and asked | Admission, GroupLedger, InFlight |
| responses go to the reward workers, verdicts come back | InFlight |
| whole groups are filtered; those worth training on are stored, the others give their slot back | Screen, FileStore, GroupLedger |

A pump does what can be done now and returns. Around a weight sync the producer is paused: unfinished responses are parked,
nothing is asked, and `resume` goes on with both.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

from mrl.config.root import Config
from mrl.data.prompt_stream import PromptStream
from mrl.loops.collect import sampling_of
from mrl.loops.in_flight import InFlight
from mrl.loops.screen import Screen
from mrl.loops.staleness import ages_of, newest_version
from mrl.observe.ledger_log import Standing
from mrl.pool.file_store import FileStore
from mrl.pool.group_bytes import decode_group, encode_group
from mrl.pool.ledger import Entry, GroupEnd, GroupLedger, GroupState
from mrl.pool.room import admission_of
from mrl.samples import Group, Prompt

log = logging.getLogger(__name__)

COUNTS: tuple[str, ...] = (
    "stream/parked",
    "stream/park_seconds",
    "stream/reprefill_tokens",
)
"""Added up from one step's groups to the next."""

FIRST_STEP_SECONDS = 20.0
"""What a step is taken to last before one was timed."""

HOLDERS: tuple[str, ...] = ("engines", "environments", "verdicts", "slots")
"""What the oldest group may wait for, and with it all admission; slots: a step and its sync, the group being ready."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepGroups:
    """The groups of one step and what is told of them."""

    groups: list[Group]
    """In prompt order; fewer than a batch, possibly none, where the budget is spent."""
    served_version: int
    """The newest version on the tokens that came since the weight sync to the version that is trained; -1 without such a
    sync, or such tokens."""
    metrics: dict[str, float]


class Producer:
    """One run's, over its stream of prompts."""

    def __init__(self, config: Config, prompts: PromptStream, in_flight: InFlight, store: FileStore) -> None:
        self._config, self._prompts, self._in_flight, self._store = config, prompts, in_flight, store
        self._screen, self._sampling = Screen(config), sampling_of(config)
        self._ledger, self._admission = GroupLedger(), admission_of(config)
        self._served = -1
        """The version of the engines; -1 before the first weight sync."""
        self._paused = True
        self._took, self._step_seconds = 0.0, FIRST_STEP_SECONDS
        """When the step before took its groups (monotonic; 0 before the first), and how long after the one before it."""
        self._counts = dict.fromkeys(COUNTS, 0.0)
        self._held = dict.fromkeys(HOLDERS, 0.0)
        """Seconds of pumps by what held them, since the step before took its groups."""

    # -- between two weight syncs --------------------------------------------------------------------------------

    def pump(self, timeout_seconds: float = 0.0) -> Sequence[Any]:
        """Whatever can be done now; waits for the first responses at most so long. Nothing while it is paused.

        Returns what a caller may wait for before the next pump, as the engines know it.
        """
        if self._paused:
            return ()
        self._in_flight.let_calls_last(self._step_seconds, self._ledger.last_of(self._admission.batch))
        if room := self._admission.room(self._ledger):
            self._in_flight.ask(self._admit(room), self._sampling)
        holder, start = self._held_by(), time.monotonic()
        self._in_flight.poll(timeout_seconds)
        self._book()
        self._held[holder] += time.monotonic() - start
        return self._in_flight.under_way()

    def take(self, version: int) -> StepGroups | None:
        """The next groups, given to the step that trains `version`; None while they are on their way."""
        indices = self._admission.next_batch(self._ledger)
        if indices is None:
            return None
        now = time.monotonic()
        if self._took:
            self._step_seconds = now - self._took
        self._took = now
        dropped, used = self._ledger.fruitless, self._admission.used(self._ledger)
        judged, kept = self._store.get(self._ledger.take(indices, version=version)), self._store.metrics()
        screened = self._screen.look(judged)
        self._screen.book(screened)
        groups = screened.scored
        metrics = self._screen.close(groups, version=version, effort=f"{len(indices) + dropped} prompts")
        metrics |= {
            "group/resampled": float(dropped),
            "group/surplus": float(len(self._ledger.entries(GroupState.KEPT))),
            "stream/slots_used": float(used),
        }
        served = self._in_flight.newest_version if version == self._served else -1
        return StepGroups(groups, served, metrics | kept | ages_of(groups, version) | self._take_counts())

    @property
    def stranded(self) -> bool:
        """Whether the engines are lost that were to answer: only a weight sync brings others in."""
        return self._in_flight.stranded

    def sync_due(self, *, shared: bool) -> bool:
        """Whether the engines are to take the newest weights, by stream.sync_every or because the trainer's slots are theirs
        (`shared`) and the next groups are not there."""
        return self._admission.sync_due(self._ledger, shared=shared)

    def waiting_for(self) -> str:
        """The oldest group that no step has taken; where the next step has to wait, what the oldest that is not ready lacks."""
        head, awaited = self._ledger.head(), self._awaited()
        if head is None:
            return "no group is on its way"
        text = f"the oldest of {self._ledger.on_the_way} groups is {head.index}, {head.state.value}"
        if awaited is not None and awaited is not head:
            text += f", the oldest that is not ready {awaited.index}, {awaited.state.value}"
        if awaited is not None and awaited.index in self._in_flight:
            text += f": {self._in_flight.late(awaited.index)}"
        return (
            f"{text}; admitted at version {(awaited or head).admitted_at}, the engines serve {self._served}"
        )

    # -- around a weight sync ------------------------------------------------------------------------------------

    def pause(self) -> None:
        """No response is under way afterwards; those begun are parked."""
        if self._paused:
            return
        start, self._paused = time.monotonic(), True
        parked = self._in_flight.park()
        self._book()
        self._count("stream/parked", len(parked))
        if not self._config.keeps_caches:
            self._count("stream/reprefill_tokens", sum(self._in_flight.num_context(r) for r in parked))
        self._count("stream/park_seconds", time.monotonic() - start)

    def commit(self, version: int) -> None:
        """The engines serve `version`: what it was made of gives its slots back."""
        self._store.release(self._ledger.commit(version))
        self._served = version

    def resume(self) -> None:
        """Goes on with what was parked, and admits; all in one message. Nothing where it is not paused."""
        if not self._paused:
            return
        start, self._paused, self._in_flight.newest_version = time.monotonic(), False, -1
        self._book()  # verdicts that a validation saw
        self._in_flight.go_on(self._admit(self._admission.room(self._ledger)), self._sampling)
        self._count("stream/park_seconds", time.monotonic() - start)

    # -- parts of a pump -----------------------------------------------------------------------------------------

    def _admit(self, count: int) -> list[Prompt]:
        prompts = self._prompts.take(count)
        admitted = self._ledger.admit(count, version=self._served)
        assert admitted == [prompt.index for prompt in prompts], "ledger and stream of prompts have parted"
        return prompts

    def _book(self) -> None:
        for index in self._in_flight.whole():
            if index not in self._ledger:
                continue  # a validation's
            group = self._in_flight.take(index)
            screened = self._screen.look([group])
            if screened.kept:
                self._ledger.keep(index, self._store.put(group))
            else:
                self._screen.book(screened)
                self._ledger.drop(index, screened.dropped()[index])

    def _awaited(self) -> Entry | None:
        """The oldest of the next step's groups that is not ready."""
        return next(self._ledger.unready(self._admission.batch), None)

    def _held_by(self) -> str:
        awaited = self._awaited()
        if awaited is None or awaited.index not in self._in_flight:
            return "slots"
        if not self._in_flight.num_unanswered([awaited.index]):
            return "verdicts"
        return "environments" if self._in_flight.waits_for_environments(awaited.index) else "engines"

    def _count(self, name: str, value: float) -> None:
        self._counts[name] += value

    def _take_counts(self) -> dict[str, float]:
        counts, self._counts = self._counts, dict.fromkeys(COUNTS, 0.0)
        held, self._held = self._held, dict.fromkeys(HOLDERS, 0.0)
        total = sum(held.values()) or 1.0
        return counts | {f"stream/held_by/{holder}": seconds / total for holder, seconds in held.items()}

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def take_standing(self) -> Standing:
        """Where the prompts are; what was dropped is told once."""
        on_the_way = [entry.index for entry in self._ledger.entries(GroupState.MAKING, GroupState.KEPT)]
        return self._screen.take_standing(on_the_way, self._ledger.next_index)

    def state(self) -> dict[str, Any]:
        """Position in the data and ledger as JSON values, and the bytes of the groups that wait for their step and of those
        in the making, with what came of them. While it is paused."""
        assert self._paused, "responses that an engine has are in no checkpoint"
        kept = self._store.get([entry.handle for entry in self._ledger.entries(GroupState.KEPT)])
        making = [self._in_flight.partial(entry.index) for entry in self._ledger.entries(GroupState.MAKING)]
        return {
            "stream": self._prompts.state(),
            "ledger": self._ledger.state(),
            "dropped": [(index, end.value) for index, end in self._screen.dropped.items()],
            "kept": [encode_group(group) for group in kept],
            "making": [encode_group(group) for group in making],
        }

    def restore(self, state: dict[str, Any], *, version: int) -> int:
        """Goes on there with weights of this version. Groups with tokens of later ones, which no longer exist, are asked anew;
        how many. So are groups of more samples than a prompt has now, kept ones of fewer, and all where passes take the engines' routes,
        which end with the processes that have them."""
        self._prompts.restore(state["stream"])
        self._ledger.restore(state["ledger"])
        self._screen.dropped = {index: GroupEnd(name) for index, name in state.get("dropped", ())}
        for entry in self._ledger.entries(GroupState.TAKEN):
            entry.handle = -1  # its samples are trained
        kept, making = (
            [decode_group(data, self._prompts.prompt_at) for data in state[name]]
            for name in ("kept", "making")
        )
        anew = self._config.routing.replay == "engine"
        newer = {group.prompt.index for group in kept + making if newest_version(group) > version}
        lost, size = set(newer), self._sampling.num_samples
        lost |= {group.prompt.index for group in kept if len(group.samples) != size}
        lost |= {g.prompt.index for g in making if any(s.sample_index >= size for s in g.samples)}
        for entry, group in zip(self._ledger.entries(GroupState.KEPT), kept, strict=True):
            if anew or entry.index in lost:
                self._ledger.make_again([entry])
                making.append(group)
            else:
                entry.handle = self._store.put(group)
        making = [Group(g.prompt, ()) if anew or g.prompt.index in lost else g for g in making]
        self._in_flight.restore(making, self._sampling)
        self._tell_age(version)
        return len(newer)

    def _tell_age(self, version: int) -> None:
        """A warning where more groups are on their way, or older ones, than these settings admit."""
        batch, bound = self._admission.batch, self._admission.age_bound
        open_ = self._ledger.entries(GroupState.MAKING, GroupState.KEPT)
        ages = [version + place // batch - entry.admitted_at for place, entry in enumerate(open_)]
        if ages and max(ages) > bound:
            log.warning(
                "%d groups were begun under another stream.max_age or loop.prompts_per_step: until step %d tokens may be %d versions old, "
                "where these settings allow %d; the settings before keep their bound",
                len(open_), version + 1 + (len(open_) - 1) // batch, max(ages), bound,
            )  # fmt: skip
