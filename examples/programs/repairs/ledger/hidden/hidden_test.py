import datetime
import unittest

from ledger import Ledger, Money


class HiddenTest(unittest.TestCase):
    def test_thirds(self) -> None:
        self.assertEqual(Money(10000).share([1, 1, 1]), [Money(3334), Money(3333), Money(3333)])
        ledger = Ledger()
        shares = [("a", 1), ("b", 1), ("c", 1)]
        ledger.split(datetime.date(2024, 1, 1), "dinner", Money(10000), "bank", shares)
        self.assertEqual(ledger.balance("bank"), Money(-10000))

    def test_weights_of_zero(self) -> None:
        self.assertEqual(Money(5).share([0, 2, 2]), [Money(0), Money(3), Money(2)])

    def test_debts(self) -> None:
        self.assertEqual(Money(-100).share([1, 2]), [Money(-34), Money(-66)])

    def test_sums(self) -> None:
        for cents in (0, 1, 7, 99, 1001, -1001):
            for weights in ([1], [3, 3, 1], [1, 0, 5, 7]):
                self.assertEqual(sum(part.cents for part in Money(cents).share(weights)), cents)


if __name__ == "__main__":
    unittest.main()
