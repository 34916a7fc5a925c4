"""Messages, tools and template arguments are rendered as by transformers itself."""

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from mrl.config.sections.data import DataSection
from mrl.data.load_rows import Dataset, load_data
from mrl.errors import ConfigError, DataError
from mrl.rewards.kinds.reward_section import RewardSection

ANY_VERIFIER = RewardSection.model_validate({"kind": "format"})

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": None}},
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}},
}

CALL = {"id": "c7", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
TALK = [
    {"role": "user", "content": "Rain in Ulm?", "name": "eve"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c7", "name": "weather", "content": "dry"},
]


def load(path: str, tokenizer: Any, **section: Any) -> Dataset:
    return load_data(DataSection(train=path, **section), ANY_VERIFIER, tokenizer)


def text_of(path: str, tokenizer: Any, **section: Any) -> str:
    (prompt,) = load(path, tokenizer, **section).train[0].rows
    return prompt.text


def as_transformers_does(tokenizer: Any, messages: list[dict[str, Any]], **arguments: Any) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)


def test_tools_and_every_key_of_a_message_are_rendered(write_rows: Any, tool_tokenizer: Any) -> None:
    path = write_rows([{"prompt": TALK, "tools": [WEATHER, CLOCK]}])
    text = text_of(path, tool_tokenizer)
    assert text == as_transformers_does(tool_tokenizer, TALK, tools=[WEATHER, CLOCK])
    assert '"default": null' in text and "<call c7>weather" in text and "[tool weather c7]dry" in text


def test_a_parquet_file_renders_the_rows_it_was_made_of(tmp_path: Path, tool_tokenizer: Any) -> None:
    """Arrow merges all tools, calls and messages into one struct each and fills gaps with nulls."""
    weather = copy.deepcopy(WEATHER)
    del weather["function"]["parameters"]["properties"]["days"]["default"]
    clock = copy.deepcopy(CLOCK)
    clock["function"]["parameters"]["properties"] = {"zone": {"type": "string"}}
    other = {**CALL, "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
    rows = [
        {"prompt": [TALK[0], {**TALK[1], "tool_calls": [CALL, other]}, TALK[2]], "tools": [weather, clock]},
        {"prompt": [{"role": "user", "content": "hello"}], "tools": None},
    ]
    path = str(tmp_path / "rows.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    held = pyarrow.parquet.read_table(path).to_pylist()[0]
    assert "zone" in held["tools"][0]["function"]["parameters"]["properties"], (
        "the file has no nulls to leave out"
    )
    texts = [p.text for p in load(path, tool_tokenizer).train[0].rows]
    assert texts == [as_transformers_does(tool_tokenizer, row["prompt"], tools=row["tools"]) for row in rows]


def test_tools_and_calls_may_be_json_text(write_rows: Any, tool_tokenizer: Any) -> None:
    text_call = {**CALL, "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    rows = [
        {"prompt": [TALK[0], {**TALK[1], "tool_calls": calls}, TALK[2]], "tools": tools}
        for calls in ([text_call], json.dumps([CALL]))
        for tools in (json.dumps([WEATHER, CLOCK]), [json.dumps(WEATHER), json.dumps(CLOCK)])
    ]
    wanted = as_transformers_does(tool_tokenizer, TALK, tools=[WEATHER, CLOCK])
    prompts = load(write_rows(rows), tool_tokenizer, dedupe=False).train[0].rows
    assert [p.text for p in prompts] == [wanted] * 4


def test_template_arguments_come_from_the_settings_and_from_rows(write_rows, tool_tokenizer) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": TALK[:1]},
        {"prompt": TALK[:1], "chat_template_kwargs": {"enable_thinking": True}},
        {"prompt": TALK[:1], "chat_template_kwargs": '{"enable_thinking": false}'},
    ]
    path = write_rows(rows)
    off, on = (as_transformers_does(tool_tokenizer, TALK[:1], enable_thinking=t) for t in (False, True))
    assert off != on

    def texts(**settings: Any) -> list[str]:
        data = load(path, tool_tokenizer, dedupe=False, chat_template_kwargs=settings)
        return [prompt.text for prompt in data.train[0].rows]

    assert texts() == [on, on, off]
    assert texts(enable_thinking=False) == [off, on, off]
    assert load(path, tool_tokenizer).report.duplicates == 0, "another argument makes another prompt"


def test_an_argument_that_the_template_never_names_is_refused(
    write_rows: Any, tool_tokenizer: Any, plain_tokenizer: Any
) -> None:
    path = write_rows([{"prompt": TALK[:1]}])
    with pytest.raises(ConfigError, match=r"enable_thinkng.*does not use it; did you mean 'enable_thinking'"):
        load(path, tool_tokenizer, chat_template_kwargs={"enable_thinkng": False})
    with pytest.raises(ConfigError, match="no chat template"):
        load(path, plain_tokenizer, chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(ValueError, match="tokenize, tools: set by the loader"):
        DataSection(train=path, chat_template_kwargs={"tokenize": True, "tools": []})
    with pytest.raises(ValueError, match="chat_template = false"):
        DataSection(train=path, chat_template=False, chat_template_kwargs={"enable_thinking": False})


def test_what_a_template_does_not_use_is_named(write_rows, chat_tokenizer, tool_tokenizer) -> None:
    rows = [{"prompt": copy.deepcopy(TALK), "tools": [CLOCK], "chat_template_kwargs": {"mood": "mild"}}]
    rows[0]["prompt"][1]["content"] = "I look."  # type: ignore[index]
    path = write_rows(rows)
    (note,) = [n for n in load(path, chat_tokenizer).report.notes if "does not use" in n]
    unused = "assistant.tool_calls, mood, tool.name, tool.tool_call_id, tools, user.name"
    assert f"does not use {unused}," in note
    (note,) = [n for n in load(path, tool_tokenizer).report.notes if "does not use" in n]
    assert "does not use mood, user.name," in note


def test_tools_without_a_template_are_refused_or_counted(write_rows: Any, plain_tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the row has tools"):
        load(write_rows([{"prompt": TALK[:1], "tools": [CLOCK]}]), plain_tokenizer)
    for row in ({"prompt": "Rain?", "tools": [CLOCK]}, {"prompt": TALK[:1]}):
        data = load(write_rows([row]), plain_tokenizer)
        assert any("1 rows have tools, chat_template_kwargs or further" in note for note in data.report.notes)
    assert TALK[0]["name"], "what no template shows is a key of a message too"
    with pytest.raises(DataError, match="no chat template"):
        load(write_rows([{"prompt": TALK[1:2]}]), plain_tokenizer)


def test_a_value_of_nought_is_something_that_a_template_may_pass_over(write_rows, chat_tokenizer) -> None:
    rows = [
        {
            "prompt": [
                {"role": "user", "content": "q", "weight": 0, "train": False, "name": "", "tool_calls": []}
            ]
        }
    ]
    (note,) = [n for n in load(write_rows(rows), chat_tokenizer).report.notes if "does not use" in n]
    assert "does not use user.train, user.weight," in note


def test_a_prompt_that_ends_with_the_assistant_is_continued(write_rows: Any, tool_tokenizer: Any) -> None:
    talk = [TALK[0], {"role": "assistant", "content": "It is"}]
    assert text_of(write_rows([{"prompt": talk}]), tool_tokenizer).endswith("[assistant]It is")


def test_parts_of_text_are_joined(write_rows: Any, chat_tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "1+1?"}]
    text = text_of(write_rows([{"prompt": [{"role": "user", "content": parts}]}]), chat_tokenizer)
    assert text == "<user>What is\n1+1?<assistant>"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "'image_url'.*only text"),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]},
         "'image'.*only text"),
        ({"prompt": "<image>what?", "images": [{"bytes": "00"}]}, r"\['images'\].*only text"),
        ({"prompt": TALK, "tools": {"a": 1}}, "tools must be a list"),
        ({"prompt": TALK, "tools": "clock"}, "tools must be a list"),
        ({"prompt": TALK, "chat_template_kwargs": {"tokenize": True}}, "other than .*tokenize"),
        ({"prompt": [{"role": "assistant", "content": None}]}, "content of a message"),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}]},
         "cache_control"),
    ],
)  # fmt: skip
def test_what_cannot_be_rendered_is_refused_by_name(row, says, write_rows, tool_tokenizer) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: .*{says}"):
        load(write_rows([row]), tool_tokenizer)


def test_empty_columns_of_pictures_are_no_pictures(write_rows: Any, chat_tokenizer: Any) -> None:
    assert text_of(write_rows([{"prompt": TALK[:1], "images": [], "video": None}]), chat_tokenizer)
