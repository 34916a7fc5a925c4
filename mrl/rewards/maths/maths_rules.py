"""What of maths answers is a setting."""

from typing import Literal

from pydantic import Field

from mrl.section import Section


class MathsRules(Section):
    """What counts as the final answer and which forms are equal."""

    extraction: tuple[
        Literal["boxed", "gsm8k", "answer", "answer_tags", "whole_response", "last_number"], ...
    ] = ("boxed", "gsm8k", "answer", "answer_tags", "whole_response")
    """Places a final answer may stand in, tried in this order: \\boxed{}, behind GSM8K's ####, behind "Answer:", between
    <answer> and </answer>, all of the response, the last number in it."""
    on_conflict: Literal["wrong", "last"] = "wrong"
    """A response with different final answers in the same place: wrong, or the last one counts."""
    symbolic: bool = True
    """Answers that are no plain numbers are compared symbolically, in a process that can be killed."""
    relative_tolerance: float = Field(default=0.0, ge=0, lt=1)
    """Relative error allowed between two numbers; 0 is exact."""
