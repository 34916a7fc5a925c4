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
    percent: Literal["ignore", "value", "wrong"] = "ignore"
    """A percent sign in the answer is dropped, divides by 100, or makes the answer wrong unless the ground
    truth has one."""
    symbolic: bool = True
    """Answers that are no plain numbers are compared symbolically, in a process that can be killed."""
    relative_tolerance: float = Field(default=0.0, ge=0, lt=1)
    """Relative error allowed between two numbers; 0 is exact."""
    irrational: Literal["rounded", "exact"] = "rounded"
    """An irrational ground truth accepts decimals that are it, correctly rounded to as many significant digits as the answer
    shows (at least six), or nothing but the number itself."""
    unevaluated: Literal["wrong", "equal"] = "wrong"
    """Where the ground truth is an integer: an answer with an operation left to do (37 \\cdot 43, 84/2, 2^{10}, \\sqrt{16},
    a number in another base) is no answer, or is compared by its value."""
    imaginary_unit: Literal["i", "j", "none"] = "i"
    """The letter that is the imaginary unit; none where i and j are variables."""
    lists: Literal["any_order", "ordered"] = "any_order"
    """Whether the order counts in a list without brackets (1, 2, 3); in brackets it does, in a set it does not."""
    max_answer_chars: int = Field(default=400, ge=1)
    """Longer answers are refused before anything parses them."""
