"""Parse tokens into expression trees by precedence, without evaluating anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from fractions import Fraction

from mrl.rewards.maths.answer_tokens import Token, Unreadable
from mrl.rewards.maths.cursor import Cursor


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """Rational literal."""

    value: Fraction
    numeral: str = ""
    """Digits as written; empty if it was not written in digits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Constant:
    """Constant pi, e, i or inf."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Symbol:
    """Variable with its index."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """Operation: + - * / ^ neg ! +- or the name of a function."""

    name: str
    arguments: tuple[Tree, ...]


Tree = Number | Constant | Symbol | Call

CLOSING = {
    "(": ")",
    "[": "]",
    "{": "}",
    "\\{": "\\}",
    "lfloor": "rfloor",
    "lceil": "rceil",
    "langle": "rangle",
}
_ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "exp": "exp", "lg": "log"}
_CONSTANTS = {"e": "e", "i": "i"}
_SEVERAL = ("max", "min", "gcd", "lcm")
_INVERSE = {n: "arc" + n for n in ("sin", "cos", "tan", "sec", "csc", "cot")}


def read_expression(tokens: Sequence[Token]) -> Tree:
    """Return the tree of all tokens; i is the imaginary unit. Raises Unreadable."""
    cursor = Cursor(tokens)
    tree = _sum(cursor)
    cursor.end()
    return tree


def symbols(tree: Tree) -> set[str]:
    """Return the names of the variables in a tree."""
    return {node.name for node in walk(tree) if isinstance(node, Symbol)}


def walk(tree: Tree) -> Iterator[Tree]:
    """Yield every node, the tree itself first."""
    yield tree
    if isinstance(tree, Call):
        for argument in tree.arguments:
            yield from walk(argument)


# By precedence: sums, products, juxtaposed factors, signs, powers, atoms.


def _sum(tokens: Cursor) -> Tree:
    tree = _product(tokens)
    while tokens.at("+", "-", "+-", "-+"):
        sign = tokens.take().text
        tree = Call(sign, (tree, _product(tokens)))
    return tree


def _product(tokens: Cursor) -> Tree:
    tree = _signed(tokens)
    while True:
        if tokens.at("*", "/"):
            sign = tokens.take().text
            tree = Call(sign, (tree, _signed(tokens)))
        elif _starts_factor(tokens):
            tree = Call("*", (tree, _factor_beside(tokens)))
        else:
            return tree


def _factor_beside(tokens: Cursor) -> Tree:
    if tokens.peek().kind == "number" and tokens.peek(-1).kind == "number":
        raise Unreadable("two numbers without an operator")
    return _power(tokens)


def _starts_factor(tokens: Cursor) -> bool:
    token = tokens.peek()
    if token.kind in ("number", "letter", "function"):
        return True
    return tokens.at("(", "{", "[", "frac", "binom", "sqrt", "pi", "lfloor", "lceil")


def _signed(tokens: Cursor) -> Tree:
    if tokens.takes("-"):
        return Call("neg", (_signed(tokens),))
    if tokens.takes("+"):
        return _signed(tokens)
    if tokens.at("+-", "-+"):
        return Call(tokens.take().text, (Number(Fraction(0)), _signed(tokens)))
    return _power(tokens)


def _power(tokens: Cursor) -> Tree:
    tree = _postfixed(tokens, _atom(tokens))
    if not tokens.takes("^"):
        return tree
    if _degrees(tokens):
        return _postfixed(tokens, Call("degrees", (tree,)))
    return _postfixed(tokens, Call("^", (tree, _exponent(tokens))))


def _exponent(tokens: Cursor) -> Tree:
    """Read a group or an atom; a bare power in an exponent associates to the right."""
    if tokens.takes("-"):
        return Call("neg", (_exponent(tokens),))
    if tokens.peek().kind == "function":
        raise Unreadable("a function as a bare exponent")
    tree = _argument(tokens) if tokens.at("{") else _atom(tokens)
    return Call("^", (tree, _exponent(tokens))) if tokens.takes("^") else tree


def _degrees(tokens: Cursor) -> bool:
    """Skip a degree sign after ^, and return True if there was one."""
    if tokens.takes("circ"):
        return True
    if tokens.at("{") and tokens.peek(1)[:2] == ("sign", "circ") and tokens.peek(2)[:2] == ("sign", "}"):
        tokens.position += 3
        return True
    return False


def _postfixed(tokens: Cursor, tree: Tree) -> Tree:
    while tokens.at("!", "degree"):
        tree = Call("!" if tokens.take().text == "!" else "degrees", (tree,))
    return tree


def _atom(tokens: Cursor) -> Tree:
    token = tokens.take()
    if token.kind == "number":
        return _number(tokens, token)
    if token.kind == "letter":
        return _letter(tokens, token.text)
    if token.kind == "function":
        return _function(tokens, token.text)
    if token.kind != "sign":
        raise Unreadable(
            f"{token.text[:20]!r} in an expression" if token.text else "an unfinished expression"
        )
    return _sign(tokens, token.text)


def _sign(tokens: Cursor, sign: str) -> Tree:
    if sign in ("pi", "inf"):
        return Constant(sign)
    if sign in ("(", "{", "["):
        return _closed(tokens, sign)
    if sign == "|":
        tree = _sum(tokens)
        tokens.skip("|")
        return Call("abs", (tree,))
    if sign in ("lfloor", "lceil"):
        return Call(sign[1:], (_closed(tokens, sign),))
    if sign == "frac":
        return Call("/", (_argument(tokens), _argument(tokens)))
    if sign == "binom":
        return Call("binom", (_argument(tokens), _argument(tokens)))
    if sign == "sqrt":
        return _function(tokens, "sqrt")
    raise Unreadable(f"{sign!r} in an expression")


def _closed(tokens: Cursor, opening: str) -> Tree:
    tree = _sum(tokens)
    tokens.skip(CLOSING[opening])
    return tree


def _argument(tokens: Cursor) -> Tree:
    """Read a group in braces, or one digit or letter: \\frac12 is a half."""
    if tokens.takes("{"):
        return _closed(tokens, "{")
    token = tokens.peek()
    if token.kind == "number" and token.text.isdigit():
        return _literal(tokens.take_digit())
    if token.kind in ("letter",) or tokens.at("pi"):
        return _atom(tokens)
    raise Unreadable("an argument is missing")


def _number(tokens: Cursor, token: Token) -> Tree:
    number = _literal(token.text)
    if tokens.takes("overline"):
        return _repeating(tokens, token.text)
    mixed = _mixed(tokens, number)
    return mixed or number


def _repeating(tokens: Cursor, digits: str) -> Tree:
    """Read a repeating decimal: 0.1\\overline{6}."""
    tokens.skip("{")
    period = tokens.take().text
    tokens.skip("}")
    if "." not in digits or not period.isdigit():
        raise Unreadable("an overline that is not over the digits of a decimal")
    places = len(digits.partition(".")[2])
    value = Fraction(int(period), (10 ** len(period) - 1) * 10**places)
    return Number(Fraction(digits.rstrip(".")) + value)


def _mixed(tokens: Cursor, whole: Number) -> Tree | None:
    """Read a mixed number: 1\\frac{1}{2} or 1 1/2, an integer before a proper fraction of integers."""
    start = tokens.position
    if not whole.numeral.isdigit():
        return None
    if tokens.takes("frac"):
        part = Call("/", (_argument(tokens), _argument(tokens)))
    elif tokens.peek().kind == "number" and tokens.peek().spaced and tokens.peek(1).text == "/":
        above, _, below = tokens.take(), tokens.take(), tokens.take()
        if below.kind != "number":
            raise Unreadable("two numbers without an operator")
        part = Call("/", (_literal(above.text), _literal(below.text)))
    else:
        return None
    above, below = part.arguments
    if _is_proper(above, below):
        return Call("+", (whole, part))
    tokens.position = start
    if tokens.peek().kind == "number":
        raise Unreadable("two numbers without an operator")
    return None


def _letter(tokens: Cursor, name: str) -> Tree:
    index = _index(tokens)
    while tokens.takes("'"):
        index += "'"
    if not tokens.peek().spaced and [tokens.peek(n).text for n in range(3)] == ["(", "0", ")"]:
        tokens.position += 3  # I(0) is a value of the function I: nobody writes a product with 0
        return Symbol(f"{name}{index}(0)")
    if not index and name in _CONSTANTS:
        return Constant(_CONSTANTS[name])
    return Symbol(name + index)


def _index(tokens: Cursor) -> str:
    if not tokens.takes("_"):
        return ""
    if not tokens.takes("{"):
        token = tokens.take()
        if token.kind not in ("number", "letter"):
            raise Unreadable("an index without content")
        return "_" + token.text
    parts = []
    while not tokens.takes("}"):
        if tokens.peek().kind == "end":
            raise Unreadable("an open index")
        parts.append(tokens.take().text)
    return "_" + "".join(parts)


def _function(tokens: Cursor, name: str) -> Tree:
    name = _ALIASES.get(name, name)
    if name == "sqrt":
        return _root(tokens)
    base = _base(tokens, name)
    power = _exponent(tokens) if tokens.takes("^") else None
    if power == Call("neg", (Number(Fraction(1), "1"),)) and name in _INVERSE:
        name, power = _INVERSE[name], None
    tree = Call(name, (*_function_arguments(tokens, name), *base))
    return tree if power is None else Call("^", (tree, power))


def _base(tokens: Cursor, name: str) -> tuple[Tree, ...]:
    """Read the base of a logarithm; the default is 10."""
    if name != "log":
        return ()
    if not tokens.takes("_"):
        return (Number(Fraction(10)),)
    return (_argument(tokens) if tokens.at("{") or tokens.peek().kind != "number" else _atom(tokens),)


def _function_arguments(tokens: Cursor, name: str) -> tuple[Tree, ...]:
    if tokens.at("(", "{", "["):
        opening = tokens.take().text
        arguments = [_sum(tokens)]
        while name in _SEVERAL and tokens.takes(","):
            arguments.append(_sum(tokens))
        tokens.skip(CLOSING[opening])
        return tuple(arguments)
    return (_bare_argument(tokens),)


def _bare_argument(tokens: Cursor) -> Tree:
    """Read an argument without brackets (sin 2x): factors up to the next operator, function or bracket."""
    if tokens.takes("-"):
        return Call("neg", (_bare_argument(tokens),))
    tree = _power(tokens)
    while _starts_factor(tokens) and tokens.peek().kind != "function" and not tokens.at("(", "["):
        tree = Call("*", (tree, _factor_beside(tokens)))
    return tree


def _root(tokens: Cursor) -> Tree:
    degree: Tree | None = None
    if tokens.takes("["):
        degree = _closed(tokens, "[")
    if tokens.takes("("):
        radicand = _closed(tokens, "(")
    elif tokens.at("{"):
        radicand = _argument(tokens)
    else:
        radicand = _atom(tokens)
    if degree is None or degree == Number(Fraction(2), "2"):
        return Call("sqrt", (radicand,))
    return Call("^", (radicand, Call("/", (Number(Fraction(1)), degree))))


def _literal(text: str) -> Number:
    return Number(Fraction(text.rstrip(".") if text.endswith(".") else text), text)


def _is_proper(above: Tree, below: Tree) -> bool:
    if not (isinstance(above, Number) and isinstance(below, Number)):
        return False
    return above.value.denominator == below.value.denominator == 1 and 0 < above.value < below.value
