import unittest

from tables import Table, join

PEOPLE = Table(("id", "name"), [(1, "ann"), (2, "bob"), (3, "cy")])
SALES = Table(("id", "amount"), [(2, 5), (1, 7), (2, 9)])


class TableTest(unittest.TestCase):
    def test_inner(self) -> None:
        joined = join(PEOPLE, SALES, ["id"])
        self.assertEqual(joined.rows, [(1, "ann", 7), (2, "bob", 5), (2, "bob", 9)])

    def test_group(self) -> None:
        totals = SALES.group("id", total=("amount", sum), sales=("amount", len))
        self.assertEqual(totals.sort("id").rows, [(1, 7, 1), (2, 14, 2)])

    def test_csv(self) -> None:
        table = Table.read_csv('a,b\n1,"x, y"\n,z\n')
        self.assertEqual(table.rows, [("1", "x, y"), (None, "z")])
        self.assertEqual(table.where(lambda row: row["a"] is None).column("b"), ["z"])

    def test_sort(self) -> None:
        table = Table(("a", "b"), [(2, 1), (1, 2), (1, 1)])
        self.assertEqual(table.sort("a", "b").rows, [(1, 1), (1, 2), (2, 1)])


if __name__ == "__main__":
    unittest.main()
