"""Transactions between accounts, and the balances that follow from them."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Iterator, Sequence

from ledger.money import Money


class UnbalancedError(ValueError):
    """The postings of a transaction do not add up to zero."""


@dataclasses.dataclass(frozen=True)
class Posting:
    """A change of one account, whose name has parts: "expenses:food"."""

    account: str
    amount: Money


@dataclasses.dataclass(frozen=True)
class Transaction:
    """Event of a day: postings that add up to zero."""

    day: datetime.date
    text: str
    postings: tuple[Posting, ...]

    def __post_init__(self) -> None:
        total = sum((posting.amount.cents for posting in self.postings), 0)
        if total:
            raise UnbalancedError(f"{self.text}: the postings add up to {Money(total)}")


class Ledger:
    """All transactions, in order of their days."""

    def __init__(self, transactions: Iterable[Transaction] = ()) -> None:
        self._transactions: list[Transaction] = []
        for transaction in transactions:
            self.add(transaction)

    def __iter__(self) -> Iterator[Transaction]:
        return iter(self._transactions)

    def add(self, transaction: Transaction) -> None:
        """Insert a transaction after those of its day and earlier ones."""
        place = len(self._transactions)
        while place and self._transactions[place - 1].day > transaction.day:
            place -= 1
        self._transactions.insert(place, transaction)

    def split(
        self, day: datetime.date, text: str, amount: Money, source: str, shares: Sequence[tuple[str, int]]
    ) -> Transaction:
        """Pay an amount from one account and divide it among others by weights."""
        parts = amount.share([weight for _, weight in shares])
        postings = [Posting(account, part) for (account, _), part in zip(shares, parts, strict=True)]
        transaction = Transaction(day, text, (Posting(source, -amount), *postings))
        self.add(transaction)
        return transaction

    def balance(self, account: str, until: datetime.date | None = None) -> Money:
        """Return the balance of an account and those below it, at the end of a day."""
        total = Money(0)
        for transaction in self._transactions:
            if until is not None and transaction.day > until:
                break
            for posting in transaction.postings:
                if posting.account == account or posting.account.startswith(f"{account}:"):
                    total += posting.amount
        return total

    def report(self) -> str:
        """Return the accounts with their balances, as aligned lines."""
        names = sorted({posting.account for one in self._transactions for posting in one.postings})
        rows = [(name, str(self.balance(name))) for name in names if self.balance(name)]
        left = max((len(name) for name, _ in rows), default=0)
        right = max((len(amount) for _, amount in rows), default=0)
        return "\n".join(f"{name:<{left}}  {amount:>{right}}" for name, amount in rows)
