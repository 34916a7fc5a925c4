import copy
import unittest

from settings import Settings

DEFAULTS = {"log": {"level": "info", "deep": {"x": [1]}}, "tags": ["a"]}


class HiddenTest(unittest.TestCase):
    def setUp(self) -> None:
        self.defaults = copy.deepcopy(DEFAULTS)

    def test_defaults_stay(self) -> None:
        settings = Settings(self.defaults)
        settings.add_words(["log.level=debug", "log.deep.y=2"])
        settings.all()
        self.assertEqual(self.defaults, DEFAULTS)

    def test_changed(self) -> None:
        settings = Settings(self.defaults)
        settings.add_words(["log.level=debug"])
        self.assertEqual(settings.changed(), {"log.level": ("info", "debug")})
        self.assertEqual(settings.changed(), {"log.level": ("info", "debug")})

    def test_nothing_is_shared(self) -> None:
        first, second = Settings(self.defaults), Settings(self.defaults)
        first.add_json('{"log": {"deep": {"z": []}}}')
        result = first.all()
        result["log"]["deep"]["x"].append(2)
        result["log"]["deep"]["z"].append(3)
        result["tags"].append("b")
        self.assertEqual(second.all(), DEFAULTS)
        self.assertEqual(first.get("log.deep.z"), [])

    def test_remove(self) -> None:
        settings = Settings(self.defaults)
        settings.add_words(["log.deep=__remove__"])
        self.assertEqual(settings.get("log"), {"level": "info"})
        self.assertEqual(self.defaults, DEFAULTS)


if __name__ == "__main__":
    unittest.main()
