"""The rollout buffer of a stream: as many groups on their way as admission allows, and what becomes of them.

| waits for | unblocked by |
|---|---|
| a free slot | `commit` (a weight sync), a group that is filtered |
| a group's verdicts | its task (group.py) |

Groups that are worth training on wait in the store for their step; the others give their slot back. Around a weight sync
nothing is admitted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

from mrl.algorithms.filtering import Decision
from mrl.config.root import Config
from mrl.data.prompt_stream import PromptStream
from mrl.loops.screen import Screen
from mrl.loops.staleness import ages_of, newest_version
from mrl.observe.ledger_log import Standing
from mrl.pool.group_store import GroupStore
from mrl.pool.ledger import Entry, GroupEnd, GroupLedger, GroupState
from mrl.pool.room import admission_of
from mrl.rollout.request import Sampling
from mrl.samples import Group
from mrl.trajectories.group import GroupMaker, OpenGroup
from mrl.trajectories.group_messages import decode_group, encode_group

log = logging.getLogger(__name__)

HOLDERS: tuple[str, ...] = ("engines", "environments", "verdicts", "slots")
"""What the oldest group may wait for, and with it all admission; slots: a step and its sync, the group being ready."""
LOOK_SECONDS = 0.2
"""Between two looks at what is waited for."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepGroups:
    """The groups of one step and what is reported of them."""

    groups: list[Group]
    """In prompt order; fewer than a batch, possibly none, if the budget is spent."""
    served_version: int
    """Newest version on the tokens that came since the weight sync to the version that is trained; -1 without such a
    sync, or such tokens."""
    metrics: dict[str, float]


