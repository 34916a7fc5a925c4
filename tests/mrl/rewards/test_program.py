"""The code block that is taken as a response's program."""

import pytest

from mrl.rewards.code.program import program_in
from mrl.rewards.code.tasks import CodeTask
from tests.support.programs import misjudged
from tests.support.verifier_cases.code.fences import fences

F = CodeTask(entry_point="f")
BODY = CodeTask(entry_point="f", context="def f(x):\n    '''Doc.'''\n")
STDIN = CodeTask(entry_point=None)


@pytest.mark.parametrize(
    ("response", "task", "chosen"),
    [
        ("```python\nx = 1\n```", F, "x = 1"),
        ("first\n```\nold\n```\nbetter:\n```py\nnew\n```\ndone", F, "new"),
        ("x = 1", F, "x = 1"),
        ("<think>```python\nold\n```</think>\n```python\nnew\n```", F, "new"),
        ("<think>\n```python\nold\n```", F, None),
        ("```python\nx = 1", F, None),
        ("", F, None),
        ("inline ```code``` only", F, None),
        ("```python\nf = 1\n```\n```python\nf(2)\n```", F, "f = 1"),
        ("```python\nf: int = 1\n```\n```python\nf == 2\n```", F, "f: int = 1"),
        ("```python\nfrom m import g as f\n```\n```\nfrom m import ff\n```", F, "from m import g as f"),
        ("```python\ndef f(): 1\n```\n```python\nclass C:\n    def f(self): 2\n```", F, "def f(): 1"),
        ("```python\nif 1:\n    def f(): 1\n```\n```python\nff = 2\n```", F, "if 1:\n    def f(): 1"),
        ("```python\ndef f(): 1\n```\n```bash\npython x.py\n```", F, "def f(): 1"),
        ("~~~\nf = 1\n```\n~~~", F, "f = 1\n```"),
        ("`````\nf = 1\n````\n`````", F, "f = 1\n````"),
        ("1. So:\n\n   ```python title=\"x.py\"\n   def f():\n       1\n   ```", F, "def f():\n    1"),
        ("> ```py\n> f = 1\n> ```", F, "f = 1"),
        ("- ```py\n  f = 1\n  ```", F, "f = 1"),
        ("```py\r\nf = 1\r\n```\r\n", F, "f = 1"),
        ("```python\n    return x\n```\n```python\nprint(f(1))\n```", BODY, "    return x"),
        ("```python\nprint(1)\n```\n```text\n1\n```", STDIN, "print(1)"),
        ("```python\nprint(1)\n```\nwrites\n```\n1\n```", STDIN, "print(1)"),
        ("```c\nint x;\n```", STDIN, "int x;"),
        ("<answer>```python\nf = 1\n```</answer>", F, "f = 1"),
        ("<think>a</think>\n<answer>\n```python\nf = 1\n```\n</answer>", F, "f = 1"),
        ("```python\nf = 1\n```\n<answer>done</answer>", F, "f = 1"),
        ("```python\nf = 1\n```\n<answer>```python\nf = 2\n```</answer>", F, "f = 2"),
        ("<answer>f = 1</answer>", F, "f = 1\n"),
    ],
)  # fmt: skip
def test_the_program_of_a_response(response: str, task: CodeTask, chosen: str | None) -> None:
    assert program_in(response, task) == chosen


def test_generated_responses_are_read_as_markdown_is() -> None:
    assert misjudged(fences, 1800) == []
