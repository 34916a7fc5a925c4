"""Amounts of money: whole cents, so that sums are exact."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

_FORM = re.compile(r"(?P<sign>-?)(?P<whole>\d{1,3}(?:,\d{3})*|\d+)(?:\.(?P<cents>\d{1,2}))?")


@dataclasses.dataclass(frozen=True, order=True)
class Money:
    """An amount in cents; negative amounts are debts."""

    cents: int

    def __add__(self, other: Money) -> Money:
        return Money(self.cents + other.cents)

    def __sub__(self, other: Money) -> Money:
        return Money(self.cents - other.cents)

    def __neg__(self) -> Money:
        return Money(-self.cents)

    def __bool__(self) -> bool:
        return self.cents != 0

    def __str__(self) -> str:
        sign = "-" if self.cents < 0 else ""
        whole, cents = divmod(abs(self.cents), 100)
        return f"{sign}{whole:,}.{cents:02d}"

    def share(self, weights: Sequence[int]) -> list[Money]:
        """Split the amount by weights. The shares add up to the amount.

        Cents that are left over go one by one to the first shares with a weight.
        """
        total = sum(weights)
        if total <= 0 or min(weights) < 0:
            raise ValueError("weights must not be negative, and one must be positive")
        return [Money(self.cents * weight // total) for weight in weights]


def parse_money(text: str) -> Money:
    """Read an amount like "1,234.50", "-3" or "0.5"."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not an amount: {text!r}")
    cents = int(match["whole"].replace(",", "")) * 100 + int((match["cents"] or "0").ljust(2, "0"))
    return Money(-cents if match["sign"] else cents)
