"""Compare equations and inequalities: equal if they have the same solutions, or one is the other times a
nonzero factor. If neither can be shown, they are different.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from mrl.rewards.maths.expressions import Call, Constant, Symbol, Tree, symbols
from mrl.rewards.maths.scalars import POINTS, points
from mrl.rewards.maths.shapes import Interval, Relation, Scalar, Shape, ShapeList, Union, base_unit_value
from mrl.rewards.maths.values import Digits, NoValue, exact_value

_INFINITE = Constant("inf")


def same_equation(answer: Tree, ground_truth: Tree) -> bool:
    """Return True if answer = 0 and ground_truth = 0 have the same solutions; False if the ground truth has
    no variable."""
    names = symbols(ground_truth)
    if not names or symbols(answer) != names:
        return False
    return factor_sign(answer, ground_truth) is not None or _same_solutions(
        answer, ground_truth, sorted(names)
    )


def factor_sign(answer: Tree, ground_truth: Tree) -> int | None:
    """Return the sign of the nonzero constant factor between two expressions, 1 if it is not real; None if
    there is no such factor."""
    names = sorted(symbols(ground_truth) | symbols(answer))
    pairs: list[tuple[Any, Any]] = []
    for point in points(names):
        with contextlib.suppress(NoValue):
            pairs.append(_values(answer, ground_truth, point))
        if len(pairs) > POINTS:
            break
    if not pairs or any(left == 0 or right == 0 for left, right in pairs):
        return None
    first = pairs[0][0] / pairs[0][1]
    if any(not _is_zero(left - first * right, left) for left, right in pairs):
        return None
    return -1 if not getattr(first, "imag", 0) and first < 0 else 1


def _values(answer: Tree, ground_truth: Tree, point: dict[str, Fraction]) -> tuple[Any, Any]:
    try:
        return exact_value(answer, point), exact_value(ground_truth, point)
    except NoValue:
        work = Digits(120)
        return work.value(answer, point), work.value(ground_truth, point)


def _is_zero(value: Any, scale: Any) -> bool:
    return value == 0 if isinstance(value, Fraction) else abs(value) * 10**60 < abs(scale)


def _same_solutions(answer: Tree, ground_truth: Tree, names: Sequence[str]) -> bool:
    """Compare solutions along random lines: the real roots for one variable, the complex ones for several."""
    from mrl.rewards.maths.polynomials import line, numerator, same_roots  # imports sympy only if needed

    numbers = random.Random("lines")
    for _ in range(1 if len(names) == 1 else 3):
        lines = {name: line(_random(numbers), _random(numbers)) for name in names}
        try:
            left, right = (numerator(exact_value(tree, lines)) for tree in (answer, ground_truth))
        except NoValue:
            return False
        if not left or not right or not same_roots(left, right, real=len(names) == 1):
            return False
    return True


def _random(numbers: random.Random) -> Fraction:
    return Fraction(numbers.randint(-(1 << 20), 1 << 20), 1 << 10)


def product(trees: Sequence[Tree]) -> Tree:
    """Return the product of trees, which is zero if one of them is."""
    tree = trees[0]
    for other in trees[1:]:
        tree = Call("*", (tree, other))
    return tree


def sides_difference(relation: Relation) -> Tree | None:
    """Return left side minus right side; None unless both sides are expressions."""
    left, right = relation.sides
    if isinstance(left, Scalar) and isinstance(right, Scalar):
        return Call("-", (base_unit_value(left), base_unit_value(right)))
    return None


def equations(shape: Shape) -> list[Tree]:
    """Return alternative equations, each as a tree that equals zero; empty for anything else."""
    relations = shape.items if isinstance(shape, ShapeList) and shape.brackets == "" else (shape,)
    trees: list[Tree] = []
    for relation in relations:
        if not isinstance(relation, Relation) or relation.signs != ("=",):
            return []
        for side in _spread(relation):
            tree = sides_difference(side)
            if tree is None:
                return []
            trees.append(tree)
    return trees


def _spread(relation: Relation) -> list[Relation]:
    """Split a relation with alternatives: x = +-2 is two equations."""
    left, right = relation.sides
    if isinstance(right, ShapeList) and right.brackets == "":
        return [Relation((left, item), relation.signs) for item in right.items]
    return [relation]


def solved(shape: Shape) -> tuple[str, list[Interval]] | None:
    """Return the variable and intervals of an inequality that is solved for it; None for anything else."""
    if isinstance(shape, ShapeList) and shape.joined == "or" and shape.brackets == "":
        parts = [solved(item) for item in shape.items]
        names = {part[0] for part in parts if part}
        if None in parts or len(names) != 1:
            return None
        return names.pop(), [interval for part in parts if part for interval in part[1]]
    if not isinstance(shape, Relation):
        return None
    sides, signs = shape.sides, shape.signs
    if signs == ("in",) and isinstance(sides[0], Scalar) and isinstance(sides[0].tree, Symbol):
        ranges = intervals(sides[1])
        return (sides[0].tree.name, ranges) if ranges else None
    return _between(sides, signs)


def intervals(shape: Shape) -> list[Interval]:
    """Return an interval, or those of a union; empty for anything else."""
    parts = shape.parts if isinstance(shape, Union) else (shape,)
    ranges = [part for part in parts if isinstance(part, Interval)]
    return ranges if len(ranges) == len(parts) else []


def _between(sides: Sequence[Shape], signs: Sequence[str]) -> tuple[str, list[Interval]] | None:
    """Solve 1 < x <= 2, 1 < x or x <= 2."""
    trees = [side.tree for side in sides if isinstance(side, Scalar) and not side.unit]
    at = next((n for n, tree in enumerate(trees) if isinstance(tree, Symbol)), None)
    if len(trees) != len(sides) or at is None or any(symbols(t) for n, t in enumerate(trees) if n != at):
        return None
    if len({sign[0] for sign in signs}) != 1 or signs[0][0] not in "<>" or len(sides) - at > 2 or at > 1:
        return None
    variable = trees[at]
    before = (trees[at - 1], "=" in signs[at - 1]) if at else (None, False)
    after = (trees[at + 1], "=" in signs[at]) if at + 1 < len(trees) else (None, False)
    (low, low_closed), (high, high_closed) = (before, after) if signs[0][0] == "<" else (after, before)
    interval = Interval(low or Call("neg", (_INFINITE,)), high or _INFINITE, (low_closed, high_closed))
    assert isinstance(variable, Symbol)
    return variable.name, [interval]
