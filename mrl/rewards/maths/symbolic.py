"""Compare an answer with a ground truth if they are not both plain numbers.

Runs only in a process that can be killed. No parser evaluates anything, and sizes are capped before
computing.
"""

from __future__ import annotations

import functools
import re

from mrl.rewards.contract import scored
from mrl.rewards.maths.answer_tokens import Unreadable
from mrl.rewards.maths.equality import shape_has_value, shapes_are_equal, stated_value
from mrl.rewards.maths.expressions import Call, Number, Tree, symbols
from mrl.rewards.maths.maths_rules import MathsRules
from mrl.rewards.maths.numbers import exact_quantity
from mrl.rewards.maths.shapes import BasedInteger, ParseOptions, Scalar, Shape, parse_shape
from mrl.samples import Verdict

_SETS_TEXT = re.compile(r"\\(?:text|mathrm|textrm|textbf|mbox)\{([^{}]*)\}")
RAISED = "the comparison raised"
"""Start of a verdict's reason if the answer raised an unexpected exception."""


def compare(answer: str, ground_truth: str, rules: MathsRules) -> Verdict:
    """Return the verdict on a tidied answer whose text differs from the ground truth's.

    The ground truth was parsed at load, so any exception here is caused by the answer: it is incorrect, never
    "no reward".
    """
    expected = read_ground_truth(ground_truth)
    if expected is None:
        same = _words_of(answer) == _words_of(ground_truth)
        return scored(
            float(same), "same text" if same else "a ground truth that is compared as text, and another text"
        )
    try:
        return _judged(answer, ground_truth, expected, rules)
    except Unreadable as error:
        return scored(0.0, f"not readable as mathematics: {error}")
    except MemoryError:
        raise  # the worker has its own verdict for its memory limit
    except Exception as error:  # any error: the policy's text caused it
        return scored(0.0, f"{RAISED} {type(error).__name__}: {str(error)[:120]!a}")


def _words_of(text: str) -> list[str]:
    """Return the words of a text, without text commands and braces."""
    return re.sub(r"[{}]", " ", _SETS_TEXT.sub(r" \1 ", text)).lower().split()


def _judged(answer: str, ground_truth: str, expected: Shape, rules: MathsRules) -> Verdict:
    single_letters = isinstance(expected, Scalar) and expected.unit is not None
    given = parse_shape(answer, ParseOptions(single_letters))
    number = exact_quantity(ground_truth, single_letters=True)
    asks_for_integer = number is not None and number.is_integer
    if isinstance(expected, Scalar) and isinstance(given, Scalar) and given.unit and expected.unit:
        asks_for_integer &= given.unit == expected.unit  # a conversion may give any number
    if asks_for_integer and not _is_worked_out(given):
        return scored(0.0, "the answer is an unevaluated expression, but the ground truth is an integer")
    same = shapes_are_equal(given, expected, rules)
    if not same and single_letters and isinstance(given, Scalar) and not given.unit and symbols(given.tree):
        same = shapes_are_equal(
            given, parse_shape(ground_truth, ParseOptions()), rules
        )  # 2 m: metres, or twice m
    return scored(float(same), "equal" if same else f"a different {type(expected).__name__.lower()}")


@functools.lru_cache(maxsize=1024)
def read_ground_truth(text: str) -> Shape | None:
    """Return the shape of a ground truth; None if it can only be compared as text."""
    try:
        shape = parse_shape(text, ParseOptions(single_letters=True))
    except Unreadable:
        return None
    return shape if shape_has_value(shape) else None


def _is_worked_out(shape: Shape) -> bool:
    """Return True if a scalar, or the value of x = scalar, is a signed numeral; True for other shapes."""
    shape = stated_value(shape) or shape
    if isinstance(shape, BasedInteger):
        return shape.base == 10
    return not isinstance(shape, Scalar) or _is_numeral(shape.tree)


def _is_numeral(tree: Tree) -> bool:
    if isinstance(tree, Call) and tree.name == "neg":
        return _is_numeral(tree.arguments[0])
    return isinstance(tree, Number)
