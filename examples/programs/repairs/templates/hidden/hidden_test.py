import unittest

from templates import Template, TemplateError


class HiddenTest(unittest.TestCase):
    def test_bars_in_quotes(self) -> None:
        self.assertEqual(Template('{{ "a | b" | upper }}').render(), "A | B")
        self.assertEqual(Template("{{ 'x|y|z' }}").render(), "x|y|z")

    def test_other_quotes_inside(self) -> None:
        self.assertEqual(Template('{{ "it\'s | here" | title | length }}').render(), "11")

    def test_unclosed(self) -> None:
        for text in ("{{ 'a }}", "{{ \"a' | upper }}", "{{ name | upper' }}"):
            with self.assertRaises(TemplateError):
                Template(text).render(name="n")

    def test_conditions_too(self) -> None:
        self.assertEqual(Template("{% if '|' %}yes{% end %}").render(), "yes")


if __name__ == "__main__":
    unittest.main()
