"""Compare the shapes of two answers; shapes of different kinds are different."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from mrl.rewards.maths import scalars
from mrl.rewards.maths.expressions import Number, Symbol, Tree, symbols
from mrl.rewards.maths.maths_rules import MathsRules
from mrl.rewards.maths.relations import (
    equations,
    factor_sign,
    intervals,
    product,
    same_equation,
    sides_difference,
    solved,
)
from mrl.rewards.maths.shapes import (
    BasedInteger,
    Interval,
    MatrixValue,
    Relation,
    Scalar,
    Shape,
    ShapeList,
    TextShape,
    Union,
    base_unit_value,
)
from mrl.rewards.maths.units import DEGREE

_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
"""Sign -> the sign after its sides are swapped."""
MAX_ITEMS = 64


def shapes_are_equal(answer: Shape, ground_truth: Shape, rules: MathsRules) -> bool:
    """Return True if an answer equals the ground truth."""
    if _solutions(answer, ground_truth, rules):
        return True
    if isinstance(ground_truth, BasedInteger):
        return _in_base(answer, ground_truth)
    if isinstance(answer, BasedInteger) and isinstance(ground_truth, Scalar):
        return scalars.same_scalar(Number(Fraction(answer.value)), ground_truth.tree, rules)
    if type(answer) is not type(ground_truth):
        return False
    return _LIKE[type(ground_truth)](answer, ground_truth, rules)


def _words(answer: TextShape, ground_truth: TextShape, rules: MathsRules) -> bool:
    return answer.text == ground_truth.text


def _scalar(answer: Scalar, ground_truth: Scalar, rules: MathsRules) -> bool:
    """Compare quantities. A unit may be left out; if both have one, they must be the same quantity. An angle
    in degrees also equals its number of radians."""
    if answer.unit and ground_truth.unit:
        alike = answer.unit.dimensions == ground_truth.unit.dimensions
        return alike and scalars.same_scalar(base_unit_value(answer), base_unit_value(ground_truth), rules)
    if scalars.same_scalar(answer.tree, ground_truth.tree, rules):
        return True
    in_degrees = answer.unit == DEGREE and ground_truth.unit is None
    return in_degrees and scalars.same_scalar(base_unit_value(answer), ground_truth.tree, rules)


def _in_base(answer: Shape, ground_truth: BasedInteger) -> bool:
    """Compare digits in the ground truth's base, stated or not; another base only repeats the question."""
    if isinstance(answer, BasedInteger):
        return answer == ground_truth
    digits = ""
    if isinstance(answer, Scalar) and isinstance(answer.tree, Number) and not answer.unit:
        digits = answer.tree.numeral
    if isinstance(answer, TextShape):
        digits = answer.text
    try:
        return digits.isalnum() and int(digits, ground_truth.base) == ground_truth.value
    except ValueError:
        return False


def _series(answer: ShapeList, ground_truth: ShapeList, rules: MathsRules) -> bool:
    if len(answer.items) != len(ground_truth.items) or len(answer.items) > MAX_ITEMS:
        return False
    if answer.brackets in ("", "{") and ground_truth.brackets in ("", "{"):
        return _matched(answer.items, ground_truth.items, rules)
    if answer.brackets != ground_truth.brackets:
        return False
    return all(shapes_are_equal(a, g, rules) for a, g in zip(answer.items, ground_truth.items, strict=True))


def _matched(answers: Sequence[Shape], ground_truths: Sequence[Shape], rules: MathsRules) -> bool:
    """Compare multisets: every ground truth matches a different answer."""
    remaining = list(answers)
    for ground_truth in ground_truths:
        match = next((answer for answer in remaining if shapes_are_equal(answer, ground_truth, rules)), None)
        if match is None:
            return False
        remaining.remove(match)
    return True


def _interval(answer: Interval, ground_truth: Interval, rules: MathsRules) -> bool:
    same_ends = answer.closed == ground_truth.closed
    return (
        same_ends
        and scalars.same_scalar(answer.low, ground_truth.low, rules)
        and scalars.same_scalar(answer.high, ground_truth.high, rules)
    )


def _union(answer: Union, ground_truth: Union, rules: MathsRules) -> bool:
    return len(answer.parts) == len(ground_truth.parts) and _matched(answer.parts, ground_truth.parts, rules)


def _matrix(answer: MatrixValue, ground_truth: MatrixValue, rules: MathsRules) -> bool:
    if [len(row) for row in answer.rows] != [len(row) for row in ground_truth.rows]:
        return False
    pairs = zip(_entries(answer), _entries(ground_truth), strict=True)
    return all(scalars.same_scalar(a, g, rules) for a, g in pairs)


def _entries(matrix: MatrixValue) -> list[Tree]:
    return [entry for row in matrix.rows for entry in row]


def _relation(answer: Relation, ground_truth: Relation, rules: MathsRules) -> bool:
    flipped = Relation(answer.sides[::-1], tuple(_FLIPPED.get(sign, "") for sign in answer.signs[::-1]))
    if _side_by_side(answer, ground_truth, rules) or _side_by_side(flipped, ground_truth, rules):
        return True
    if len(answer.sides) != 2 or len(ground_truth.sides) != 2:
        return False
    left, right = sides_difference(answer), sides_difference(ground_truth)
    if left is None or right is None or symbols(left) != symbols(right):
        return False
    return _same_kind(left, answer.signs[0], right, ground_truth.signs[0])


