"""Plain values that burden the test that reads them: too many digits, too large, unhashable, endless work."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.support.verifier_cases.case import Case

_LIMITS = {"seconds": 1.0, "cpu_seconds": 1.0}
_RAISING: dict[str, tuple[str, object]] = {
    "digits": ("10 ** {large}", "assert str(candidate(1)) == '1'"),
    "digits of a key": ("{{10 ** {large}: 1}}", {"1": 1}),
    "beyond a float": ("-(10 ** {large})", "assert abs(float(candidate(1)) - 1.5) < 1e-6"),
    "beyond a float's case": ("10 ** {large}", 1.5),
    "unhashable": ("[[{small}]]", "assert set(candidate(1)) == {{{small}}}"),
    "unhashable case": ("[[{small}]]", {"1": 1}),
    "deep": ("__import__('functools').reduce(lambda v, _: [v], range({depth}), 1)",
        "assert candidate(1) == 1"),
    "deeper by the test": ("x if x else __import__('functools').reduce(lambda v, _: [v], range(95), 1)",
        "v = candidate(0)\n    for _ in range({small} + 9): v = [v]\n    assert candidate(v) == 1"),
    "an index": ("10 ** {large}", "assert [1, 2][candidate(1)] == 1"),
    "another kind": ("None", "assert candidate(1) + 1 == {small}"),
}  # fmt: skip
_ENDLESS: dict[str, tuple[str, object]] = {
    "power": ("10 ** {large}", "assert 3 ** candidate(1) % 7 == 1"),
    "loop": ("10 ** {large}", "assert sum(range(candidate(1))) == 1"),
    "hidden": ("10 ** {large}",
        "try:\n        assert {small} ** candidate(1) == 1\n    except BaseException: pass"),
    "memory": ("10 ** {large}", "assert [0] * (candidate(1) % 10 ** 12 + 10 ** 12)"),
}  # fmt: skip
_RIGHT: dict[str, tuple[str, object]] = {
    "large": ("{small} ** {power}", "assert candidate(1) == {small} ** {power}"),
    "large in a set": ("{{{small} ** {power}}}", "assert {small} ** {power} in candidate(1)"),
    "a frozen set in a set": ("{{frozenset({{{small}}})}}",
        "assert {{hash(s) for s in candidate(1)}} == {{hash(frozenset({{{small}}}))}}"),
    "some work": ("{small} * 10 ** 4", "assert len(range(candidate(1))) == {small} * 10 ** 4"),
}  # fmt: skip


def burdens(rng: random.Random) -> Iterator[Case]:
    """Endless cases; those that only a limit ends say which in their settings."""
    while True:
        for right, table in ((False, _RAISING), (True, _RIGHT)):
            for label, (source, test) in table.items():
                yield _case(source, test, right, label, {}, rng)
        label, (source, test) = rng.choice(list(_ENDLESS.items()))
        yield _case(source, test, False, label, _LIMITS, rng)


def _case(
    source: str, test: object, right: bool, label: str, settings: dict[str, float], rng: random.Random
) -> Case:
    numbers = {
        "large": rng.randrange(5000, 15_000),
        "small": rng.randrange(3, 90),
        "depth": rng.randrange(101, 500),
        "power": rng.randrange(50, 5000),
    }
    ground_truth: dict[str, object] = {"entry_point": "f"}
    if isinstance(test, str):
        ground_truth["test"] = f"def check(candidate):\n    {test.format(**numbers)}\n"
    else:
        ground_truth["cases"] = [{"args": [1], "expected": test}]
    program = f"```python\ndef f(x):\n    return {source.format(**numbers)}\n```"
    return Case("code", program, ground_truth, right, label, settings)
