"""Previews show rows as the policy sees them; dropped rows are listed by file, domain and rule."""

import dataclasses
import json
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from mrl.config.sections.data import ColumnMap, DataEntry, DataSection
from mrl.data.conversation import Encoded
from mrl.data.load_rows import load_data
from mrl.data.preview import FilePreview, length_statistics, preview_source, preview_tune_file
from mrl.data.tune_rows import TuneRow
from mrl.rewards.kinds.reward_section import RewardSection

MATHS = RewardSection.model_validate({"kind": "maths"})


def previews(tokenizer: Any, entry: DataEntry, *, rows: int = 2, **settings: Any) -> list[FilePreview]:
    section = DataSection(train=(entry,), **settings)
    source = load_data(section, MATHS, tokenizer).train[0]
    return preview_source("train", source, tokenizer, rows=rows)


def test_a_row_is_shown_as_the_policy_sees_it_with_its_special_tokens(write_rows, plain_tokenizer) -> None:
    path = write_rows([{"prompt": "1+1 =", "answer": 2, "tag": "easy"}, {"prompt": "2+2=", "answer": 4}])
    (file,) = previews(plain_tokenizer, DataEntry(path=path.replace("/rows", "/./rows")), rows=1)
    (row,) = file.first
    assert (row.place, row.domain, row.tag, row.tokens, row.ground_truth) == (
        f"{path}:1", "default", "easy", 6, "2",
    )  # fmt: skip
    assert row.text.replace(" ", "") == "[BOS]1+1=" and row.special_tokens == {"[BOS]": 1}
    assert (file.kept, file.lengths["smallest"], file.lengths["largest"]) == (2, 5, 6)


def test_messages_with_tools_are_shown_as_the_template_writes_them(write_rows, tool_tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    messages = [{"role": "user", "content": "Rain?"}]
    path = write_rows([{"messages": messages, "tools": tools, "ground_truth": "0"}])
    (file,) = previews(tool_tokenizer, DataEntry(path=path))
    assert "".join(file.first[0].text.split()) == "".join(
        f"[system]Tools:{json.dumps(tools[0])}[user]Rain?[assistant]".split()
    )


def test_what_is_left_out_is_told_by_file_domain_and_rule(write_rows: Any, plain_tokenizer: Any) -> None:
    first = write_rows(
        [
            {"prompt": "1+1=", "answer": 2, "domain": "sums"},
            {"prompt": "1+1=", "answer": 3, "domain": "sums"},
            {"prompt": "x" * 40, "answer": 1, "domain": "long"},
            {"prompt": "x" * 50, "answer": 1, "domain": "long"},
        ],
        "a.jsonl",
    )
    other = write_rows([{"prompt": "5", "answer": None}, {"prompt": "1-1=", "answer": 0}], "b.jsonl")
    files = previews(plain_tokenizer, DataEntry(path=(first, other)), max_prompt_tokens=20, unusable="filter")
    reasons = [
        (reason.file, reason.domain, reason.rule, reason.count, reason.examples)
        for file in files
        for reason in file.left_out
    ]
    assert reasons[:2] == [
        (first, "sums", "dedupe", 1, [f"{first}:2: same prompt as {first}:1, but another ground truth"]),
        (first, "long", "overlong", 2, [f"{first}:4: 51 tokens", f"{first}:3: 41 tokens"]),
    ]
    assert reasons[2][:4] == (other, "default", "unusable", 1)
    assert reasons[2][4][0].startswith(f"{other}:1: the row has no")
    assert [(file.file, file.domains) for file in files] == [(first, {"sums": 1}), (other, {"default": 1})]


def test_rows_that_are_held_out_are_told(write_rows, plain_tokenizer) -> None:
    train = write_rows([{"prompt": f"{n}+1=", "answer": n + 1} for n in range(3)], "t.jsonl")
    validation = write_rows([{"prompt": "2+1=", "answer": 3}], "v.jsonl")
    (overlapping,) = previews(plain_tokenizer, DataEntry(path=train), overlap="drop", validation=validation)
    assert [(reason.rule, reason.examples) for reason in overlapping.left_out] == [
        ("overlap", [f"{train}:3: same prompt as validation row {validation}:1"])
    ]


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_other_files_and_renamed_columns(tmp_path: Any, plain_tokenizer: Any, kind: str) -> None:
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"ask": ["1+1="], "truth": ["2"]}), path)
    else:
        path.write_text("ask,truth\n1+1=,2\n")
    entry = DataEntry(path=str(path), format="plain", columns=ColumnMap(prompt="ask", answer="truth"))
    (file,) = previews(plain_tokenizer, entry)
    assert file.first[0].ground_truth == "2" and "1" in file.first[0].text
    json.dumps(dataclasses.asdict(file))


def test_a_pair_is_shown_in_three_parts(plain_tokenizer: Any) -> None:
    def response(text: str) -> Encoded:
        tokens = np.array([1, *plain_tokenizer.encode(text, add_special_tokens=False), 2])
        return Encoded(tokens, np.array([False, False, True, True]), 2)

    row = TuneRow("s.jsonl:1", (response("ab"), response("ac")), (True, False))
    file = preview_tune_file("s.jsonl", [row, row], plain_tokenizer, rows=1)
    (shown,) = file.first
    parts = [(part or "").split() for part in (shown.text, shown.response, shown.rejected)]
    assert parts == [["[BOS]", "a"], ["b", "[EOS]"], ["c", "[EOS]"]]
    assert (file.kept, file.use, shown.special_tokens) == (2, "tune", {"[BOS]": 1, "[EOS]": 1})


def test_a_histogram_has_a_bounded_number_of_lines() -> None:
    histogram = length_statistics(list(range(10, 1010)))["histogram"]
    assert len(histogram) <= 12 and sum(count for *_, count in histogram) == 1000
    assert histogram[0][0] == 10 and histogram[-1][1] >= 1009 and length_statistics([]) == {}
