import unittest

from cache import Cache, cached


class CacheTest(unittest.TestCase):
    def setUp(self) -> None:
        self.now = 0.0
        self.cache = Cache(2, 10, clock=lambda: self.now)

    def test_least_recently_used_goes(self) -> None:
        self.cache.set("a", 1)
        self.cache.set("b", 2)
        self.cache.get("a")
        self.cache.set("c", 3)
        self.assertEqual(list(self.cache), ["a", "c"])

    def test_entries_expire(self) -> None:
        self.cache.set("a", 1)
        self.now = 10
        self.assertIsNone(self.cache.get("a"))
        self.assertEqual(self.cache.statistics.expired, 1)

    def test_decorator(self) -> None:
        calls = []

        @cached(self.cache)
        def double(number: int) -> int:
            calls.append(number)
            return 2 * number

        self.assertEqual([double(3), double(3)], [6, 6])
        self.assertEqual(calls, [3])


if __name__ == "__main__":
    unittest.main()
