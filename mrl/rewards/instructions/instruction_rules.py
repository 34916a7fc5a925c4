"""Settings of instruction checks and of a response's format."""

from pydantic import Field

from mrl.section import Section


class InstructionRules(Section):
    """Rules for turning a row's checks into a value."""

    partial: bool = False
    """Give the share of passed checks as the value; default: 1 if all pass, else 0."""


class FormatRules(Section):
    """Format of a response."""

    tags: tuple[str, ...] = ("think", "answer")
    """Require each of these tags to open and close once, in this order, with content."""
    final_answer: bool = False
    """Require exactly one final answer after any mark (a box, ####, "Answer:"), outside the first tag."""


class RepetitionRules(Section):
    """Penalty for repeated text."""

    ngram: int = Field(default=20, ge=1)
    """Count repeated n-grams of this many words, or characters in scripts without spaces."""
