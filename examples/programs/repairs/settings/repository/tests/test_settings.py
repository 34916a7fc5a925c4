import copy
import unittest

from settings import InterpolationError, Settings

DEFAULTS = {"paths": {"root": "/srv"}, "log": {"level": "info", "size": 3}, "tags": ["a"]}


class SettingsTest(unittest.TestCase):
    def setUp(self) -> None:
        self.defaults = copy.deepcopy(DEFAULTS)

    def test_layers(self) -> None:
        settings = Settings(self.defaults)
        settings.add_json('{"log": {"level": "debug"}}')
        self.assertEqual(settings.get("log.level"), "debug")

    def test_environment(self) -> None:
        settings = Settings(self.defaults)
        settings.add_environment({"APP_LOG__SIZE": "7", "OTHER": "1"}, "APP")
        self.assertEqual(settings.get("log.size"), 7)

    def test_references(self) -> None:
        settings = Settings({**self.defaults, "file": "${paths.root}/x", "again": "${log.size}"})
        self.assertEqual(settings.get("file"), "/srv/x")
        self.assertEqual(settings.get("again"), 3)
        with self.assertRaises(InterpolationError):
            Settings({"a": "${b}", "b": "${a}"}).all()

    def test_errors(self) -> None:
        with self.assertRaises(ValueError):
            Settings(self.defaults).add_words(["log.level"])
        with self.assertRaises(KeyError):
            Settings(self.defaults).get("log.none")


if __name__ == "__main__":
    unittest.main()
