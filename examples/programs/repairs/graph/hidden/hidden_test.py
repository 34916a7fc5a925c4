import random
import unittest

from graph import CycleError, Graph, levels, order


class HiddenTest(unittest.TestCase):
    def test_diamond(self) -> None:
        graph = Graph({"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": []})
        self.assertEqual(order(graph), ["d", "b", "c", "a"])
        self.assertEqual(levels(graph), [["d"], ["b", "c"], ["a"]])

    def test_cycle_without_the_way_to_it(self) -> None:
        graph = Graph({"start": ["x"], "x": ["y"], "y": ["z"], "z": ["x"]})
        with self.assertRaises(CycleError) as caught:
            order(graph)
        self.assertEqual(caught.exception.cycle, ["x", "y", "z", "x"])

    def test_itself(self) -> None:
        with self.assertRaises(CycleError) as caught:
            order(Graph({"a": ["a"]}))
        self.assertEqual(caught.exception.cycle, ["a", "a"])

    def test_random(self) -> None:
        draw = random.Random(1)
        for _ in range(50):
            names = [str(number) for number in range(12)]
            graph = Graph({name: draw.sample(names[:n], draw.randint(0, n)) for n, name in enumerate(names)})
            result = order(graph)
            self.assertEqual(sorted(result), sorted(names))
            for name in names:
                for need in graph.needs(name):
                    self.assertLess(result.index(need), result.index(name))


if __name__ == "__main__":
    unittest.main()
