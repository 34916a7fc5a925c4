"""Calculator: exact arithmetic on numbers as they are written."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

from mrl.agents.tools.tool import ToolError, arguments_schema

_MAX_CHARS = 200
_MAX_BITS = 2000
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
}


class Arithmetic:
    """Sums, products, quotients and brackets."""

    name = "calculator"
    description = "Computes an arithmetic expression exactly: + - * / // % and brackets."
    parameters = arguments_schema(expression={"type": "string"})

    def run(self, expression: str) -> str:
        """Return the value as an integer or a reduced fraction; ToolError if it is not such an expression."""
        return str(value_of(expression))

    def close(self) -> None:
        """Do nothing."""


def value_of(expression: str) -> Fraction:
    """Return the exact value. Raise ToolError if the expression is invalid, divides by 0, or is too large."""
    if len(expression) > _MAX_CHARS:
        raise ToolError(f"an expression has at most {_MAX_CHARS} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise (
            error if isinstance(error, ToolError) else ToolError(f"{expression!r} is not an expression")
        ) from error


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            result = Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            result = _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            result = _OPERATORS[type(op)](_value(left), _value(right))
        case _:
            raise ToolError("an expression has numbers, + - * / // % and brackets, and nothing else")
    if result.numerator.bit_length() + result.denominator.bit_length() > _MAX_BITS:
        raise ToolError("the numbers grow too large")
    return result
