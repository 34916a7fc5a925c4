import unittest

from tables import Table, join


class HiddenTest(unittest.TestCase):
    def test_outer(self) -> None:
        left = Table(("id", "name"), [(1, "ann"), (None, "bob")])
        right = Table(("id", "amount"), [(9, 1), (1, 2), (None, 3)])
        rows = [(1, "ann", 2), (None, "bob", None), (9, None, 1), (None, None, 3)]
        self.assertEqual(join(left, right, ["id"], "outer").rows, rows)
        self.assertEqual(join(left, right, ["id"], "left").rows, rows[:2])

    def test_outer_by_two(self) -> None:
        left = Table(("x", "a", "y"), [(1, "l", 1)])
        right = Table(("y", "x", "b"), [(2, 1, "r")])
        joined = join(left, right, ["x", "y"], "outer")
        self.assertEqual(joined.rows, [(1, "l", 1, None), (1, None, 2, "r")])

    def test_none_comes_last(self) -> None:
        table = Table(("a", "n"), [(None, 1), (2, 2), (None, 3), (1, 4)])
        self.assertEqual(table.sort("a").column("n"), [4, 2, 1, 3])
        self.assertEqual(table.sort("a", reverse=True).column("n"), [2, 4, 1, 3])

    def test_several_columns(self) -> None:
        table = Table(("a", "b"), [(1, None), (None, 1), (1, 0)])
        self.assertEqual(table.sort("a", "b").rows, [(1, 0), (1, None), (None, 1)])


if __name__ == "__main__":
    unittest.main()
