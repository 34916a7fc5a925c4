"""Each family's thinking marks are recognised, also as special tokens; thoughts are not answers."""

from typing import Any

import numpy as np
import pytest

from mrl.agents.render import TurnRenderer
from mrl.data.tokenise import decoder
from mrl.rewards.thoughts import MARKS, ThoughtMarks, opens_thought
from mrl.rewards.visible import visible_text, with_opened_thought
from tests.support.chat_tokenizers import deepseek, llama, marked, mistral, qwen

HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"]
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"


def tokens_of(tokenizer: Any, text: str) -> np.ndarray:
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def decoded(tokenizer: Any, text: str) -> str:
    ends = (tokenizer.eos_token_id,)
    return decoder(tokenizer, ends)([tokens_of(tokenizer, text), np.zeros(0, np.int32)])[0]


@pytest.mark.parametrize(("opening", "closing"), MARKS)
@pytest.mark.parametrize("kind", ["special", "words", "pieces"])
def test_the_thoughts_of_every_family_are_told_from_its_answer(opening: str, closing: str, kind: str) -> None:
    marks = [opening, closing]
    tokenizer = marked([], words=marks) if kind == "words" else marked(marks, by_pieces=kind == "pieces")
    thought, answer, space = "What is 3 times 4?", "done.", " " if kind == "pieces" else ""
    for text, visible in (
        (f"{opening}{thought}{closing}{answer}<|done|>", answer),
        (f"{opening}{thought}{closing}{answer}{opening}{thought}", answer),
        (f"{thought}{closing}{answer}", answer),
        (f"{opening}{thought}", ""),
        (f"{answer}", answer),
    ):
        assert visible_text(decoded(tokenizer, text)).strip() == visible
    assert (
        decoded(tokenizer, f"{opening}{thought}{closing}{answer}")
        == f"<think>{space}{thought}</think>{space}{answer}"
    )
    prompt = f"<|im_start|>assistant\n{opening}\n"
    assert visible_text(with_opened_thought(decoded(tokenizer, thought), prompt)) == ""


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        (f"{ANALYSIS}3+4{FINAL}7<|return|>", "7"), (f"{ANALYSIS}So 7", ""),
        (f"{ANALYSIS}So 7<|end|><|start|>assistant<|chan", ""),
        (f"{ANALYSIS}So 7<|end|><|start|>assistant<|channel|>fin", ""), (f"{ANALYSIS}So 7{FINAL}", ""),
        (f"{ANALYSIS}a<|end|><|start|>assistant<|channel|>analysis<|message|>b{FINAL}7", "7"),
        (f"{ANALYSIS}a<|end|><|start|>assistant<|channel|>commentary<|message|>I look{FINAL}7", "7"),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>", ""),
        (f"{ANALYSIS}a{FINAL}7<|end|><|start|>assistant<|channel|>analysis<|message|>or 8", "7"),
        (f"{ANALYSIS}a{FINAL}7<|end|><|start|>user<|message|>8", "7"),
        (f"{ANALYSIS}a{FINAL}7<|end|><|start|>assistant<|channel|>final<|message|>8", "8"),
        ("<|channel|>final<|message|>7", "7"), ("<|channel|>final <|constrain|>json<|message|>7", "7"),
        ("analysis<|message|>8", ""), ("<|channel|>analysis", ""), ("7", "7"),
        (f"{ANALYSIS}a{FINAL}7<|message|>8", "78"),
    ],
)  # fmt: skip
def test_of_gpt_oss_the_final_channel_alone_is_visible(text: str, visible: str) -> None:
    tokenizer = marked(HARMONY)
    assert visible_text(decoded(tokenizer, text)) == visible


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|start|>assistant", False),
        (f"<|start|>assistant{ANALYSIS}", True),
        ("<|start|>assistant<|channel|>commentary<|message|>\n", True),
        ("<|start|>assistant<|channel|>final<|message|>", False),
        ("[INST] 2+2? [/INST][THINK]", True),
        ("What does <think> mean?", False),
    ],
)
def test_a_prompt_opens_a_thought_by_the_marks_of_its_family(prompt: str, opens: bool) -> None:
    assert opens_thought(prompt) is opens
    closed = f"So 8{FINAL}7"
    if opens and prompt.startswith("<|start|>"):
        shown = decoded(marked(HARMONY), closed)
        assert visible_text(with_opened_thought(shown, prompt)) == "7"
        assert visible_text(with_opened_thought("So 8", prompt)) == ""


@pytest.mark.parametrize("made", [qwen, llama, mistral, deepseek], ids=lambda made: made.__name__)
def test_without_marks_of_its_own_a_text_is_what_the_tokenizer_says(made: Any) -> None:
    tokenizer = made()
    text = "<think>What</think> is 3 times 4?"
    assert not ThoughtMarks(tokenizer) and not ThoughtMarks(tokenizer).unknown
    ids = tokens_of(tokenizer, text)
    assert decoded(tokenizer, text) == tokenizer.decode(ids, skip_special_tokens=True)


def test_special_tokens_that_may_be_unknown_marks_are_named() -> None:
    tokenizer = marked(
        ["<|begin_reasoning|>", "<|end_reasoning|>", "<|im_start|>", "/no_think", "<think>", "</think>"]
    )
    assert ThoughtMarks(tokenizer).unknown == ["<|begin_reasoning|>", "<|end_reasoning|>"]


def test_a_turn_that_goes_on_in_a_thought_of_the_template_is_known() -> None:
    tokenizer = qwen()
    renderer = TurnRenderer(tokenizer)
    for text, opens in (
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n", False),
        ("a" * 50, False),
    ):
        assert renderer.opens_thought(tokens_of(tokenizer, text)) is opens
