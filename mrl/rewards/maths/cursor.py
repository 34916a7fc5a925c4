"""Cursor of a parser over an answer's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from mrl.rewards.maths.answer_tokens import Token, Unreadable


class Cursor:
    """Tokens with the position of the next one."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tokens
        self.position = 0

    def peek(self, ahead: int = 0) -> Token:
        """Return the next token, or the one `ahead` places after it; of kind "end" after the last."""
        position = self.position + ahead
        return self._tokens[position] if position < len(self._tokens) else Token("end", "")

    def take(self) -> Token:
        """Return the next token and move past it."""
        token = self.peek()
        self.position += 1
        return token

    def take_digit(self) -> str:
        """Return the first digit of the next token, a number, and leave its other digits."""
        number, at = self.peek(), self.position
        if remaining := number.text[1:]:
            digits = (Token("number", number.text[0]), Token("number", remaining))
            self._tokens = [*self._tokens[:at], *digits, *self._tokens[at + 1 :]]
        return self.take().text

    def at(self, *signs: str) -> bool:
        """Return True if one of the signs is next."""
        token = self.peek()
        return token.kind == "sign" and token.text in signs

    def takes(self, sign: str) -> bool:
        """Return True if the sign is next, and move past it."""
        is_next = self.at(sign)
        self.position += is_next
        return is_next

    def skip(self, sign: str) -> None:
        """Move past a sign. Raises Unreadable if another token is next."""
        if not self.takes(sign):
            raise Unreadable(f"{self.peek().text[:20]!r} in place of {sign!r}")

    def end(self) -> None:
        """Raise Unreadable if tokens remain."""
        if self.position < len(self._tokens):
            raise Unreadable(f"{self.peek().text[:20]!r} after an expression")
