"""How far generation may run ahead, learned: a budget of age inside [0, stream.max_age].

| a step's row says | the budget |
|---|---|
| the effective sample size of some age is below age_budget.min_ess | falls by one |
| as many on end as age_budget.patience: groups were not there when the step asked | rises by one |
| neither, or what was admitted before the last change may still be on its way | stays |

A decision is a function of the rows before it and of nothing else, so that equal rows give equal budgets. The bound of the ages is
stream.max_age's, whatever is decided: a smaller budget only admits fewer prompts (mrl/pool/ledger.py). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.config.sections.stream import AgeBudgetSection

ESS = "policy/ess/"
WAITED = "stream/waited"


class AgeBudget:
    """The budget of one run; begins at 1, or at stream.max_age where that is 0."""

    def __init__(self, section: AgeBudgetSection, *, max_age: int, sync_every: int) -> None:
        self._section, self._max_age, self._sync_every = section, max_age, sync_every
        self.value = min(1, max_age)
        self._waited = 0
        """Rows on end whose step waited."""
        self._settling = 0
        """Rows to come whose step may have been admitted under another budget."""

    def learn(self, row: Mapping[str, float]) -> None:
        """Takes the next step's row."""
        self._waited = self._waited + 1 if row.get(WAITED) else 0
        self._settling = max(0, self._settling - 1)
        ess = [value for name, value in row.items() if name.startswith(ESS)]
        if self._settling:
            return
        if min(ess, default=1.0) < self._section.min_ess:
            self._set(self.value - 1)
        elif self._waited >= self._section.patience:
            self._set(self.value + 1)

    def _set(self, value: int) -> None:
        value = min(max(0, value), self._max_age)
        if value != self.value:
            self._settling = max(value, self.value) + self._sync_every + 1
            self.value, self._waited = value, 0

    def state(self) -> dict[str, Any]:
        """JSON values that `restore` takes."""
        return {"value": self.value, "waited": self._waited, "settling": self._settling}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on there; a smaller stream.max_age bounds the value."""
        self.value = min(int(state["value"]), self._max_age)
        self._waited, self._settling = int(state["waited"]), int(state["settling"])
