import unittest

from templates import Template, TemplateError


class TemplateTest(unittest.TestCase):
    def test_values(self) -> None:
        text = Template("Hello {{ user.name | trim | title }}!").render(user={"name": " ann "})
        self.assertEqual(text, "Hello Ann!")

    def test_loops(self) -> None:
        template = Template("{% for x in xs %}{{ number }}:{{ x }} {% end %}")
        self.assertEqual(template.render(xs=["a", "b"]), "1:a 2:b ")

    def test_conditions(self) -> None:
        template = Template("{% if not ok %}no{% else %}yes{% end %}")
        self.assertEqual([template.render(ok=ok) for ok in (True, False)], ["yes", "no"])

    def test_errors(self) -> None:
        for text in ("{% for x in xs %}", "{% end %}", "{% what %}", "{{ missing }}", "{{ 'a' | nope }}"):
            with self.assertRaises(TemplateError):
                Template(text).render(xs=[])


if __name__ == "__main__":
    unittest.main()
