import unittest

from router import NotFound, Router


class HiddenTest(unittest.TestCase):
    def setUp(self) -> None:
        self.router = Router()
        self.router.add("/pages/<name>", lambda name: name, name="page")
        self.router.add("/über uns/<int:n>", lambda n: n, name="about")

    def test_slash_in_a_part(self) -> None:
        self.assertEqual(self.router.dispatch("/pages/a%2Fb"), "a/b")
        with self.assertRaises(NotFound):
            self.router.dispatch("/pages/a/b")

    def test_round_trip(self) -> None:
        for name in ("a/b", "50%", "é ?#", "a%2Fb", "line\nbreak"):
            path = self.router.url("page", name=name)
            self.assertEqual(path.count("/"), 2)
            self.assertEqual(self.router.dispatch(path), name)

    def test_fixed_text(self) -> None:
        self.assertEqual(self.router.dispatch("/%C3%BCber%20uns/7?x=1"), 7)
        self.assertEqual(self.router.dispatch(self.router.url("about", n=8)), 8)


if __name__ == "__main__":
    unittest.main()
