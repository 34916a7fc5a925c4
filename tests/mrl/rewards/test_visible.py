"""The visible part of a response; a thought that the prompt opened is a thought."""

import asyncio

import pytest

from mrl.rewards.contract import RewardRequest
from mrl.rewards.kinds.registry import reward_kind
from mrl.rewards.kinds.reward_section import KindPart
from mrl.rewards.visible import visible_text


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        ("a", "a"), ("<think>a</think>b", "b"), ("a</think>b", "b"), ("<think>a", ""), ("a<think>b", "a"),
        ("<think>a</think>b<think>c", "b"), ("<think>a<think>b</think>c", "c"), ("<think>a</think>", ""),
    ],
)  # fmt: skip
def test_only_what_follows_the_last_closed_thought_is_visible(text: str, visible: str) -> None:
    assert visible_text(text) == visible
    assert visible_text(visible) == visible


@pytest.mark.parametrize(
    ("response", "value"),
    [("4 fits, so \\boxed{4}", 0.0), ("4 fits</think> \\boxed{4}", 1.0), ("\\boxed{4}</think> done", 0.0)],
)
def test_a_thought_that_the_prompt_opened_is_no_answer(response: str, value: float) -> None:
    kind = reward_kind(KindPart(kind="maths"))
    request = RewardRequest("0.0", 0, response, "4", prompt="[user]2+2?[assistant]<think>\n")
    verdict = asyncio.run(kind.verifier(kind.stages[0]).score(request))
    assert verdict is not None and verdict.value == value


@pytest.mark.parametrize(
    ("prompt", "value"), [("2+2?", 0.0), ("2+2?<think>\n", 1.0), ("Use <think> tags. 2+2?", 0.0)]
)
def test_a_thought_that_the_prompt_opened_is_part_of_the_shape(prompt: str, value: float) -> None:
    kind = reward_kind(KindPart(kind="format"))
    request = RewardRequest("0.0", 0, "it is 4</think><answer>4</answer>", None, prompt=prompt)
    verdict = asyncio.run(kind.verifier(kind.stages[0]).score(request))
    assert verdict is not None and verdict.value == value
