"""A place in an answer's tokens that a reader moves on."""

from __future__ import annotations

from collections.abc import Sequence

from mrl.rewards.maths.answer_tokens import Token, Unreadable


class Cursor:
    """Tokens, and the position of the next one."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tokens
        self.position = 0

    def peek(self, ahead: int = 0) -> Token:
        """The next token, or one so far behind it; of kind end where there is none."""
        position = self.position + ahead
        return self._tokens[position] if position < len(self._tokens) else Token("end", "")

    def take(self) -> Token:
        """The next token, which is read by that."""
        token = self.peek()
        self.position += 1
        return token

    def take_digit(self) -> str:
        """The first digit of a number that is next; its others stay."""
        number, at = self.peek(), self.position
        if rest := number.text[1:]:
            digits = (Token("number", number.text[0]), Token("number", rest))
            self._tokens = [*self._tokens[:at], *digits, *self._tokens[at + 1 :]]
        return self.take().text

    def at(self, *signs: str) -> bool:
        """Whether one of the signs is next."""
        token = self.peek()
        return token.kind == "sign" and token.text in signs

    def takes(self, sign: str) -> bool:
        """Whether the sign is next; it is read by that."""
        found = self.at(sign)
        self.position += found
        return found

    def skip(self, sign: str) -> None:
        """Reads a sign; raises Unreadable where another token is next."""
        if not self.takes(sign):
            raise Unreadable(f"{self.peek().text[:20]!r} where {sign!r} is missing")

    def end(self) -> None:
        """Raises Unreadable unless everything has been read."""
        if self.position < len(self._tokens):
            raise Unreadable(f"{self.peek().text[:20]!r} behind an expression")
