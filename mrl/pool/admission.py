"""How many groups may be on their way at once, which is what bounds the age of every token. Pure.

Slots are (max_age + sync_every) * batch. A group on its way holds one; a step holds `batch` from when it takes its groups,
however few they are, until the engines serve what it made. So a group that is admitted while the engines serve u has at
most slots - 1 before it, of which every step uses up `batch`, and at most window - 1 groups overtake it: the step that
trains it trains at most u + age_bound, and its later tokens are younger. A step takes fewer groups only where no other
group is on its way. Nothing is ever dropped for its age.
"""

from __future__ import annotations

import dataclasses
import math

from mrl.pool.ledger import Ledger, State


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """The rule of one run."""

    batch: int
    """Groups that a step trains on."""
    max_age: int = 0
    window: int = 1
    """1: strict order; a group may be overtaken by window - 1 later ones."""
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
        return self.max_age + self.sync_every - 1 + math.ceil((self.window - 1) / self.batch)

    def room(self, ledger: Ledger) -> int:
        """Groups that may be admitted now."""
        return 0 if self.is_spent(ledger) else max(0, self.slots - self.used(ledger))

    def used(self, ledger: Ledger) -> int:
        """Slots in use."""
        return ledger.on_the_way + self.batch * len(ledger.uncommitted)

    def is_spent(self, ledger: Ledger) -> bool:
        """Whether too many groups were dropped since the last batch."""
        return ledger.fruitless > self.most_fruitless

    def next_batch(self, ledger: Ledger) -> list[int] | None:
        """Indices of the next step's groups; None while they are on their way.

        They are fewer than a batch, possibly none, only where the budget is spent and no group is on its way.
        """
        ready = ledger.batch(self.batch, window=self.window)
        if len(ready) == self.batch:
            return ready
        finished = self.is_spent(ledger) and not ledger.entries(State.MAKING)
        return ready if finished else None
