"""Tool calls are rendered as by `apply_chat_template`, with arguments as objects or JSON text."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from mrl.config.sections.data import DataSection
from mrl.data.conversation import Encoder
from mrl.data.load_rows import load_data
from mrl.data.messages import read_messages
from mrl.data.templates import JsonText
from mrl.errors import DataError
from mrl.rewards.kinds.reward_section import RewardSection
from tests.support.family_templates import FORMS, tokenizer

TEXT = '{"a":1,"b":[ "x" ]}'
TAKES_TEXT = ("deepseek_v3",)
"""Families whose template joins arguments to text."""


def _talk(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "a1B2c3D4e", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "a1B2c3D4e", "name": "add"},
    ]


def _loaded(messages: list[dict[str, Any]], fast: Any, folder: Path) -> str:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"prompt": messages, "answer": "3"}) + "\n")
    section = DataSection(train=str(path), max_prompt_tokens=5000)
    return load_data(section, RewardSection(kind="maths"), fast).train[0].rows[0].text


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize("family", FORMS)
def test_calls_of_a_row(family: str, is_text: bool, tmp_path: Path) -> None:
    fast = tokenizer(FORMS[family])
    given = TEXT if is_text else json.loads(TEXT)
    wanted = (TEXT if is_text else json.dumps(json.loads(TEXT))) if family in TAKES_TEXT else json.loads(TEXT)
    expected = fast.apply_chat_template(_talk(wanted), tokenize=False, add_generation_prompt=True)
    assert _loaded(_talk(given), fast, tmp_path) == expected


def test_calls_of_a_tuned_row() -> None:
    fast = tokenizer(FORMS["deepseek_v3"])
    messages = read_messages(_talk(TEXT)[:2], name="messages", place="rows:1")
    encoded = Encoder(fast, ends=[fast.eos_token_id]).messages(messages, first=1, place="rows:1")
    assert TEXT in fast.decode(encoded.tokens)


def test_a_template_that_prints_objects_as_python_does_gets_text(tmp_path: Path) -> None:
    fast = tokenizer(FORMS["llama"])
    fast.chat_template = (
        "{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    assert _loaded(_talk(TEXT), fast, tmp_path) == f"1+2?{TEXT}3"


def test_the_text_of_arguments_is_kept() -> None:
    made = JsonText(json.loads(TEXT), TEXT)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other == json.loads(TEXT) and other.text == TEXT


def test_what_a_template_refuses_for_another_reason_is_refused(tmp_path: Path) -> None:
    fast = tokenizer(FORMS["mixtral"])
    messages = _talk(TEXT)
    messages[2]["tool_call_id"] = "short"
    with pytest.raises(DataError, match="length 9"):
        _loaded(messages, fast, tmp_path)
