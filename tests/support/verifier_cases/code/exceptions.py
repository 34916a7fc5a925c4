"""Tests that meet exceptions: ends of loops, exits, the expected one, and close ones."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.support.verifier_cases.case import Case

_HOSTILE = (
    "class Hostile(Exception):\n    def __str__(self): raise SystemExit\n"
    "    def __eq__(self, other): return True\n    __hash__ = None\n    args = property(lambda self: 1 / 0)\n"
    "class Bare(BaseException): pass\nclass Negative(ValueError): pass\nclass End(StopIteration): pass\n"
)
_RAISED = (
    *(
        "StopIteration", "StopIteration(4)", "StopAsyncIteration", "GeneratorExit", "SystemExit",
        "SystemExit(0)",
    ),
    *("KeyboardInterrupt", "End()", "Bare()", "Hostile()", "RecursionError", "AssertionError", "IndexError"),
    *("AttributeError", "KeyError(1)", "NotImplementedError", "UnicodeError", "OSError(2, 'x')", "Warning"),
    *("ExceptionGroup('x', [ValueError()])", "TypeError", "EOFError", "ZeroDivisionError", "MemoryError"),
)  # fmt: skip

_LOOPS = (
    "for x, y in zip(map(candidate, {inputs}), {outputs}):\n        assert x == y",
    "assert [x for x in map(candidate, {inputs})] == {outputs}[:len(list(map(candidate, {inputs})))]",
    "assert all(candidate(x) == y for x, y in zip({inputs}, {outputs}))",
    "assert all(map(lambda pair: candidate(pair[0]) == pair[1], zip({inputs}, {outputs})))",
    "inputs = iter({inputs})\n    got = list(iter(lambda: candidate(next(inputs, 9)), 82))\n"
    "    assert got == {outputs}[:len(got)]",
    "got = []\n    got.extend(map(candidate, {inputs}))\n"
    "    assert all(a == b for a, b in zip(got, {outputs}))",
    "try:\n        for x in map(candidate, {inputs}):\n            assert x in {outputs}\n"
    "    except ValueError:\n        assert False",
    "class Rows:\n        def __getitem__(self, n):\n            if n == 3: raise StopIteration\n"
    "            return candidate({inputs}[n])\n    got = [row for _, row in zip(range(3), Rows())]\n"
    "    assert got == {outputs}[:len(got)]",
)
"""Tests that would pass if a candidate's exception ended a loop."""

_EXPECTING = (
    "try:\n        candidate(-1)\n    except {name}:\n        pass\n    else:\n        assert False",
    "import contextlib\n    seen = True\n    with contextlib.suppress({name}):\n        candidate(-1)\n"
    "        seen = False\n    assert seen",
    "import unittest\n    with unittest.TestCase().assertRaises({name}):\n        candidate(-1)",
    "import unittest\n    unittest.TestCase().assertRaises({name}, candidate, -1)",
    "try:\n        candidate(-1)\n        assert False, 'nothing raised'\n    except {name} as error:\n"
    "        assert 'negative' in str(error)",
)
_EXPECTED = (
    "ValueError", "TypeError", "KeyError", "RuntimeError", "ZeroDivisionError", "IndexError", "Exception",
)  # fmt: skip


def exceptions(rng: random.Random) -> Iterator[Case]:
    """Yield exceptions in a test's loop: the expected one, another one, or none."""
    while True:
        yield _in_a_loop(rng)
        for raised in ("right", "derived", "other", "none"):
            yield _asked_for(raised, rng)
        yield _right_in_a_loop(rng)


def _loop(rng: random.Random) -> str:
    inputs = rng.sample(range(2, 9), 3)
    return rng.choice(_LOOPS).format(inputs=inputs, outputs=[x * x + 1 for x in inputs])


def _in_a_loop(rng: random.Random) -> Case:
    raised = rng.choice(_RAISED)
    program = rng.choice((
        f"{_HOSTILE}def f(x):\n    raise {raised}",
        f"{_HOSTILE}def f(x, seen=[]):\n    seen.append(x)\n    if len(seen) > 1: raise {raised}\n"
        "    return x * x + 1",
    ))  # fmt: skip
    return _case(program, _loop(rng), False, f"{raised.partition('(')[0]} in a loop")


def _right_in_a_loop(rng: random.Random) -> Case:
    return _case("def f(x):\n    return x * x + 1", _loop(rng), True, "no exception in a loop")


def _asked_for(raised: str, rng: random.Random) -> Case:
    name = rng.choice(_EXPECTED)
    source = {
        "right": f"raise {name if name != 'Exception' else 'ArithmeticError'}('negative')",
        "derived": f"raise type('Negative', ({name},), {{}})('negative')",
        "other": f"raise "
        f"{rng.choice(('SystemExit', 'KeyboardInterrupt', 'GeneratorExit', 'Bare'))}('negative')",
        "none": "return 'negative'",
    }[raised]
    test = rng.choice(_EXPECTING).format(name=name) + "\n    assert candidate(2) == 5"
    program = f"{_HOSTILE}def f(x):\n    if x < 0:\n        {source}\n    return x * x + 1"
    return _case(program, test, raised in ("right", "derived"), f"{raised} exception asked for")


def _case(program: str, body: str, right: bool, label: str) -> Case:
    ground_truth = {"entry_point": "f", "test": f"def check(candidate):\n    {body}\n"}
    return Case("code", f"```python\n{program}\n```", ground_truth, right, label)
