"""Comparison of an answer with a ground truth that are not both plain numbers. Runs only in a process that
can be killed; no parser that evaluates is used, and sizes are capped before anything is computed.
"""

from __future__ import annotations

import functools
import re

from mrl.rewards.contract import scored
from mrl.rewards.maths.answer_tokens import Unreadable
from mrl.rewards.maths.equality import equal, shape_has_value, stated_value
from mrl.rewards.maths.expressions import Call, Number, Tree, symbols
from mrl.rewards.maths.maths_rules import MathsRules
from mrl.rewards.maths.numbers import exact_quantity
from mrl.rewards.maths.shapes import Based, ParseOptions, Scalar, Shape, parse_shape
from mrl.samples import Verdict

_SETS_TEXT = re.compile(r"\\(?:text|mathrm|textrm|textbf|mbox)\{([^{}]*)\}")
RAISED = "the comparison raised"
"""How the reason of a verdict starts whose answer our own code did not expect."""


def compare(answer: str, ground_truth: str, rules: MathsRules) -> Verdict:
    """Verdict on a tidied answer, of which the caller knows that its text is another than the ground truth's.

    The ground truth has been read at load, so what an answer makes this raise is the answer's doing: wrong,
    never "no reward".
    """
    wanted = read_ground_truth(ground_truth)
    if wanted is None:
        same = _words_of(answer) == _words_of(ground_truth)
        return scored(
            float(same), "same text" if same else "a ground truth that is compared as text, and other text"
        )
    try:
        return _judged(answer, ground_truth, wanted, rules)
    except Unreadable as error:
        return scored(0.0, f"not readable as mathematics: {error}")
    except MemoryError:
        raise  # the process has a limit, and a verdict of its own for it
    except Exception as error:  # whatever it is, the policy wrote what caused it
        return scored(0.0, f"{RAISED} {type(error).__name__}: {str(error)[:120]!a}")


def _words_of(text: str) -> list[str]:
    """The text in words, without commands that set text and without braces."""
    return re.sub(r"[{}]", " ", _SETS_TEXT.sub(r" \1 ", text)).lower().split()


def _judged(answer: str, ground_truth: str, wanted: Shape, rules: MathsRules) -> Verdict:
    single_letters = isinstance(wanted, Scalar) and wanted.unit is not None
    given = parse_shape(answer, ParseOptions(single_letters))
    number = exact_quantity(ground_truth, single_letters=True)
    asks_for_integer = number is not None and number.is_integer
    if isinstance(wanted, Scalar) and isinstance(given, Scalar) and given.unit and wanted.unit:
        asks_for_integer &= given.unit == wanted.unit  # a conversion may leave anything
    if asks_for_integer and not _is_worked_out(given):
        return scored(0.0, "an operation is left to do, where the ground truth is an integer")
    right = equal(given, wanted, rules)
    if not right and single_letters and isinstance(given, Scalar) and not given.unit and symbols(given.tree):
        right = equal(given, parse_shape(ground_truth, ParseOptions()), rules)  # 2 m: metres, or twice m
    return scored(float(right), "equal" if right else f"a different {type(wanted).__name__.lower()}")


@functools.lru_cache(maxsize=1024)
def read_ground_truth(text: str) -> Shape | None:
    """The shape of a ground truth; None for one that can only be compared as text."""
    try:
        shape = parse_shape(text, ParseOptions(single_letters=True))
    except Unreadable:
        return None
    return shape if shape_has_value(shape) else None


def _is_worked_out(shape: Shape) -> bool:
    """Whether a scalar, or the value of x = scalar, is a numeral, perhaps with signs around it; other shapes
    are what they are."""
    shape = stated_value(shape) or shape
    if isinstance(shape, Based):
        return shape.base == 10
    return not isinstance(shape, Scalar) or _is_numeral(shape.tree)


def _is_numeral(tree: Tree) -> bool:
    if isinstance(tree, Call) and tree.name == "neg":
        return _is_numeral(tree.arguments[0])
    return isinstance(tree, Number)
