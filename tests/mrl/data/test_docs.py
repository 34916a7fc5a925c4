"""Every row in docs/data.md loads as documented."""

import json
import re
import typing
from pathlib import Path
from typing import Any

import pytest

from mrl.config.sections.data import DataSection, Format
from mrl.data.load_rows import load_data
from mrl.data.row_shapes import shape_of
from mrl.rewards.instructions.instruction_verifier import Check
from mrl.rewards.kinds.reward_section import RewardSection

SECTIONS = re.findall(
    r"^##+ (\w+)$(?:(?!^#).)*?^```json\n(.*?)^```$",
    Path(__file__).parents[3].joinpath("docs", "data.md").read_text(),
    re.MULTILINE | re.DOTALL,
)
ROWS: dict[str, dict[str, Any]] = {name: json.loads(block) for name, block in SECTIONS}
WORDS = Check("num_words", {"relation": "at_most", "count": 2})


def load(row: dict[str, Any], reward: str, write_rows: Any, tokenizer: Any) -> Any:
    data = load_data(
        DataSection(train=write_rows([row])), RewardSection.model_validate({"kind": reward}), tokenizer
    )
    return data.train[0].rows[0], data.report


def test_every_format_has_a_row() -> None:
    assert ROWS.keys() == {*typing.get_args(Format), "Chat"} - {"auto"}


@pytest.mark.parametrize("name", sorted(ROWS.keys() - {"Chat", "ifeval"}))
def test_a_row_is_recognised_and_its_ground_truth_found(name, write_rows, tool_tokenizer) -> None:
    assert shape_of(ROWS[name], place="data.md") == name
    prompt, _ = load(ROWS[name], "maths", write_rows, tool_tokenizer)
    assert prompt.ground_truth == "95"
    assert re.search(r"37 ?\+ ?58", prompt.text) and "95" not in prompt.text
    assert prompt.domain == ("sums" if name == "plain" else "default")


def test_the_row_of_instructions(write_rows: Any, tool_tokenizer: Any) -> None:
    assert shape_of(ROWS["ifeval"], place="data.md") == "ifeval"
    prompt, _ = load(ROWS["ifeval"], "instructions", write_rows, tool_tokenizer)
    assert prompt.ground_truth == (WORDS, Check("no_commas", {}))


def test_the_row_with_tools(write_rows: Any, tool_tokenizer: Any) -> None:
    row = ROWS["Chat"]
    prompt, report = load(row, "format", write_rows, tool_tokenizer)
    assert prompt.text == tool_tokenizer.apply_chat_template(
        row["messages"], tools=row["tools"], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert report.notes == []
