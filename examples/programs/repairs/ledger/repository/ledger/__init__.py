"""A double-entry ledger in whole cents."""

from ledger.accounts import Ledger, Posting, Transaction, UnbalancedError
from ledger.money import Money, parse_money

__all__ = ["Ledger", "Money", "Posting", "Transaction", "UnbalancedError", "parse_money"]
