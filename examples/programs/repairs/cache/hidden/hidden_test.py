import unittest

from cache import Cache


class HiddenTest(unittest.TestCase):
    def setUp(self) -> None:
        self.now = 0.0
        self.cache = Cache(2, 10, clock=lambda: self.now)

    def test_setting_again_evicts_nothing(self) -> None:
        self.cache.set("a", 1)
        self.cache.set("b", 2)
        self.cache.set("b", 3)
        self.assertEqual(self.cache.get("a"), 1)
        self.assertEqual(self.cache.statistics.evicted, 0)

    def test_setting_again_is_a_use(self) -> None:
        cache = Cache(3, 10, clock=lambda: self.now)
        for key in "aba":
            cache.set(key, 1)
        self.assertEqual(list(cache), ["b", "a"])
        cache.set("c", 2)
        cache.set("d", 3)
        self.assertEqual(list(cache), ["a", "c", "d"])

    def test_setting_again_prolongs(self) -> None:
        self.cache.set("a", 1)
        self.now = 9
        self.cache.set("a", 2)
        self.now = 15
        self.assertEqual(self.cache.get("a"), 2)

    def test_expired_entries_go_first(self) -> None:
        self.cache.set("a", 1)
        self.now = 5
        self.cache.set("b", 2)
        self.cache.get("a")
        self.now = 11
        self.cache.set("c", 3)
        self.assertEqual(list(self.cache), ["b", "c"])
        self.assertEqual(self.cache.statistics.evicted, 0)


if __name__ == "__main__":
    unittest.main()
