"""Rollout buffer of a stream: keeps as many groups in flight as admission allows, and tracks how they end.

| waits for | unblocked by |
|---|---|
| room in the in-flight quota | `commit` (a weight sync), a group that is filtered |
| a group's verdicts | its task (group.py) |

Groups worth training on wait in the store for their step; others make room in the quota. Around a weight
sync nothing is admitted."""

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
from mrl.loops.group_filter import GroupFilter
from mrl.loops.staleness import newest_version, staleness_metrics
from mrl.observe.ledger_log import InFlightPrompts
from mrl.pool.group_store import GroupStore
from mrl.pool.ledger import Entry, GroupEnd, GroupLedger, GroupState
from mrl.pool.quota import admission_rule
from mrl.rollout.request import Sampling
from mrl.samples import Group
from mrl.trajectories.group import GroupInFlight, GroupMaker
from mrl.trajectories.group_messages import decode_group, encode_group

log = logging.getLogger(__name__)

WAIT_REASONS: tuple[str, ...] = ("engines", "environments", "verdicts", "slots")
"""What the oldest group, and so admission, waits for; slots: a step and its sync, as the group is ready."""
CHECK_SECONDS = 0.2
"""Interval between two checks of what the oldest group waits for."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepGroups:
    """Groups of one step and their metrics."""

    groups: list[Group]
    """In prompt order; fewer than a batch, possibly none, if the budget is spent."""
    served_version: int
    """Newest version of the tokens since the sync to the trained version; -1 without that sync or tokens."""
    metrics: dict[str, float]


class RolloutBuffer:
    """Rollout buffer of one run, over its prompt stream. All methods belong to one event loop."""

    def __init__(
        self,
        config: Config,
        prompts: PromptStream,
        rollouts: GroupMaker,
        sampling: Sampling,
        *,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`on_failure`: called with the exception of a group's task."""
        self._config, self._prompts, self._rollouts = config, prompts, rollouts
        self.store = GroupStore()
        self._screen, self._sampling, self._on_failure = GroupFilter(config), sampling, on_failure
        self._ledger, self._admission = GroupLedger(), admission_rule(config)
        self._open: dict[int, GroupInFlight] = {}
        self._decisions: dict[int, Decision] = {}
        """The filter's decision on each stored group, by prompt index."""
        self._served = -1
        """Version that the engines serve; -1 before the first weight sync."""
        self._admits = False
        self.changed = asyncio.Event()
        """Set when a group becomes ready or is dropped."""
        self._held = dict.fromkeys(WAIT_REASONS, 0.0)
        """Seconds that the oldest group waited, by reason, since the last step took its groups."""
        self._looking: asyncio.Task[None] | None = None

    # -- between two weight syncs ----------------------------------------------------------------------------

    def take(self, version: int) -> StepGroups | None:
        """Return the next groups, assigned to the step that trains `version`; None while in flight."""
        indices = self._admission.next_batch(self._ledger)
        if indices is None:
            return None
        dropped, used = self._ledger.fruitless, self._admission.used(self._ledger)
        judged = self.store.get(self._ledger.take(indices, version=version))
        screened = self._screen.refilter(judged, [self._decisions.pop(index) for index in indices])
        self._screen.book(screened)
        groups = screened.scored
        metrics = self._screen.finish_step(
            groups, version=version, effort=f"{len(indices) + dropped} prompts"
        )
        metrics |= {
            "group/resampled": float(dropped),
            "group/surplus": float(len(self._ledger.entries(GroupState.KEPT))),
            "stream/quotas_used": float(used),
            "buffer/bytes": float(self.store.num_bytes),
        }
        served = self._rollouts.engines.newest_version if version == self._served else -1
        self._admit()
        return StepGroups(groups, served, metrics | staleness_metrics(groups, version) | self._take_held())

    def sync_due(self, *, shared: bool) -> bool:
        """Return True if the engines need the newest weights: by stream.sync_every, or because they share the
        trainer's slots (`shared`) and the next groups are not ready."""
        return self._admission.sync_due(self._ledger, shared=shared)

    def waiting_for(self) -> str:
        """Describe the oldest untaken group, and what the oldest unfinished group of the next step lacks."""
        head, awaited = self._ledger.head(), self._awaited()
        if head is None:
            return "no group is in flight"
        text = (
            f"the oldest of {self._ledger.num_in_flight} groups in flight is {head.index}, {head.state.value}"
        )
        if awaited is not None and awaited is not head:
            text += f", the oldest unfinished one is {awaited.index}, {awaited.state.value}"
        if awaited is not None and awaited.index in self._open:
            text += f": {self._rollouts.late(self._open[awaited.index])}"
        return (
            f"{text}; admitted at version {(awaited or head).admitted_at}, the engines serve {self._served}"
        )

    # -- around a weight sync --------------------------------------------------------------------------------

    def stop(self) -> None:
        """Admit nothing until `resume`."""
        self._admits = False

    def commit(self, version: int) -> None:
        """Note that the engines serve `version`; the groups trained into it make room in the quota."""
        self.store.release(self._ledger.commit(version))
        self._served = version

    def resume(self) -> None:
        """Admit prompts again."""
        self._admits = True
        self._admit()
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look())

    # -- groups ----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start as many groups as the quota has room for."""
        count = self._admission.room(self._ledger) if self._admits else 0
        if not count:
            return
        prompts = self._prompts.take(count)
        admitted = self._ledger.admit(count, version=self._served)
        assert admitted == [prompt.index for prompt in prompts], "group ledger and prompt stream disagree"
        for prompt in prompts:
            self._track(self._rollouts.start(prompt, self._sampling))

    def _track(self, group: GroupInFlight) -> None:
        self._open[group.prompt.index] = group
        group.task.add_done_callback(lambda task: self._ended(group, task))

    def _ended(self, group: GroupInFlight, task: asyncio.Task[Group]) -> None:
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._on_failure(error)
            return
        try:
            self._book(task.result())
            self._admit()
        except Exception as failure:  # for example BadNumbers
            self._on_failure(failure)
        self.changed.set()

    def _book(self, judged: Group) -> None:
        index = judged.prompt.index
        del self._open[index]
        screened = self._screen.filter([judged])
        if screened.kept:
            self._ledger.keep(index, self.store.put(judged))
            (self._decisions[index],) = screened.decisions
        else:
            self._screen.book(screened)
            self._ledger.drop(index, screened.dropped()[index])

    def _awaited(self) -> Entry | None:
        """Return the oldest unfinished group of the next step."""
        return next(self._ledger.unready(self._admission.batch), None)

    async def _look(self) -> None:
        """Add up the time by what admission waits for."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            now = time.monotonic()
            self._held[self._held_by()] += now - before
            before = now

    def _held_by(self) -> str:
        awaited = self._awaited()
        group = self._open.get(awaited.index) if awaited is not None else None
        if group is None:
            return "slots"
        if not group.num_incomplete:
            return "verdicts"
        return "environments" if group.waits_for_environments else "engines"

    def _take_held(self) -> dict[str, float]:
        held, self._held = self._held, dict.fromkeys(WAIT_REASONS, 0.0)
        total = sum(held.values()) or 1.0
        return {f"stream/held_by/{holder}": seconds / total for holder, seconds in held.items()}

    # -- checkpoints -----------------------------------------------------------------------------------------

    def take_standing(self) -> InFlightPrompts:
        """Return where the prompts are; dropped prompts are reported once."""
        in_flight = [entry.index for entry in self._ledger.entries(GroupState.IN_PROGRESS, GroupState.KEPT)]
        return self._screen.take_standing(in_flight, self._ledger.next_index)

    def state(self) -> dict[str, Any]:
        """Return the data position and the ledger as JSON values, and the stored and in-flight groups as
        bytes. Call it only while the engines are paused."""
        kept = self.store.get([entry.group_id for entry in self._ledger.entries(GroupState.KEPT)])
        making = [
            self._rollouts.saved(self._open[e.index]) for e in self._ledger.entries(GroupState.IN_PROGRESS)
        ]
        return {
            "stream": self._prompts.state(),
            "ledger": self._ledger.state(),
            "dropped": [(index, end.value) for index, end in self._screen.dropped.items()],
            "kept": [encode_group(group) for group in kept],
            "making": [encode_group(group) for group in making],
        }

    def restore(self, state: dict[str, Any], *, version: int) -> int:
        """Continue from `state` with weights of `version`; return how many groups have tokens of later ones.

        These are generated again. So are groups with more samples than a prompt has now, stored groups with
        fewer, and all groups if passes replay the engines' routes, which end with their processes."""
        self._prompts.restore(state["stream"])
        self._ledger.restore(state["ledger"])
        self._screen.dropped = {index: GroupEnd(name) for index, name in state["dropped"]}
        for entry in self._ledger.entries(GroupState.TAKEN):
            entry.group_id = -1  # its samples have been trained on
        kept, making = (
            [decode_group(data, self._prompts.prompt_at) for data in state[name]]
            for name in ("kept", "making")
        )
        loses_routes = self._config.routing.replay == "engine"
        newer = {group.prompt.index for group in kept + making if newest_version(group) > version}
        lost, size = set(newer), self._sampling.num_samples
        lost |= {group.prompt.index for group in kept if len(group.samples) != size}
        lost |= {g.prompt.index for g in making if any(s.sample_index >= size for s in g.samples)}
        for entry, group in zip(self._ledger.entries(GroupState.KEPT), kept, strict=True):
            if loses_routes or entry.index in lost:
                self._ledger.return_to_making([entry])
                making.append(group)
            else:
                entry.group_id = self.store.put(group)
                (self._decisions[entry.index],) = self._screen.filter([group]).decisions
        for group in making:
            records = () if loses_routes or group.prompt.index in lost else group.samples
            self._track(self._rollouts.start(group.prompt, self._sampling, records))
        self._warn_of_age(version)
        return len(newer)

    def _warn_of_age(self, version: int) -> None:
        """Warn if more or staler groups are in flight than these settings admit."""
        batch, bound = self._admission.batch, self._admission.staleness_bound
        open_ = self._ledger.entries(GroupState.IN_PROGRESS, GroupState.KEPT)
        ages = [version + place // batch - entry.admitted_at for place, entry in enumerate(open_)]
        if ages and max(ages) > bound:
            log.warning(
                "%d groups were started under another stream.max_staleness or loop.prompts_per_step: until "
                "step %d tokens may be %d versions stale, but these settings allow %d; "
                "the old ones keep their bound",
                len(open_), version + 1 + (len(open_) - 1) // batch, max(ages), bound)  # fmt: skip
