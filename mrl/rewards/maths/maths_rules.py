"""Settings of the maths verifier."""

from typing import Literal

from pydantic import Field

from mrl.section import Section


class MathsRules(Section):
    """Rules for finding and comparing final answers."""

    extraction: tuple[
        Literal["boxed", "gsm8k", "answer", "answer_tags", "whole_response", "last_number"], ...
    ] = ("boxed", "gsm8k", "answer", "answer_tags", "whole_response")
    """Look for the final answer in these places, in order: \\boxed{}, after GSM8K's ####, after "Answer:",
    between <answer> and </answer>, the whole response, its last number."""
    on_conflict: Literal["wrong", "last"] = "wrong"
    """If a response has different final answers in one place: wrong rejects it, last takes the last one."""
    symbolic: bool = True
    """Compare answers that are not plain numbers symbolically, in a process that can be killed."""
    relative_tolerance: float = Field(default=0.0, ge=0, lt=1)
    """Allow this relative error between two numbers; 0: exact."""
