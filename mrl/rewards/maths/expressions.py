"""Expressions as trees, read from tokens by precedence. Nothing is evaluated here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from fractions import Fraction

from mrl.rewards.maths.answer_tokens import Token, Unreadable


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """A rational literal."""

    value: Fraction
    numeral: str = ""
    """As it was written, where it was written in digits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Constant:
    """pi, e, i or inf."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Symbol:
    """A variable, its index included."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """An operation: + - * / ^ neg ! +- or the name of a function."""

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
    reader = _Reader(tokens)
    tree = reader.sum()
    reader.end()
    return tree


def symbols(tree: Tree) -> set[str]:
    """The names of the variables in a tree."""
    return {node.name for node in walk(tree) if isinstance(node, Symbol)}


def walk(tree: Tree) -> Iterator[Tree]:
    """Every node, the tree itself first."""
    yield tree
    if isinstance(tree, Call):
        for argument in tree.arguments:
            yield from walk(argument)


class _Reader:
    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tokens
        self._at = 0

    # The cursor.

    def _peek(self, ahead: int = 0) -> Token:
        position = self._at + ahead
        return self._tokens[position] if position < len(self._tokens) else Token("end", "")

    def _take(self) -> Token:
        token = self._peek()
        self._at += 1
        return token

    def _is(self, *signs: str) -> bool:
        token = self._peek()
        return token.kind == "sign" and token.text in signs

    def _skip(self, sign: str) -> None:
        if not self._is(sign):
            raise Unreadable(f"{self._peek().text[:20]!r} where {sign!r} is missing")
        self._at += 1

    def end(self) -> None:
        """Raises Unreadable unless everything has been read."""
        if self._at < len(self._tokens):
            raise Unreadable(f"{self._peek().text[:20]!r} behind an expression")

    # Precedence: sums, products, factors side by side, signs, powers, atoms.

    def sum(self) -> Tree:
        tree = self._product()
        while self._is("+", "-", "+-", "-+"):
            sign = self._take().text
            tree = Call(sign, (tree, self._product()))
        return tree

    def _product(self) -> Tree:
        tree = self._signed()
        while True:
            if self._is("*", "/"):
                sign = self._take().text
                tree = Call(sign, (tree, self._signed()))
            elif self._starts_factor():
                tree = Call("*", (tree, self._factor_beside(tree)))
            else:
                return tree

    def _factor_beside(self, left: Tree) -> Tree:
        if self._peek().kind == "number" and self._tokens[self._at - 1].kind == "number":
            raise Unreadable("numbers side by side")
        return self._power()

    def _starts_factor(self) -> bool:
        token = self._peek()
        if token.kind in ("number", "letter", "function"):
            return True
        return self._is("(", "{", "[", "frac", "binom", "sqrt", "pi", "lfloor", "lceil")

    def _signed(self) -> Tree:
        if self._is("-"):
            self._at += 1
            return Call("neg", (self._signed(),))
        if self._is("+"):
            self._at += 1
            return self._signed()
        if self._is("+-", "-+"):
            return Call(self._take().text, (Number(Fraction(0)), self._signed()))
        return self._power()

    def _power(self) -> Tree:
        tree = self._postfixed(self._atom())
        if not self._is("^"):
            return tree
        self._at += 1
        if self._degrees():
            return self._postfixed(Call("degrees", (tree,)))
        return self._postfixed(Call("^", (tree, self._exponent())))

    def _exponent(self) -> Tree:
        """One group or one thing; a power in an exponent needs braces and is read to the right."""
        if self._is("-"):
            self._at += 1
            return Call("neg", (self._exponent(),))
        if self._peek().kind == "function":
            raise Unreadable("a function as a bare exponent")
        tree = self._argument() if self._is("{") else self._atom()
        return tree if not self._is("^") else self._raised(tree)

    def _raised(self, base: Tree) -> Tree:
        self._skip("^")
        return Call("^", (base, self._exponent()))

    def _degrees(self) -> bool:
        """Skips a degree sign behind ^."""
        if self._is("circ"):
            self._at += 1
            return True
        if self._is("{") and self._peek(1)[:2] == ("sign", "circ") and self._peek(2)[:2] == ("sign", "}"):
            self._at += 3
            return True
        return False

    def _postfixed(self, tree: Tree) -> Tree:
        while self._is("!", "degree"):
            tree = Call("!" if self._take().text == "!" else "degrees", (tree,))
        return tree

    def _atom(self) -> Tree:
        token = self._take()
        if token.kind == "number":
            return self._number(token)
        if token.kind == "letter":
            return self._letter(token.text)
        if token.kind == "function":
            return self._function(token.text)
        if token.kind != "sign":
            raise Unreadable(
                f"{token.text[:20]!r} in an expression" if token.text else "an unfinished expression"
            )
        return self._sign(token.text)

    def _sign(self, sign: str) -> Tree:
        if sign in ("pi", "inf"):
            return Constant(sign)
        if sign in ("(", "{", "["):
            return self._closed(sign)
        if sign == "|":
            tree = self.sum()
            self._skip("|")
            return Call("abs", (tree,))
        if sign in ("lfloor", "lceil"):
            return Call(sign[1:], (self._closed(sign),))
        if sign == "frac":
            return Call("/", (self._argument(), self._argument()))
        if sign == "binom":
            return Call("binom", (self._argument(), self._argument()))
        if sign == "sqrt":
            return self._function("sqrt")
        raise Unreadable(f"{sign!r} in an expression")

    def _closed(self, opening: str) -> Tree:
        tree = self.sum()
        self._skip(CLOSING[opening])
        return tree

    def _argument(self) -> Tree:
        """A group in braces, or one digit or letter: \\frac12 is a half."""
        if self._is("{"):
            self._at += 1
            return self._closed("{")
        token = self._peek()
        if token.kind == "number" and token.text.isdigit():
            return self._digit(token)
        if token.kind in ("letter",) or self._is("pi"):
            return self._atom()
        raise Unreadable("an argument is missing")

    def _digit(self, token: Token) -> Tree:
        """The first digit of a number; the others stay."""
        rest = token.text[1:]
        if rest:
            self._tokens = [*self._tokens[: self._at], Token("number", token.text[0]), Token("number", rest), *self._tokens[self._at + 1 :]]  # fmt: skip
        self._at += 1
        return _literal(token.text[0])

    def _number(self, token: Token) -> Tree:
        number = _literal(token.text)
        if self._is("overline"):
            return self._repeating(token.text)
        mixed = self._mixed(number)
        return mixed or number

    def _repeating(self, digits: str) -> Tree:
        """0.1\\overline{6}"""
        self._skip("overline")
        self._skip("{")
        period = self._take().text
        self._skip("}")
        if "." not in digits or not period.isdigit():
            raise Unreadable("a line over something that repeats nothing")
        places = len(digits.partition(".")[2])
        value = Fraction(int(period), (10 ** len(period) - 1) * 10**places)
        return Number(Fraction(digits.rstrip(".")) + value)

    def _mixed(self, whole: Number) -> Tree | None:
        """1\\frac{1}{2} and 1 1/2: an integer before a proper fraction of integers is added to it."""
        start = self._at
        if not whole.numeral.isdigit():
            return None
        if self._is("frac"):
            self._at += 1
            part = Call("/", (self._argument(), self._argument()))
        elif self._peek().kind == "number" and self._peek().spaced and self._peek(1).text == "/":
            above, _, below = self._take(), self._take(), self._take()
            if below.kind != "number":
                raise Unreadable("numbers side by side")
            part = Call("/", (_literal(above.text), _literal(below.text)))
        else:
            return None
        above, below = part.arguments
        if _is_proper(above, below):
            return Call("+", (whole, part))
        self._at = start
        if self._peek().kind == "number":
            raise Unreadable("numbers side by side")
        return None

    def _letter(self, name: str) -> Tree:
        index = self._index()
        while self._is("'"):
            self._at += 1
            index += "'"
        if not self._peek().spaced and [self._peek(n).text for n in range(3)] == ["(", "0", ")"]:
            self._at += 3  # I(0) is a value of the function I: nobody writes a product with nothing
            return Symbol(f"{name}{index}(0)")
        if not index and name in _CONSTANTS:
            return Constant(_CONSTANTS[name])
        return Symbol(name + index)

    def _index(self) -> str:
        if not self._is("_"):
            return ""
        self._at += 1
        if not self._is("{"):
            token = self._take()
            if token.kind not in ("number", "letter"):
                raise Unreadable("an index without content")
            return "_" + token.text
        self._at += 1
        parts = []
        while not self._is("}"):
            if self._peek().kind == "end":
                raise Unreadable("an open index")
            parts.append(self._take().text)
        self._at += 1
        return "_" + "".join(parts)

    def _function(self, name: str) -> Tree:
        name = _ALIASES.get(name, name)
        if name == "sqrt":
            return self._root()
        base = self._base(name)
        power = self._function_power()
        if power == Call("neg", (Number(Fraction(1), "1"),)) and name in _INVERSE:
            name, power = _INVERSE[name], None
        tree = Call(name, (*self._function_arguments(name), *base))
        return tree if power is None else Call("^", (tree, power))

    def _base(self, name: str) -> tuple[Tree, ...]:
        """The base of a logarithm: 10 where none is written."""
        if name != "log":
            return ()
        if not self._is("_"):
            return (Number(Fraction(10)),)
        self._at += 1
        return (self._argument() if self._is("{") or self._peek().kind != "number" else self._atom(),)

    def _function_power(self) -> Tree | None:
        if not self._is("^"):
            return None
        self._at += 1
        return self._exponent()

    def _function_arguments(self, name: str) -> tuple[Tree, ...]:
        if self._is("(", "{", "["):
            opening = self._take().text
            arguments = [self.sum()]
            while name in _SEVERAL and self._is(","):
                self._at += 1
                arguments.append(self.sum())
            self._skip(CLOSING[opening])
            return tuple(arguments)
        return (self._bare_argument(),)

    def _bare_argument(self) -> Tree:
        """sin 2x: factors side by side, up to the next operator or function."""
        if self._is("-"):
            self._at += 1
            return Call("neg", (self._bare_argument(),))
        tree = self._power()
        while self._starts_factor() and self._peek().kind != "function" and not self._is("(", "["):
            tree = Call("*", (tree, self._factor_beside(tree)))
        return tree

    def _root(self) -> Tree:
        degree: Tree | None = None
        if self._is("["):
            self._at += 1
            degree = self._closed("[")
        if self._is("("):
            self._at += 1
            radicand = self._closed("(")
        elif self._is("{"):
            radicand = self._argument()
        else:
            radicand = self._atom()
        if degree is None or degree == Number(Fraction(2), "2"):
            return Call("sqrt", (radicand,))
        return Call("^", (radicand, Call("/", (Number(Fraction(1)), degree))))


def _literal(text: str) -> Number:
    return Number(Fraction(text.rstrip(".") if text.endswith(".") else text), text)


def _is_proper(above: Tree, below: Tree) -> bool:
    if not (isinstance(above, Number) and isinstance(below, Number)):
        return False
    return above.value.denominator == below.value.denominator == 1 and 0 < above.value < below.value
