import unittest

from router import NotFound, Router, Rule


def archive(year: int) -> str:
    return f"archive {year + 1}"


def page(name: str) -> str:
    return f"page {name}"


class RouterTest(unittest.TestCase):
    def setUp(self) -> None:
        self.router = Router()
        self.router.add("/pages/<name>", page)
        self.router.add("/pages/<int:year>", archive)
        self.router.add("/pages/new", lambda: "new", methods=("GET", "POST"), name="new")

    def test_most_specific_first(self) -> None:
        calls = [self.router.dispatch(f"/pages/{last}") for last in ("new", "1999", "x1999")]
        self.assertEqual(calls, ["new", "archive 2000", "page x1999"])

    def test_methods(self) -> None:
        self.assertEqual(self.router.dispatch("/pages/new", "POST"), "new")
        with self.assertRaises(NotFound) as caught:
            self.router.find("/pages/x", "POST")
        self.assertEqual(caught.exception.status, 405)

    def test_bad_rules(self) -> None:
        for path in ("pages", "/a<b>", "/<nope:b>", "/<a>/<a>"):
            with self.assertRaises(ValueError):
                Rule(path, page)


if __name__ == "__main__":
    unittest.main()
