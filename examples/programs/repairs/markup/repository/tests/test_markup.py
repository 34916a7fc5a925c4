import unittest

from markup import to_html


class MarkupTest(unittest.TestCase):
    def test_blocks(self) -> None:
        text = "# A *b*\n\none\ntwo\n\n> quote\n\n- x\n  y\n- z\n"
        lines = ["<h1>A <em>b</em></h1>", "<p>one two</p>", "<blockquote><p>quote</p></blockquote>"]
        self.assertEqual(to_html(text).split("\n"), [*lines, "<ul><li>x y</li><li>z</li></ul>"])

    def test_fences(self) -> None:
        html = to_html("```python\nif a < b:\n    *c*\n```\n")
        self.assertEqual(html, '<pre><code class="language-python">if a &lt; b:\n    *c*</code></pre>')

    def test_inline(self) -> None:
        self.assertEqual(to_html("**a** & `b`"), "<p><strong>a</strong> &amp; <code>b</code></p>")
        self.assertEqual(to_html("[x](/y)"), '<p><a href="/y">x</a></p>')
        self.assertIn("[x](javascript:1)", to_html("[x](javascript:1)"))


if __name__ == "__main__":
    unittest.main()
