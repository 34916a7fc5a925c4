import unittest

from versions import Range, Version, newest


class VersionTest(unittest.TestCase):
    def test_order(self) -> None:
        texts = ["1.0.0-alpha", "1.0.0-beta", "1.0.0", "1.0.1", "1.2.0", "2.0.0"]
        self.assertEqual([str(v) for v in sorted(map(Version, reversed(texts)))], texts)

    def test_ranges(self) -> None:
        versions = [Version(text) for text in ("1.1.9", "1.2.0", "1.9.9", "2.0.0-rc.1", "2.0.0")]
        self.assertEqual(newest(versions, Range("^1.2.0")), Version("1.9.9"))
        self.assertEqual(newest(versions, Range("~1.1.0 || >=2.0.0")), Version("2.0.0"))
        self.assertIsNone(newest(versions, Range(">2.0.0")))

    def test_prereleases_are_asked_for(self) -> None:
        self.assertNotIn(Version("2.0.0-rc.1"), Range("<2.0.0"))
        self.assertIn(Version("2.0.0-rc.1"), Range(">=2.0.0-beta"))

    def test_errors(self) -> None:
        for text in ("1.2", "01.2.3", "1.2.3-01", "1.2.3-"):
            with self.assertRaises(ValueError):
                Version(text)


if __name__ == "__main__":
    unittest.main()
