"""Rows of each shape, through one reader."""

import json
from typing import Any

import pytest

from mrl.config.sections.data import ColumnMap, DataEntry
from mrl.data.row_shapes import read_row, shape_of
from mrl.errors import DataError

USER = ({"role": "user", "content": "q"},)
VERL = {
    "data_source": "openai/gsm8k", "prompt": [*USER], "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 7},
}  # fmt: skip

SHAPES = [
    ({"prompt": "q", "answer": "4", "tag": "easy", "domain": "sums"}, "plain", "q", "4", "easy", "sums"),
    (VERL, "verl", USER, "4", "openai/gsm8k", "default"),
    ({"prompt": [*USER], "solution": "4", "level": 3}, "trl", USER, "4", "", "default"),
    ({"prompt": "q", "ground_truth": "4"}, "trl", "q", "4", "", "default"),
    ({"question": "q", "answer": "two and two\n#### 4"}, "gsm8k", USER, "4", "", "default"),
    ({"messages": [*USER, {"role": "assistant", "content": "It is 4."}], "ground_truth": "4"}, "messages",
     USER, "4", "", "default"),
    ({"problem": "q", "solution": "so \\boxed{4}", "level": "2"}, "math", USER, "so \\boxed{4}", "",
     "default"),
    ({"problem": "q", "solution": "so \\boxed{4}", "answer": "4"}, "math", USER, "4", "", "default"),
    ({"prompt": "q", "instruction_id_list": ["startend:quotation"], "kwargs": [{}], "key": 7}, "ifeval", USER,
     {"instruction_id_list": ["startend:quotation"], "kwargs": [{}]}, "", "default"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "shape", "prompt", "ground_truth", "tag", "domain"),
    SHAPES,
    ids=[f"{s[1]}-{n}" for n, s in enumerate(SHAPES)],
)
def test_each_shape(columns, shape, prompt, ground_truth, tag, domain) -> None:
    assert shape_of(columns, place="f:1") == shape
    row = read_row(columns, place="f:1", entry=DataEntry(path="f"), shape=shape)
    assert (row.prompt, row.ground_truth, row.tag, row.domain, row.place) == (
        prompt,
        ground_truth,
        tag,
        domain,
        "f:1",
    )


def test_metadata_is_what_plug_ins_expect() -> None:
    row = read_row(VERL, place="f:1", entry=DataEntry(path="f"), shape="verl")
    assert row.metadata == {name: value for name, value in VERL.items() if name != "prompt"}
    row = read_row(
        {**VERL, "extra_info": "from a book"}, place="f:1", entry=DataEntry(path="f"), shape="verl"
    )
    assert row.metadata["extra_info"] == "from a book"
    row = read_row(
        {"prompt": "q", "solution": "4", "level": 3}, place="f:1", entry=DataEntry(path="f"), shape="trl"
    )
    assert row.metadata == {"solution": "4", "level": 3}


def test_a_conversation_is_a_prompt_up_to_its_last_question_and_reaches_reward_functions_whole() -> None:
    question = [*USER, {"role": "assistant", "content": "which?"}, {"role": "user", "content": "the first"}]
    for answers in ([], [{"role": "assistant", "content": "4"}, {"role": "assistant", "content": "or 5"}]):
        columns = {"messages": [*question, *answers]}
        row = read_row(columns, place="f:1", entry=DataEntry(path="f"), shape="messages")
        assert row.prompt == tuple(question)
        assert row.metadata == columns
    text = {"messages": json.dumps(question)}
    assert read_row(text, place="f:1", entry=DataEntry(path="f"), shape="messages").prompt == tuple(question)


def test_columns_can_be_mapped_and_reach_inside() -> None:
    columns = {"text": "q", "meta": {"ground_truth": 4, "kind": "hard"}, "area": "sums"}
    entry = DataEntry(
        path="f", columns=ColumnMap(prompt="text", answer="meta.ground_truth", tag="meta.kind", domain="area")
    )
    row = read_row(columns, place="f:1", entry=entry, shape="plain")
    assert (row.prompt, row.ground_truth, row.tag, row.domain) == ("q", 4, "hard", "sums")


def test_a_system_message_comes_first() -> None:
    entry = DataEntry(path="f", system="be brief")
    row = read_row({"prompt": "q", "answer": "4"}, place="f:1", entry=entry, shape="plain")
    assert row.prompt == ({"role": "system", "content": "be brief"}, {"role": "user", "content": "q"})


@pytest.mark.parametrize(
    ("columns", "shape"),
    [
        ({"answer": "4"}, "plain"), ({"prompt": "", "answer": "4"}, "plain"),
        ({"prompt": 3, "answer": "4"}, "plain"), ({"prompt": [], "answer": "4"}, "plain"),
        ({"prompt": [{"content": "q"}]}, "trl"), ({"prompt": [{"role": "user", "content": None}]}, "trl"),
        ({"prompt": "q", "reward_model": {}}, "verl"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages"),
        ({"messages": "hello"}, "messages"), ({"question": "q", "answer": "no marker"}, "gsm8k"),
        ({"question": "q"}, "gsm8k"),
    ],
)  # fmt: skip
def test_malformed_rows_are_named(columns: dict[str, Any], shape: str) -> None:
    with pytest.raises(DataError, match="f:12"):
        read_row(columns, place="f:12", entry=DataEntry(path="f"), shape=shape)


def test_unknown_columns_are_named() -> None:
    with pytest.raises(DataError, match=r"f:1.*\['x', 'y'\]"):
        shape_of({"x": 1, "y": 2}, place="f:1")
