"""Parse an answer into its shape: text, list, set, interval, matrix, relation, number in a base, measured
value or expression. Shapes nest: a set of sets is one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from fractions import Fraction

from mrl.rewards.maths.answer_tokens import Token, Unreadable, tokenise
from mrl.rewards.maths.expressions import CLOSING, Call, Constant, Number, Tree, read_expression, walk
from mrl.rewards.maths.numbers import exact_quantity, without_percent
from mrl.rewards.maths.units import DEGREE, Unit, read_unit, split_unit


@dataclasses.dataclass(frozen=True, slots=True)
class TextShape:
    """Text, compared by its words."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Scalar:
    """Expression with or without a unit."""

    tree: Tree
    unit: Unit | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class BasedInteger:
    """Integer written in a base."""

    value: int
    base: int


@dataclasses.dataclass(frozen=True, slots=True)
class ShapeList:
    """Several shapes: `brackets` is "" for a list without brackets, "{" for a set, "(" or "[" for a tuple."""

    brackets: str
    items: tuple[Shape, ...]
    joined: str = ","
    """Separator: a comma, or, and."""


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """Two ends, and for each True if it is included. (1, 2) stands for the interval and for the pair."""

    low: Tree
    high: Tree
    closed: tuple[bool, bool]


@dataclasses.dataclass(frozen=True, slots=True)
class Union:
    """Union of intervals and sets."""

    parts: tuple[Shape, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class MatrixValue:
    """Matrix as rows of expressions."""

    rows: tuple[tuple[Tree, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Relation:
    """Sides with a sign between neighbours: x = 5, 1 < x <= 2, x in (1, 2)."""

    sides: tuple[Shape, ...]
    signs: tuple[str, ...]


Shape = TextShape | Scalar | BasedInteger | ShapeList | Interval | Union | MatrixValue | Relation

SIGNS = ("=", "<", ">", "<=", ">=", "!=", "in")
_MATRICES = ("pmatrix", "bmatrix", "matrix", "Bmatrix", "smallmatrix", "array")
_OPENING = {**CLOSING, "begin": "end"}
_TEXT = re.compile(
    r"\(?(?:\\(?:text|textbf|mathbf|mathrm|textrm|mbox|textit)\{ ?)?\(?([A-Za-z][A-Za-z '\-]*)\)?(?: ?\})?\)?"
)
_BASED = re.compile(r"([0-9A-Fa-f]{1,60})_(?:\{ ?(?:\\text\{)?([0-9]{1,2}|[a-z]+)\}?\}?|([0-9]))")
_BASES = ["", "", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_SHORT_WORDS = {
    "yes", "no", "all", "any", "odd", "one", "two", "six", "ten", "not", "day", "sun", "sea", "red",
}  # fmt: skip
_MAX_RUN = 3
_FUNCTION = re.compile(r"(?<![A-Za-z])(?:sin|cos|tan|sec|csc|cot)(?![A-Za-z])")


def words(text: str) -> str | None:
    """Return a word answer (choice letter, yes/no, a name) in lower case; None for mathematics.

    There one small letter is a variable, up to three are a product, and a dash between letters is a minus.
    """
    match = _TEXT.fullmatch(text)
    if not match:
        return None
    run = match[1]
    if run in ("sqrt", "pi", "inf", "infinity", "oo"):
        return None
    if len(run) == 1 and run.islower():
        return None
    if run == text and (all(map(_is_product, run.split("-"))) or re.fullmatch("[A-Z](?: ?- ?[A-Z])+", run)):
        return None
    between = "" if re.fullmatch("[A-Z](?: +[A-Z])+", run) else " "  # A B is the line AB
    return between.join(run.lower().split())


def _is_product(run: str) -> bool:
    """Return True for up to three small letters that are not a word, or single ones separated by spaces."""
    letters = run.strip()
    if " " in letters:
        return letters.islower() and max(map(len, letters.split())) == 1
    return (
        letters.isalpha() and letters.islower() and len(letters) <= _MAX_RUN and letters not in _SHORT_WORDS
    )


@dataclasses.dataclass(frozen=True, slots=True)
class ParseOptions:
    """Options for reading letters, set by the ground truth."""

    single_letters: bool = False
    """True if plain single letters after a number may be units."""


def parse_shape(text: str, reading: ParseOptions) -> Shape:
    """Return the shape of a tidy text. Raises Unreadable."""
    word = words(text)
    if word is not None:
        return TextShape(word)
    based = _BASED.fullmatch(text.replace("\\textbf", "\\text"))
    if based:
        return _based(based)
    return _measured(text, reading) or _ShapeReader().shape(tokenise(without_percent(text)[0]))


def _measured(text: str, reading: ParseOptions) -> Shape | None:
    """Return an expression with a unit; None without one, or if the degrees are those of a function."""
    body, unit = split_unit(text, single_letters=reading.single_letters)
    if unit is None or (unit == DEGREE and _FUNCTION.search(body)):
        return None
    quantity = exact_quantity(body)
    try:
        tree = Number(quantity.value) if quantity else read_expression(tokenise(body))
    except Unreadable:
        return None  # a s is a product
    return Scalar(tree, unit)


def _based(match: re.Match[str]) -> Shape:
    name = match[2] or match[3]
    base = int(name) if name.isdigit() else (_BASES.index(name) if name in _BASES else 0)
    if not 2 <= base <= 16:
        raise Unreadable(f"the base {name}")
    try:
        return BasedInteger(int(match[1], base), base)
    except ValueError as error:
        raise Unreadable(f"digits that base {base} does not have") from error


class _ShapeReader:
    def shape(self, tokens: Sequence[Token]) -> Shape:
        """Parse from the outside in: lists, relations, unions, brackets, expressions."""
        for joint in ("or", "and", ","):
            parts = _split(tokens, (joint,))
            if len(parts) > 1:
                return self._list([part for part, _ in parts], joint)
        return self._relation(tokens)

    def _list(self, parts: list[Sequence[Token]], joint: str) -> Shape:
        items = self._items([_without_commas(part) if joint != "," else part for part in parts])
        return items[0] if len(items) == 1 else ShapeList("", items, joint)

    def _items(self, parts: list[Sequence[Token]]) -> tuple[Shape, ...]:
        """Return the shape of each part; nested lists without brackets are flattened."""
        items: list[Shape] = []
        for part in parts:
            shape = self.shape(part)
            if isinstance(shape, ShapeList) and not shape.brackets:
                items += shape.items
            else:
                items.append(shape)
        return tuple(items)

    def _relation(self, tokens: Sequence[Token]) -> Shape:
        parts = _split(tokens, SIGNS)
        if len(parts) == 1:
            return self._union(tokens)
        sides = tuple(self._union(part) for part, _ in parts)
        return Relation(sides, tuple(sign for _, sign in parts[1:]))

    def _union(self, tokens: Sequence[Token]) -> Shape:
        parts = _split(tokens, ("cup",))
        if len(parts) == 1:
            return self._one(tokens)
        return Union(tuple(self._one(part) for part, _ in parts))

    def _one(self, tokens: Sequence[Token]) -> Shape:
        if not tokens:
            raise Unreadable("something is missing")
        first, last = tokens[0], tokens[-1]
        if len(tokens) == 1 and first.kind == "text":
            number = exact_quantity(first.text)
            if number and not number.is_quotient:
                return Scalar(Number(number.value), number.unit)
            return TextShape(" ".join(first.text.lower().split()))
        if len(tokens) == 1 and first[:2] == ("sign", "empty"):
            return ShapeList("{", ())
        if first.kind == "sign" and first.text == "begin" and last.kind == "name":
            return self._matrix(tokens)
        if first.kind == "sign" and first.text in ("(", "[", "]", "\\{", "langle"):
            shape = self._bracketed(tokens)
            if shape is not None:
                return shape
        return self._scalar(tokens)

    def _bracketed(self, tokens: Sequence[Token]) -> Shape | None:
        """Return a tuple, set, interval or matrix; None if the outer brackets do not belong together."""
        opening, closing, inner = tokens[0].text, tokens[-1].text, tokens[1:-1]
        if len(tokens) < 2 or not _is_whole(tokens):
            return None
        if opening == "\\{":
            return self._set(inner) if closing == "\\}" else None
        parts = [part for part, _ in _split(inner, (",",))]
        if len(parts) == 2:
            return self._pair(parts, opening, closing)
        if len(parts) == 1 and inner and inner[0].text == "begin":
            return self._matrix(inner)
        if closing != CLOSING.get(opening) or (len(parts) == 1 and opening != "["):
            return None
        return ShapeList("(" if opening == "langle" else opening, self._items(parts))

    def _set(self, inner: Sequence[Token]) -> Shape:
        if not inner:
            return ShapeList("{", ())
        parts = [part for part, _ in _split(inner, (",",))]
        return ShapeList("{", self._items(parts))

    def _pair(self, parts: list[Sequence[Token]], opening: str, closing: str) -> Shape:
        low, high = (self.shape(part) for part in parts)
        if isinstance(low, Scalar) and isinstance(high, Scalar) and not (low.unit or high.unit):
            return Interval(low.tree, high.tree, (opening == "[", closing == "]"))
        if closing != CLOSING.get(opening):
            raise Unreadable("an interval whose ends have no order")
        return ShapeList("(" if opening == "langle" else opening, (low, high))

    def _matrix(self, tokens: Sequence[Token]) -> Shape:
        name, inner = tokens[1].text, tokens[2:-2]
        if name.removesuffix("*") not in _MATRICES or tokens[-1].text != name or tokens[-2].text != "end":
            raise Unreadable(f"an environment {name[:20]!r}")
        if name == "array" and inner and inner[0].text == "{":
            inner = inner[[token.text for token in inner].index("}") + 1 :]
        if name.endswith("*") and [token.text for token in inner[:3:2]] == ["[", "]"]:
            inner = inner[3:]  # the alignment of its columns
        rows = [row for row, _ in _split(inner, ("\\\\",))]
        if not rows[-1]:
            rows.pop()
        entries = tuple(tuple(read_expression(cell) for cell, _ in _split(row, ("&",))) for row in rows)
        if len({len(row) for row in entries}) != 1:
            raise Unreadable("rows of different lengths")
        return MatrixValue(entries)

    def _scalar(self, tokens: Sequence[Token]) -> Shape:
        text = "".join(token.text for token in tokens)
        based = _BASED.fullmatch(text)
        if based and tokens[0].kind == "number":
            return _based(based)
        if tokens[-1].kind == "text" and (unit := read_unit(tokens[-1].text)):
            return Scalar(read_expression(tokens[:-1]), unit)
        tree = read_expression(tokens)
        if isinstance(tree, Call) and tree.name == "degrees":
            return Scalar(tree.arguments[0], DEGREE)
        return _alternatives(tree)


def _without_commas(tokens: Sequence[Token]) -> Sequence[Token]:
    """Drop the comma before the word in 1, 2, and 3."""
    while tokens and tokens[-1][:2] == ("sign", ","):
        tokens = tokens[:-1]
    return tokens


def _split(tokens: Sequence[Token], signs: Sequence[str]) -> list[tuple[Sequence[Token], str]]:
    """Split at signs outside all brackets; return the parts, each with the sign before it."""
    parts: list[tuple[Sequence[Token], str]] = []
    depth, start, before = 0, 0, ""
    for position, token in enumerate(tokens):
        if token.kind != "sign":
            continue
        if token.text in signs and depth == 0:
            parts.append((tokens[start:position], before))
            start, before = position + 1, token.text
        depth += _step(tokens, position)
    parts.append((tokens[start:], before))
    return parts


def _step(tokens: Sequence[Token], position: int) -> int:
    """Return a token's change of depth; either bracket may open or close an interval: ]1, 2[ and [1, 2)."""
    text = tokens[position].text
    if tokens[position].kind != "sign":
        return 0
    if text in _OPENING and text not in "([":
        return 1
    if text in _OPENING.values() and text not in ")]":
        return -1
    if text in ("(", "["):
        outward = text == "[" and position == len(tokens) - 1 and position > 0
        return -1 if outward else 1
    if text in (")", "]"):
        inward = text == "]" and position == 0
        return 1 if inward else -1
    return 0


def _is_whole(tokens: Sequence[Token]) -> bool:
    """Return True if the last token closes the first token's bracket."""
    depth = 0
    for position in range(len(tokens)):
        depth += _step(tokens, position)
        if depth == 0:
            return position == len(tokens) - 1
    return False


def _alternatives(tree: Tree) -> Shape:
    """Turn 2 +- 3 into the list of both values; several signs switch together, the upper ones first."""
    if not any(isinstance(node, Call) and node.name in ("+-", "-+") for node in walk(tree)):
        return Scalar(tree)
    return ShapeList("", (Scalar(_chosen(tree, upper=True)), Scalar(_chosen(tree, upper=False))), "or")


def _chosen(tree: Tree, *, upper: bool) -> Tree:
    if not isinstance(tree, Call):
        return tree
    name = {"+-": "+-"[not upper], "-+": "-+"[not upper]}.get(tree.name, tree.name)
    return Call(name, tuple(_chosen(argument, upper=upper) for argument in tree.arguments))


def base_unit_value(scalar: Scalar) -> Tree:
    """Return the value in base units."""
    unit = scalar.unit
    if unit is None:
        return scalar.tree
    tree: Tree = Call("*", (scalar.tree, Number(Fraction(unit.scale))))
    return Call("*", (tree, Call("^", (Constant("pi"), Number(Fraction(unit.pi)))))) if unit.pi else tree
