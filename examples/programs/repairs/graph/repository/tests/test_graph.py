import unittest

from graph import CycleError, Graph, levels, order

CHAIN = Graph.parse("release: test  # all\ntest: build\nbuild:\n\nlint:\n")


class GraphTest(unittest.TestCase):
    def test_order(self) -> None:
        self.assertEqual(order(CHAIN), ["build", "test", "release", "lint"])

    def test_levels(self) -> None:
        self.assertEqual(levels(CHAIN), [["build", "lint"], ["test"], ["release"]])

    def test_affected(self) -> None:
        self.assertEqual(CHAIN.affected(["test"]), {"test", "release"})
        self.assertEqual(list(CHAIN.part("test")), ["test", "build"])

    def test_cycles(self) -> None:
        with self.assertRaises(CycleError):
            order(Graph({"a": ["b"], "b": ["a"]}))

    def test_bad_lines(self) -> None:
        for text in ("a b: c", "a", ": c"):
            with self.assertRaises(ValueError):
                Graph.parse(text)


if __name__ == "__main__":
    unittest.main()
