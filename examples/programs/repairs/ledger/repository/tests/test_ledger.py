import datetime
import unittest

from ledger import Ledger, Money, Posting, Transaction, UnbalancedError, parse_money

DAY = datetime.date(2024, 3, 1)


class LedgerTest(unittest.TestCase):
    def test_amounts(self) -> None:
        self.assertEqual(parse_money("1,234.5"), Money(123450))
        self.assertEqual(str(Money(-123456789)), "-1,234,567.89")
        with self.assertRaises(ValueError):
            parse_money("1,23")

    def test_even_split(self) -> None:
        ledger = Ledger()
        ledger.split(DAY, "rent", Money(90000), "bank", [("rent:ann", 1), ("rent:bob", 2)])
        self.assertEqual(ledger.balance("rent:bob"), Money(60000))
        self.assertEqual(ledger.balance("rent"), Money(90000))

    def test_postings_must_balance(self) -> None:
        with self.assertRaises(UnbalancedError):
            Transaction(DAY, "odd", (Posting("a", Money(1)), Posting("b", Money(-2))))


if __name__ == "__main__":
    unittest.main()
