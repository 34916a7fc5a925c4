"""Which groups are on their way from prompt to update, how many may be, and in which order a step takes them. Metadata only, pure.

| state | waits for | then |
|---|---|---|
| making | responses and verdicts | kept, or freed: filtered, or given up where no sample has a reward |
| kept | its turn in a batch | taken |
| taken | the version made of it, on the engines | freed: trained |

Groups are admitted in the order of their prompts' indices, each once. A step takes kept groups in that order.

How many may be on their way at once bounds the age of every token. Slots are (max_age + sync_every) * batch. A group on its
way holds one; a step holds `batch` from when it takes its groups, however few they are, until the engines serve what it made. So a
group that is admitted while the engines serve u has at most slots - 1 before it, of which every step uses up `batch`: the
step that trains it trains at most u + age_bound, and its later tokens are younger. A step takes fewer groups only where no
other group is on its way. Nothing is ever dropped for its age.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mrl.errors import PoolError


class GroupState(enum.Enum):
    """What a group that holds a slot is."""

    MAKING = "making"
    KEPT = "kept"
    TAKEN = "taken"


class GroupEnd(enum.Enum):
    """How a group gave its slot back."""

    TRAINED = "trained"
    FILTERED = "filtered"
    GIVEN_UP = "given_up"


@dataclasses.dataclass(slots=True)
class Entry:
    """One group that holds a slot."""

    index: int
    """Of its prompt."""
    admitted_at: int
    """The version that the engines served then: no token of the group is older."""
    state: GroupState = GroupState.MAKING
    handle: int = -1
    """Of its samples in the store; -1 before it is kept."""
    trained_at: int = -1
    """The version that its step trains; -1 before it is taken."""


class GroupLedger:
    """The groups that hold a slot, by prompt index, and counts of those that gave theirs back."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._num_taken = 0
        self.num_kept = 0
        """Groups that wait for their turn in a batch."""
        self.next_index = 0
        """Of the prompt that is admitted next."""
        self.ends: Counter[GroupEnd] = Counter()
        """Groups that gave their slot back, since the run began."""
        self.fruitless = 0
        """Of these, the filtered and given up since a batch was taken."""
        self.uncommitted: list[int] = []
        """Versions trained by the steps that took a batch, possibly an empty one, whose result the engines do not serve."""

    @property
    def on_the_way(self) -> int:
        """Groups that no step has taken yet."""
        return len(self._entries) - self._num_taken

    def __getitem__(self, index: int) -> Entry:
        return self._entries[index]

    def __contains__(self, index: int) -> bool:
        return index in self._entries

    def entries(self, *states: GroupState) -> list[Entry]:
        """Those in these states, in index order."""
        return [entry for entry in self._entries.values() if entry.state in states]

    def head(self) -> Entry | None:
        """The oldest group that no step has taken."""
        return next(self._untaken(), None)

    def unready(self, count: int) -> Iterator[Entry]:
        """Those in the making of the `count` groups that a step would take next, the oldest first."""
        return (e for e in itertools.islice(self._untaken(), count) if e.state is GroupState.MAKING)

    def _untaken(self) -> Iterator[Entry]:
        """Those after the taken ones, which are the oldest of all."""
        return itertools.islice(self._entries.values(), self._num_taken, None)

    # -- a group's way -------------------------------------------------------------------------------------------

    def admit(self, count: int, *, version: int) -> list[int]:
        """Gives the next `count` prompts a slot each, while the engines serve `version`; their indices."""
        indices = list(range(self.next_index, self.next_index + count))
        self._entries |= {index: Entry(index, version) for index in indices}
        self.next_index += count
        return indices

    def keep(self, index: int, handle: int) -> None:
        """The group is worth training on; its samples lie in the store."""
        self._move(index, GroupState.MAKING, GroupState.KEPT)
        self._entries[index].handle = handle

    def drop(self, index: int, end: GroupEnd) -> None:
        """A judged group that is not trained on."""
        self._free(self._expect(index, GroupState.MAKING), end)
        self.fruitless += 1

    def batch(self, count: int) -> list[int]:
        """Return the indices, at most `count`, that a step would take now. Only verdicts and indices decide."""
        ready = itertools.takewhile(lambda entry: entry.state is GroupState.KEPT, self._untaken())
        return [entry.index for entry in itertools.islice(ready, count)]

    def take(self, indices: list[int], *, version: int) -> list[int]:
        """Gives groups of `batch` to the step that trains `version`; their handles."""
        for index in indices:
            self._move(index, GroupState.KEPT, GroupState.TAKEN)
            self._entries[index].trained_at = version
        self.fruitless = 0
        self.uncommitted.append(version)
        return [self._entries[index].handle for index in indices]

    def commit(self, version: int) -> list[int]:
        """The engines serve `version`: the groups that it was made of give their slots back; their handles."""
        trained = [e for e in self.entries(GroupState.TAKEN) if e.trained_at < version]
        for entry in trained:
            self._free(entry, GroupEnd.TRAINED)
        self.uncommitted = [trained_at for trained_at in self.uncommitted if trained_at >= version]
        return [entry.handle for entry in trained]

    def make_again(self, entries: Iterable[Entry]) -> None:
        """Kept groups whose samples a checkpoint does not hold are in the making again; their slots are their own still."""
        for entry in entries:
            self._move(entry.index, GroupState.KEPT, GroupState.MAKING)
            entry.handle = -1

    def _move(self, index: int, old: GroupState, new: GroupState) -> None:
        self._expect(index, old).state = new
        self._num_taken += (new is GroupState.TAKEN) - (old is GroupState.TAKEN)
        self.num_kept += (new is GroupState.KEPT) - (old is GroupState.KEPT)

    def _expect(self, index: int, state: GroupState) -> Entry:
        entry = self._entries.get(index)
        if entry is None or entry.state is not state:
            found = entry.state.value if entry else "not admitted, or freed"
            raise PoolError(f"group {index} is {found}; it should be {state.value}")
        return entry

    def _free(self, entry: Entry, end: GroupEnd) -> None:
        del self._entries[entry.index]
        self._num_taken -= entry.state is GroupState.TAKEN
        self.ends[end] += 1

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """JSON values that `restore` takes."""
        entries = [
            dataclasses.asdict(entry) | {"state": entry.state.value} for entry in self._entries.values()
        ]
        ends = {end.value: count for end, count in self.ends.items()}
        counts = {"next_index": self.next_index, "fruitless": self.fruitless}
        return {**counts, "entries": entries, "ends": ends, "uncommitted": list(self.uncommitted)}

    def restore(self, state: Mapping[str, Any]) -> None:
        entries = [
            Entry(e["index"], e["admitted_at"], GroupState(e["state"]), e["handle"], e["trained_at"])
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
    """The rule of one run."""

    batch: int
    """Groups that a step trains on."""
    max_age: int = 0
    sync_every: int = 1
    """Steps between two weight syncs."""
    most_fruitless: int = 0
    """Groups that may be dropped between two batches before none are admitted in their place."""

    @property
    def slots(self) -> int:
        """Groups that may be on their way at once."""
        return (self.max_age + self.sync_every) * self.batch

    @property
    def age_bound(self) -> int:
        """Versions that a trained token may be behind at most."""
        return self.max_age + self.sync_every - 1

    def room(self, ledger: GroupLedger) -> int:
        """Groups that may be admitted now."""
        return 0 if self.is_spent(ledger) else max(0, self.slots - self.used(ledger))

    def used(self, ledger: GroupLedger) -> int:
        """Slots in use."""
        return ledger.on_the_way + self.batch * len(ledger.uncommitted)

    def is_spent(self, ledger: GroupLedger) -> bool:
        """Whether too many groups were dropped since the last batch."""
        return ledger.fruitless > self.most_fruitless

    def sync_due(self, ledger: GroupLedger, *, shared: bool) -> bool:
        """Whether the engines are to take the weights of the step that ended. `shared`: they have the trainer's slots, and
        so must go on where the next groups are not there."""
        return len(ledger.uncommitted) >= self.sync_every or (shared and self.next_batch(ledger) is None)

    def next_batch(self, ledger: GroupLedger) -> list[int] | None:
        """Indices of the next step's groups; None while they are on their way.

        They are fewer than a batch, possibly none, only where the budget is spent and no group is on its way.
        """
        spent = self.is_spent(ledger)
        if ledger.num_kept < self.batch and not spent:
            return None  # without a look at each: a step that waits asks for every group that comes
        ready = ledger.batch(self.batch)
        if len(ready) == self.batch:
            return ready
        return ready if spent and not ledger.entries(GroupState.MAKING) else None
