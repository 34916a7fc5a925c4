import random
import unittest

from versions import Range, Version, newest

ORDER = ["1.0.0-alpha", "1.0.0-alpha.1", "1.0.0-alpha.beta", "1.0.0-beta", "1.0.0-beta.2", "1.0.0-beta.11"]
ORDER += ["1.0.0-rc.9", "1.0.0-rc.10", "1.0.0-rc.10.0", "1.0.0-rc.x", "1.0.0"]


class HiddenTest(unittest.TestCase):
    def test_order(self) -> None:
        shuffled = list(ORDER)
        random.Random(3).shuffle(shuffled)
        self.assertEqual([str(version) for version in sorted(map(Version, shuffled))], ORDER)

    def test_newest(self) -> None:
        versions = [Version(text) for text in ("2.0.0-rc.9", "2.0.0-rc.10")]
        self.assertEqual(str(newest(versions, Range(">=2.0.0-rc.1"))), "2.0.0-rc.10")

    def test_builds_are_equal(self) -> None:
        self.assertEqual(Version("1.0.0-rc.1+a"), Version("1.0.0-rc.1+b"))
        self.assertEqual(len({Version("1.0.0+a"), Version("1.0.0+b")}), 1)


if __name__ == "__main__":
    unittest.main()