def _same_kind(left: Tree, left_sign: str, right: Tree, right_sign: str) -> bool:
    """Compare `left left_sign 0` with `right right_sign 0`."""
    if right_sign in ("=", "!="):
        return left_sign == right_sign and same_equation(left, right)
    if right_sign == "in" or left_sign in ("in", "=", "!="):
        return False
    factor = factor_sign(left, right)
    return factor is not None and (left_sign if factor > 0 else _FLIPPED[left_sign]) == right_sign


def _side_by_side(answer: Relation, ground_truth: Relation, rules: MathsRules) -> bool:
    if answer.signs != ground_truth.signs:
        return False
    return all(shapes_are_equal(a, g, rules) for a, g in zip(answer.sides, ground_truth.sides, strict=True))


def _solutions(answer: Shape, ground_truth: Shape, rules: MathsRules) -> bool:
    """Compare different shapes with the same solutions: a value and x = value; x = 1 or x = -1 and x^2 = 1;
    x in (1, 2), the interval alone, and 1 < x < 2."""
    if not isinstance(answer, Relation | ShapeList) and not isinstance(ground_truth, Relation | ShapeList):
        return False
    left, right = _spelled(answer), _spelled(ground_truth)
    if left and right and len(left) == len(right) and _matched(left, right, rules):
        return True
    if isinstance(answer, Relation) != isinstance(ground_truth, Relation):
        value, expected = stated_value(answer), stated_value(ground_truth)
        if value or expected:
            return shapes_are_equal(value or answer, expected or ground_truth, rules)
    return _same_intervals(answer, ground_truth, rules) or _same_roots(answer, ground_truth)


def stated_value(shape: Shape) -> Shape | None:
    """Return the value that a relation gives its variable: 5 for x = 5, {1, 2} for x in {1, 2}; for several
    variables in alphabetical order, (1, 2) for (x, y) = (1, 2). None if there is none."""
    if not isinstance(shape, Relation) or shape.signs not in (("=",), ("in",)):
        return None
    variable, value = shape.sides
    names = [tree.name for tree in _trees(variable) if isinstance(tree, Symbol)]
    if shape.signs == ("in",):
        return value if names and isinstance(value, ShapeList) and value.brackets == "{" else None
    if len(names) > 1 and names == sorted(names):
        return value if len(_trees(value)) == len(names) and not _is_relation(value, names) else None
    if not (isinstance(variable, Scalar) and isinstance(variable.tree, Symbol)):
        return None
    return value if not isinstance(value, Scalar) or not symbols(value.tree) else None


def _is_relation(value: Shape, names: Sequence[str]) -> bool:
    """Return True if a value contains its own variables."""
    return any(symbols(tree) & set(names) for tree in _trees(value))


def _trees(shape: Shape) -> list[Tree]:
    """Return the expressions of a tuple or scalar without units; empty for anything else."""
    if isinstance(shape, Interval):
        return [shape.low, shape.high] if shape.closed == (False, False) else []
    items = shape.items if isinstance(shape, ShapeList) and shape.brackets == "(" else (shape,)
    trees = [item.tree for item in items if isinstance(item, Scalar) and not item.unit]
    return trees if len(trees) == len(items) else []


def _spelled(shape: Shape) -> list[Shape]:
    """Return the relations x = 1 and y = 2 for (x, y) = (1, 2) and x = 1, y = 2; empty for anything else."""
    if isinstance(shape, ShapeList) and not shape.brackets and shape.joined != "or":
        relations = [item for item in shape.items if isinstance(item, Relation) and item.signs == ("=",)]
        return list(relations) if len(relations) == len(shape.items) else []
    if not isinstance(shape, Relation) or shape.signs != ("=",):
        return []
    names, values = map(_trees, shape.sides)
    if len(names) < 2 or len(names) != len(values) or not all(isinstance(name, Symbol) for name in names):
        return []
    return [Relation((Scalar(n), Scalar(v)), ("=",)) for n, v in zip(names, values, strict=True)]


def _same_intervals(answer: Shape, ground_truth: Shape, rules: MathsRules) -> bool:
    """Compare two inequalities, or an inequality with the intervals that solve it."""
    solution, expected = solved(answer), solved(ground_truth)
    if solution is None and expected is None:
        return False
    left = solution[1] if solution else intervals(answer)
    right = expected[1] if expected else intervals(ground_truth)
    names = {pair[0] for pair in (solution, expected) if pair}
    return len(names) == 1 and 0 < len(left) == len(right) and _matched(left, right, rules)


def _same_roots(answer: Shape, ground_truth: Shape) -> bool:
    """Compare equations of one variable, with alternatives on at least one side."""
    left, right = equations(answer), equations(ground_truth)
    if not left or not right or len(left) + len(right) < 3:
        return False
    names = {name for tree in (*left, *right) for name in symbols(tree)}
    return len(names) == 1 and same_equation(product(left), product(right))


def shape_has_value(shape: Shape) -> bool:
    """Return True if every expression of a ground truth has a value, so that an answer can equal it."""
    if isinstance(shape, Scalar):
        return scalars.has_value(shape.tree)
    if isinstance(shape, MatrixValue):
        return all(scalars.has_value(entry) for entry in _entries(shape))
    if isinstance(shape, Interval):
        return scalars.has_value(shape.low) and scalars.has_value(shape.high)
    inner = {ShapeList: "items", Union: "parts", Relation: "sides"}.get(type(shape), "")
    return all(shape_has_value(part) for part in (getattr(shape, inner) if inner else ()))


_LIKE = {
    TextShape: _words,
    Scalar: _scalar,
    ShapeList: _series,
    Interval: _interval,
    Union: _union,
    MatrixValue: _matrix,
    Relation: _relation,
}
