"""Shape rewards and the tricks that farm them."""

import pytest

from mrl.rewards.instructions.format import verify_format, verify_repetition
from mrl.rewards.instructions.instruction_rules import FormatRules, RepetitionRules

RULES = FormatRules(final_answer=True)


def test_a_response_in_shape() -> None:
    assert verify_format("<think>2+2</think>\n<answer>\\boxed{4}</answer>", RULES).value == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "", "\\boxed{4}", "<think></think><answer>\\boxed{4}</answer>", "<think>a</think><answer></answer>",
        "<answer>\\boxed{4}</answer><think>a</think>", "<think>a<answer>\\boxed{4}</answer></think>",
        "<think>a</think><think>b</think><answer>\\boxed{4}</answer>", "<think>a</think><answer>4</answer>",
        "<think>a</think><answer>\\boxed{4} \\boxed{5}</answer>",
        "<think>\\boxed{4}</think><answer>see above</answer>", "</think>a<think><answer>\\boxed{4}</answer>",
        "<think>a</think><answer>\\boxed{4}",
    ],
)  # fmt: skip
def test_tricks_earn_nothing(response: str) -> None:
    verdict = verify_format(response, RULES)
    assert verdict.value == 0.0
    assert verdict.reason


def test_repetition_is_a_penalty_in_proportion() -> None:
    rules = RepetitionRules(ngram=2)
    assert verify_repetition("a b c d e", rules).value == 0.0
    assert verify_repetition("a", rules).value == 0.0
    assert verify_repetition("a b a b a", rules).value == pytest.approx(-(1 - 2 / 4))
    assert verify_repetition("x " * 1000, rules).value == pytest.approx(-(1 - 1 / 999))
