import unittest

from markup import to_html


class HiddenTest(unittest.TestCase):
    def test_code_is_taken_as_it_is(self) -> None:
        self.assertEqual(to_html("`a * b * c`"), "<p><code>a * b * c</code></p>")
        self.assertEqual(
            to_html("`[x](/y)` and `**z**`"), "<p><code>[x](/y)</code> and <code>**z**</code></p>"
        )

    def test_escaped_once(self) -> None:
        self.assertEqual(to_html("`a<b>` & *c*"), "<p><code>a&lt;b&gt;</code> &amp; <em>c</em></p>")
        self.assertEqual(to_html("`&amp;`"), "<p><code>&amp;amp;</code></p>")

    def test_more_marks(self) -> None:
        self.assertEqual(to_html("``a`b``"), "<p><code>a`b</code></p>")
        self.assertEqual(to_html("`` `a` ``"), "<p><code>`a`</code></p>")

    def test_emphasis_around_and_between(self) -> None:
        self.assertEqual(to_html("*a* `*` *b*"), "<p><em>a</em> <code>*</code> <em>b</em></p>")


if __name__ == "__main__":
    unittest.main()
