"""The final answer: its places, and every way to give more than one."""

import time

import pytest

from mrl.rewards.maths.answers import final_answer
from mrl.rewards.maths.maths_rules import MathsRules

RULES = MathsRules()


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so \\boxed{42}.", "42"), ("so \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"), ("\\boxed {7}", "7"),
        ("\\fbox{7}", "7"), ("\\boxed{7} and again \\boxed{ 7 }", "7"), ("steps\n#### 1,000", "1,000"),
        ("steps\nAnswer: 12", "12"), ("**Answer:** 12", "12"), ("The final answer: $12$.\nmore text", "12"),
        ("<think>\\boxed{1}</think> \\boxed{2}", "2"), ("\\boxed{3} #### 4", "3"), (" 17 ", "17"),
        ("\\boxed{\\boxed{5}}", "5"), ("I put the answer in \\boxed{}: \\boxed{5}", "5"),
        ("'Put your answer in \\boxed{your answer}.' So \\boxed{5}", "5"),
        ("\\boxed{\\text{answer}} \\boxed{...} \\boxed{5}", "5"),
        ("$\\boxed{0.5} = \\boxed{\\frac12}$", "\\frac12"), ("\\boxed{1{,}000} or \\boxed{1000}", "1000"),
        ("\\boxed{x^2 + 1}, so \\boxed{x^{2}+1}", "x^{2}+1"), ("\\boxed{}\n#### 5", "5"),
        ("\\boxed{\\text{square}}", "\\text{square}"), ("\\boxed{below}", "below"), ("\\boxed{[]}", "[]"),
        ("\\boxed{(\\text{answer})} \\boxed{\\square} \\boxed{[your answer]} \\boxed{5}", "5"),
        ("#### Step 1: add\n2+3=5\n#### 5", "5"), ("#### 1. Add the two\n#### Answer: 5", "5"),
        ("#### Answer: \\boxed{5}", "5"), ("## Answer:\nWe add 2 and 3.\nAnswer: 5", "5"),
        ("**Final Answer:**\n\n$\\frac{1}{2}$\n", "\\frac{1}{2}"), ("<answer>Answer: 5</answer>", "5"),
        ("Answer: see below.\nAnswer: 5", "5"), ("Write 'Answer: <your answer>'.\nAnswer: 5", "5"),
        ("a</think>\\boxed{5} <think>or \\boxed{6}", "5"),
    ],
)  # fmt: skip
def test_final_answer_is_found(response: str, answer: str) -> None:
    assert final_answer(response, RULES).text == answer


@pytest.mark.parametrize(
    "response",
    [
        "", "no answer here", "\\boxed{}", "\\boxed{ }", "\\boxed{5", "\\boxed{1} \\boxed{2}",
        "#### 1\n#### 2", "Answer: 1\nAnswer: 2", "<think>\\boxed{2}</think> I am done",
        "\\boxed{" + "1" * 500 + "}", "####", "".join(f"\\boxed{{{n}}}" for n in range(100)),
        "\\boxed{5} " * 50, "17 or 18", "the number 17", "<think>it is \\boxed{5}",
        "<think>a</think> so <think>#### 5", "## Answer:", "Answer: see above", "#### Solution\nadd",
        "\\boxed{...}", "\\boxed{\\!}", "\\boxed{0.5} \\boxed{\\frac13}", "#### 5 or 6\n#### 6",
        "Answer:\nfirst 5, then 6\n",
    ],
)  # fmt: skip
def test_no_single_final_answer(response: str) -> None:
    answer = final_answer(response, RULES)
    assert answer.text is None
    assert answer.reason


def test_rules_choose_places_and_the_last_of_several() -> None:
    last = MathsRules(on_conflict="last")
    assert final_answer("\\boxed{1} \\boxed{2}", last).text == "2"
    assert final_answer("it is 3, no, 4 apples", MathsRules(extraction=("last_number",))).text == "4"
    assert final_answer("\\boxed{3}\n#### 4", MathsRules(extraction=("gsm8k", "boxed"))).text == "4"


@pytest.mark.parametrize(
    "piece",
    [
        "\\boxed{", "{", "}", "\\", "answer:", "####", "####\n", "answer :", " ", "\\boxed{}", "</think>",
        "<think>", "answer:\n", "#### step\n",
    ],
)  # fmt: skip
def test_a_megabyte_of_anything_is_quick(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    start = time.process_time()
    final_answer(text, RULES)
    assert time.process_time() - start < 1.0