class RolloutBuffer:
    """One run's, over its stream of prompts. All methods belong to one event loop."""

    def __init__(
        self,
        config: Config,
        prompts: PromptStream,
        rollouts: GroupMaker,
        sampling: Sampling,
        *,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`on_failure`: called with what a group's task raised."""
        self._config, self._prompts, self._rollouts = config, prompts, rollouts
        self.store = GroupStore()
        self._screen, self._sampling, self._on_failure = Screen(config), sampling, on_failure
        self._ledger, self._admission = GroupLedger(), admission_of(config)
        self._open: dict[int, OpenGroup] = {}
        self._decisions: dict[int, Decision] = {}
        """What the filter decided of each group that waits for its step, by its prompt's index."""
        self._served = -1
        """The version of the engines; -1 before the first weight sync."""
        self._admits = False
        self.changed = asyncio.Event()
        """Set when a group has become ready, or was dropped."""
        self._held = dict.fromkeys(HOLDERS, 0.0)
        """Seconds by what the oldest group waited for, since the step before took its groups."""
        self._looking: asyncio.Task[None] | None = None

    # -- between two weight syncs --------------------------------------------------------------------------------

    def take(self, version: int) -> StepGroups | None:
        """Return the next groups, given to the step that trains `version`; None while they are on their way."""
        indices = self._admission.next_batch(self._ledger)
        if indices is None:
            return None
        dropped, used = self._ledger.fruitless, self._admission.used(self._ledger)
        judged = self.store.get(self._ledger.take(indices, version=version))
        screened = self._screen.look_again(judged, [self._decisions.pop(index) for index in indices])
        self._screen.book(screened)
        groups = screened.scored
        metrics = self._screen.close(groups, version=version, effort=f"{len(indices) + dropped} prompts")
        metrics |= {
            "group/resampled": float(dropped),
            "group/surplus": float(len(self._ledger.entries(GroupState.KEPT))),
            "stream/slots_used": float(used),
            "pool/bytes": float(self.store.num_bytes),
        }
        served = self._rollouts.engines.newest_version if version == self._served else -1
        self._admit()
        return StepGroups(groups, served, metrics | ages_of(groups, version) | self._take_held())

    def sync_due(self, *, shared: bool) -> bool:
        """Return True if the engines are to take the newest weights, by stream.sync_every or because the trainer's slots are
        theirs (`shared`) and the next groups are not there."""
        return self._admission.sync_due(self._ledger, shared=shared)

    def waiting_for(self) -> str:
        """Return the oldest group that no step has taken; if the next step has to wait, what the oldest that is not ready
        lacks."""
        head, awaited = self._ledger.head(), self._awaited()
        if head is None:
            return "no group is on its way"
        text = f"the oldest of {self._ledger.on_the_way} groups is {head.index}, {head.state.value}"
        if awaited is not None and awaited is not head:
            text += f", the oldest that is not ready {awaited.index}, {awaited.state.value}"
        if awaited is not None and awaited.index in self._open:
            text += f": {self._rollouts.late(self._open[awaited.index])}"
        return (
            f"{text}; admitted at version {(awaited or head).admitted_at}, the engines serve {self._served}"
        )

    # -- around a weight sync ------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Admit nothing until `resume`."""
        self._admits = False

    def commit(self, version: int) -> None:
        """The engines serve `version`: what it was made of gives its slots back."""
        self.store.release(self._ledger.commit(version))
        self._served = version

    def resume(self) -> None:
        """Admit prompts again."""
        self._admits = True
        self._admit()
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look())

    # -- groups --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start as many groups as there are slots."""
        count = self._admission.room(self._ledger) if self._admits else 0
        if not count:
            return
        prompts = self._prompts.take(count)
        admitted = self._ledger.admit(count, version=self._served)
        assert admitted == [prompt.index for prompt in prompts], "ledger and stream of prompts have parted"
        for prompt in prompts:
            self._track(self._rollouts.start(prompt, self._sampling))

    def _track(self, group: OpenGroup) -> None:
        self._open[group.prompt.index] = group
        group.task.add_done_callback(lambda task: self._ended(group, task))

    def _ended(self, group: OpenGroup, task: asyncio.Task[Group]) -> None:
        """Book a group that is judged."""
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._on_failure(error)
            return
        try:
            self._book(task.result())
            self._admit()
        except Exception as failed:  # numbers that are none
            self._on_failure(failed)
        self.changed.set()

    def _book(self, judged: Group) -> None:
        index = judged.prompt.index
        del self._open[index]
        screened = self._screen.look([judged])
        if screened.kept:
            self._ledger.keep(index, self.store.put(judged))
            (self._decisions[index],) = screened.decisions
        else:
            self._screen.book(screened)
            self._ledger.drop(index, screened.dropped()[index])

    def _awaited(self) -> Entry | None:
        """Return the oldest of the next step's groups that is not ready."""
        return next(self._ledger.unready(self._admission.batch), None)

    async def _look(self) -> None:
        """Note what admission waits for."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            self._held[self._held_by()] += now - before
            before = now

    def _held_by(self) -> str:
        awaited = self._awaited()
        group = self._open.get(awaited.index) if awaited is not None else None
        if group is None:
            return "slots"
        if not group.num_unanswered:
            return "verdicts"
        return "environments" if group.waits_for_environments else "engines"

    def _take_held(self) -> dict[str, float]:
        held, self._held = self._held, dict.fromkeys(HOLDERS, 0.0)
        total = sum(held.values()) or 1.0
        return {f"stream/held_by/{holder}": seconds / total for holder, seconds in held.items()}

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def take_standing(self) -> Standing:
        """Return where the prompts are; what was dropped is told once."""
        on_the_way = [entry.index for entry in self._ledger.entries(GroupState.MAKING, GroupState.KEPT)]
        return self._screen.take_standing(on_the_way, self._ledger.next_index)

    def state(self) -> dict[str, Any]:
        """Return position in the data and ledger as JSON values, and the bytes of the groups that wait for their step and of
        those on their way, with what has come of them. While the engines are paused."""
        kept = self.store.get([entry.handle for entry in self._ledger.entries(GroupState.KEPT)])
        making = [self._rollouts.saved(self._open[e.index]) for e in self._ledger.entries(GroupState.MAKING)]
        return {
            "stream": self._prompts.state(),
            "ledger": self._ledger.state(),
            "dropped": [(index, end.value) for index, end in self._screen.dropped.items()],
            "kept": [encode_group(group) for group in kept],
            "making": [encode_group(group) for group in making],
        }

    def restore(self, state: dict[str, Any], *, version: int) -> int:
        """Continue there with weights of this version. Groups with tokens of later ones, which no longer exist, are generated
        anew; return how many. So are groups of more samples than a prompt has now, kept ones of fewer, and all if passes take
        the engines' routes, which end with the processes that have them."""
        self._prompts.restore(state["stream"])
        self._ledger.restore(state["ledger"])
        self._screen.dropped = {index: GroupEnd(name) for index, name in state["dropped"]}
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
                entry.handle = self.store.put(group)
                (self._decisions[entry.index],) = self._screen.look([group]).decisions
        for group in making:
            records = () if anew or group.prompt.index in lost else group.samples
            self._track(self._rollouts.start(group.prompt, self._sampling, records))
        self._warn_of_age(version)
        return len(newer)

    def _warn_of_age(self, version: int) -> None:
        """Warn if more groups are on their way, or older ones, than these settings admit."""
        batch, bound = self._admission.batch, self._admission.age_bound
        open_ = self._ledger.entries(GroupState.MAKING, GroupState.KEPT)
        ages = [version + place // batch - entry.admitted_at for place, entry in enumerate(open_)]
        if ages and max(ages) > bound:
            log.warning(
                "%d groups were begun under another stream.max_age or loop.prompts_per_step: until step %d tokens may be %d versions old, "
                "where these settings allow %d; the settings before keep their bound",
                len(open_), version + 1 + (len(open_) - 1) // batch, max(ages), bound,
            )  # fmt: skip
