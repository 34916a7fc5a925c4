"""What of instructions and of a response's shape is a setting."""

from pydantic import Field

from mrl.section import Section


class InstructionRules(Section):
    """How the checks of a row make a value."""

    partial: bool = False
    """The value is the share of passed checks rather than all or nothing."""


class FormatRules(Section):
    """Shape of a response."""

    tags: tuple[str, ...] = ("think", "answer")
    """Tags that must each open and close once, in this order, with content."""
    final_answer: bool = False
    """There must be exactly one final answer, behind whatever mark (a box, ####, "Answer:"), outside the first
    tag."""


class RepetitionRules(Section):
    """Penalty for repeated text."""

    ngram: int = Field(default=20, ge=1)
    """Words per n-gram; characters in scripts without spaces."""
