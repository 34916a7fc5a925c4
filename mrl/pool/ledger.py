"""Group ledger: which groups are in flight, the quota, and the order in which steps take them. Metadata only.

| state | waits for | next |
|---|---|---|
| making | responses and verdicts | kept, or freed: filtered, or given up if no sample has a reward |
| kept | its turn in a batch | taken |
| taken | the engines to serve the version trained on it | freed: trained |

Groups are admitted once, in the order of their prompt indices. Steps take kept groups in the same order.

The in-flight quota, (max_staleness + sync_every) * batch groups, bounds the staleness of every token. A group
in flight counts as one. A step counts as `batch` groups, even if it has fewer, from when it takes them until
the engines serve the version it made. So a group admitted while the engines serve version u has at most
quota - 1 groups ahead, and every step uses `batch` of them: the step that trains this group trains at most
version u + staleness_bound. Later tokens are less stale. A step takes fewer groups only if no other group is
in flight. No group is dropped because it is stale.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mrl.errors import RolloutBufferError


class GroupState(enum.Enum):
    """State of a group in flight."""

    IN_PROGRESS = "making"
    KEPT = "kept"
    TAKEN = "taken"


class GroupEnd(enum.Enum):
    """How a group left the ledger."""

    TRAINED = "trained"
    FILTERED = "filtered"
    GIVEN_UP = "given_up"


@dataclasses.dataclass(slots=True)
class Entry:
    """A group in flight."""

    index: int
    """Prompt index."""
    admitted_at: int
    """Version that the engines served at admission: no token of the group is older."""
    state: GroupState = GroupState.IN_PROGRESS
    group_id: int = -1
    """Group id in the rollout buffer; -1 before it is kept."""
    trained_at: int = -1
    """Version that its step trains; -1 before it is taken."""


class GroupLedger:
    """Groups in flight by prompt index, and counts of those that have left."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._num_taken = 0
        self.num_kept = 0
        """Groups that wait for their turn in a batch."""
        self.next_index = 0
        """Index of the next prompt to admit."""
        self.ends: Counter[GroupEnd] = Counter()
        """Groups that left the ledger since the run began."""
        self.fruitless = 0
        """Groups filtered or given up since the last batch was taken."""
        self.uncommitted: list[int] = []
        """Versions not yet served by the engines, of steps that took a batch (possibly an empty one)."""

    @property
    def num_in_flight(self) -> int:
        """Number of groups in flight that no step has taken yet."""
        return len(self._entries) - self._num_taken

    def __getitem__(self, index: int) -> Entry:
        return self._entries[index]

    def __contains__(self, index: int) -> bool:
        return index in self._entries

    def entries(self, *states: GroupState) -> list[Entry]:
        """Return the groups in these states, in index order."""
        return [entry for entry in self._entries.values() if entry.state in states]

    def head(self) -> Entry | None:
        """Return the oldest group that no step has taken."""
        return next(self._untaken(), None)

    def unready(self, count: int) -> Iterator[Entry]:
        """Yield those of the next `count` groups for a step that are still in the making, oldest first."""
        return (e for e in itertools.islice(self._untaken(), count) if e.state is GroupState.IN_PROGRESS)

    def _untaken(self) -> Iterator[Entry]:
        """Yield the groups that are not taken; taken groups are always the oldest."""
        return itertools.islice(self._entries.values(), self._num_taken, None)

    def admit(self, count: int, *, version: int) -> list[int]:
        """Admit the next `count` prompts while the engines serve `version`; return their indices."""
        indices = list(range(self.next_index, self.next_index + count))
        self._entries |= {index: Entry(index, version) for index in indices}
        self.next_index += count
        return indices

    def keep(self, index: int, handle: int) -> None:
        """Mark a group as ready to train on; `group_id`: its id in the rollout buffer."""
        self._move(index, GroupState.IN_PROGRESS, GroupState.KEPT)
        self._entries[index].group_id = handle

    def drop(self, index: int, end: GroupEnd) -> None:
        """Remove a judged group that is not trained on."""
        self._free(self._expect(index, GroupState.IN_PROGRESS), end)
        self.fruitless += 1

    def batch(self, count: int) -> list[int]:
        """Return up to `count` indices that a step would take now; only verdicts and indices decide."""
        ready = itertools.takewhile(lambda entry: entry.state is GroupState.KEPT, self._untaken())
        return [entry.index for entry in itertools.islice(ready, count)]

    def take(self, indices: list[int], *, version: int) -> list[int]:
        """Give groups of `batch` to the step that trains `version`; return their group ids."""
        for index in indices:
            self._move(index, GroupState.KEPT, GroupState.TAKEN)
            self._entries[index].trained_at = version
        self.fruitless = 0
        self.uncommitted.append(version)
        return [self._entries[index].group_id for index in indices]

    def commit(self, version: int) -> list[int]:
        """Free the groups that made `version`, which the engines now serve; return their group ids."""
        trained = [e for e in self.entries(GroupState.TAKEN) if e.trained_at < version]
        for entry in trained:
            self._free(entry, GroupEnd.TRAINED)
        self.uncommitted = [trained_at for trained_at in self.uncommitted if trained_at >= version]
        return [entry.group_id for entry in trained]

    def return_to_making(self, entries: Iterable[Entry]) -> None:
        """Move kept groups whose samples are not in the checkpoint back to making; they stay in flight."""
        for entry in entries:
            self._move(entry.index, GroupState.KEPT, GroupState.IN_PROGRESS)
            entry.group_id = -1

    def _move(self, index: int, old: GroupState, new: GroupState) -> None:
        self._expect(index, old).state = new
        self._num_taken += (new is GroupState.TAKEN) - (old is GroupState.TAKEN)
        self.num_kept += (new is GroupState.KEPT) - (old is GroupState.KEPT)

    def _expect(self, index: int, state: GroupState) -> Entry:
        entry = self._entries.get(index)
        if entry is None or entry.state is not state:
            current = entry.state.value if entry else "not admitted, or freed"
            raise RolloutBufferError(f"group {index} is {current}; it should be {state.value}")
        return entry

    def _free(self, entry: Entry, end: GroupEnd) -> None:
        del self._entries[entry.index]
        self._num_taken -= entry.state is GroupState.TAKEN
        self.ends[end] += 1

    def state(self) -> dict[str, Any]:
        """Return JSON values for `restore`."""
        entries = [
            dataclasses.asdict(entry) | {"state": entry.state.value} for entry in self._entries.values()
        ]
        ends = {end.value: count for end, count in self.ends.items()}
        counts = {"next_index": self.next_index, "fruitless": self.fruitless}
        return {**counts, "entries": entries, "ends": ends, "uncommitted": list(self.uncommitted)}

    def restore(self, state: Mapping[str, Any]) -> None:
        entries = [
            Entry(e["index"], e["admitted_at"], GroupState(e["state"]), e["group_id"], e["trained_at"])
            for e in state["entries"]
        ]
        self._entries = {entry.index: entry for entry in entries}
        self._num_taken = len(self.entries(GroupState.TAKEN))
        self.num_kept = len(self.entries(GroupState.KEPT))
        self.next_index, self.fruitless = int(state["next_index"]), int(state["fruitless"])
        self.uncommitted = [int(version) for version in state["uncommitted"]]
        self.ends = Counter({GroupEnd(name): count for name, count in state["ends"].items()})


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """Admission rule of a run."""

    batch: int
    """Groups per step."""
    max_staleness: int = 0
    sync_every: int = 1
    """Steps per weight sync."""
    max_dropped: int = 0
    """Groups that may be dropped between two batches before they are no longer replaced."""

    @property
    def slots(self) -> int:
        """In-flight quota: maximum number of groups in flight, those of uncommitted steps included."""
        return (self.max_staleness + self.sync_every) * self.batch

    @property
    def staleness_bound(self) -> int:
        """Maximum staleness of a trained token, in versions."""
        return self.max_staleness + self.sync_every - 1

    def room(self, ledger: GroupLedger) -> int:
        """Return the number of groups that may be admitted now."""
        return 0 if self.drop_budget_spent(ledger) else max(0, self.slots - self.used(ledger))

    def used(self, ledger: GroupLedger) -> int:
        """Return how much of the quota is used, in groups."""
        return ledger.num_in_flight + self.batch * len(ledger.uncommitted)

    def drop_budget_spent(self, ledger: GroupLedger) -> bool:
        """Return True if too many groups were dropped since the last batch."""
        return ledger.fruitless > self.max_dropped

    def sync_due(self, ledger: GroupLedger, *, shared: bool) -> bool:
        """Return True if the engines need the weights of the step that ended. `shared`: they use the
        trainer's slots, so must also resume if the next groups are not ready."""
        return len(ledger.uncommitted) >= self.sync_every or (shared and self.next_batch(ledger) is None)

    def next_batch(self, ledger: GroupLedger) -> list[int] | None:
        """Return the indices of the next step's groups; None while they are in flight.

        Fewer than a batch, possibly none, only if the drop budget is spent and no group is in the making.
        """
        spent = self.drop_budget_spent(ledger)
        if ledger.num_kept < self.batch and not spent:
            return None  # fast path: a waiting step calls this for every group that arrives
        ready = ledger.batch(self.batch)
        if len(ready) == self.batch:
            return ready
        return ready if spent and not ledger.entries(GroupState.IN_PROGRESS) else None
