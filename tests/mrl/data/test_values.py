"""Odd values of JSON, csv and parquet: a row is read as meant, or refused by file and line, or filtered."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from mrl.config.sections.data import DataSection
from mrl.config.sections.tune import TuneSection
from mrl.data.conversation import Encoder
from mrl.data.load_rows import Dataset, load_data
from mrl.data.row_files import read_rows
from mrl.data.tune_rows import load_training
from mrl.errors import DataError
from mrl.rewards.kinds.reward_section import RewardSection
from tests.support.bad_files import outcome
from tests.support.formats import PROMPTS, rows_of
from tests.support.mutations import STRANGE

MATHS = RewardSection(kind="maths")
GOOD = 4
ODD = [value for value in STRANGE if not isinstance(value, str) or len(value) < 1000]


def _places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from _places(value, (*path, key))


def _with(row: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(row)
    holder: Any = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return changed


def _load(path: Path, tokenizer: Any, **settings: Any) -> Dataset:
    section = DataSection(train=str(path), max_prompt_tokens=1000, **settings)
    return load_data(section, MATHS, tokenizer)


def _lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("shape", PROMPTS)
def test_every_odd_value_in_every_place_is_read_refused_or_left_out(shape, tool_tokenizer, tmp_path) -> None:
    """Four good rows, then one per odd value: a filter keeps the good ones and no missing number."""
    good = rows_of(shape, len(ODD) + GOOD)
    for number, path in enumerate(_places(good[0])):
        rows = good[:GOOD] + [_with(row, path, value) for row, value in zip(good[GOOD:], ODD, strict=True)]
        file = _lines(tmp_path / f"{number}.jsonl", rows)
        data, message = outcome(lambda file=file: _load(file, tool_tokenizer, unusable="filter"))
        assert data is not None, f"{path}: {message}"
        kept, report = data.train[0].rows, data.report
        assert report.rows + report.unusable + report.duplicates + report.overlong == len(rows), path
        assert [prompt.row for prompt in kept[:GOOD]] == [f"{file}:{n}" for n in range(1, GOOD + 1)], path
        assert not [p.row for p in kept if str(p.ground_truth).lower() in ("nan", "inf", "-inf")], path
        json.dumps([[p.text, p.messages, p.metadata, p.tag] for p in kept], ensure_ascii=False).encode()
        if report.unusable:
            with pytest.raises(DataError, match=rf"{file}:\d+"):
                _load(file, tool_tokenizer)


@pytest.mark.parametrize("missing", [math.nan, "nan", "<NA>", "NaN", None, ""])
@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_a_missing_answer_is_none_however_it_is_written(missing, ending, chat_tokenizer, tmp_path) -> None:
    rows = [{"prompt": "1+2=", "answer": 3.0 if isinstance(missing, float) else "3"}]
    rows += [{"prompt": "1+1=", "answer": missing}]
    path = _lines(tmp_path / "rows.jsonl", rows)
    if ending == ".parquet":
        path = tmp_path / "rows.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(DataError, match=rf"{path}:2: .*needs one"):
        _load(path, chat_tokenizer)
    assert _load(path, chat_tokenizer, unusable="filter").report.unusable == 1


def test_an_absent_domain_is_the_entrys(chat_tokenizer: Any, tmp_path: Path) -> None:
    """pandas writes a missing text as NaN."""
    path = _lines(
        tmp_path / "rows.jsonl", [{"prompt": "1", "answer": "1", "domain": math.nan, "tag": math.nan}]
    )
    (prompt,) = _load(path, chat_tokenizer).train[0].rows
    assert (prompt.domain, prompt.tag) == ("default", "")


@pytest.mark.parametrize("kind", [pyarrow.float16(), pyarrow.float32()])
def test_a_narrow_float_is_the_decimal_that_was_written(kind: Any, tmp_path: Path) -> None:
    narrow = np.float16 if kind == pyarrow.float16() else np.float32
    values = [narrow(text) for text in ("3.1", "0.1", "-2.7", "100")]
    wide = {
        "answer": pyarrow.array(values, kind),
        "list": pyarrow.array([[value] for value in values], pyarrow.list_(kind)),
        "deep": pyarrow.array(
            [{"x": [value]} for value in values], pyarrow.struct([("x", pyarrow.list_(kind))])
        ),
        "double": pyarrow.array([0.1 + 0.2] * 4),
    }  # fmt: skip
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table(wide), path)
    rows = [row for _, row in read_rows(path)]
    assert [row["answer"] for row in rows] == [3.1, 0.1, -2.7, 100.0]
    assert [row["list"] for row in rows] == [[3.1], [0.1], [-2.7], [100.0]]
    assert rows[0]["deep"] == {"x": [3.1]} and rows[0]["double"] == 0.1 + 0.2


TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]


@pytest.mark.parametrize("text", [json.dumps(TALK), f" {json.dumps(TALK, indent=1)}\n"])
def test_messages_as_json_text_are_messages(text: str, chat_tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": text, "answer": "2"}, {"prompt": TALK, "answer": "2"}]
    kept = _load(_lines(tmp_path / "rows.jsonl", rows), chat_tokenizer, dedupe=False).train[0].rows
    assert kept[0].text == kept[1].text and kept[0].messages == kept[1].messages


@pytest.mark.parametrize(
    "text", [str(TALK), f"array({TALK}, dtype=object)", json.dumps(TALK[0]), json.dumps([{"role": "user"}])]
)
def test_what_is_nearly_messages_is_refused(text: str, chat_tokenizer: Any, tmp_path: Path) -> None:
    path = _lines(tmp_path / "rows.jsonl", [{"prompt": text, "answer": "2"}])
    with pytest.raises(DataError, match=rf"{path}:1: column 'prompt'"):
        _load(path, chat_tokenizer)


@pytest.mark.parametrize("text", ["[1, 2]", '{"a": 1}', '[{"a": 1}] is what?', "[{'role'", "{}"])
def test_other_json_is_a_text(text: str, chat_tokenizer: Any, tmp_path: Path) -> None:
    path = _lines(tmp_path / "rows.jsonl", [{"prompt": text, "answer": "2"}])
    assert _load(path, chat_tokenizer).train[0].rows[0].text == text


def test_tuned_rows_read_json_text_too(chat_tokenizer: Any, tmp_path: Path) -> None:
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in ("2", "3"))
    pair = {"prompt": TALK, "chosen": chosen, "rejected": rejected}
    demonstration = {"prompt": TALK, "completion": chosen}
    for name, row in (("dpo", pair), ("sft", demonstration)):
        texts = {key: json.dumps(value) for key, value in row.items()}
        results = []
        for number, columns in enumerate((row, texts)):
            path = _lines(tmp_path / f"{name}{number}.jsonl", [columns])
            tree = {"data": {"train": str(path)}, "output": "out", "objective": {"name": name}}
            section = TuneSection.model_validate(tree)
            results.append(_tuned(section, chat_tokenizer))
        assert results[0] == results[1]


def _tuned(section: TuneSection, tokenizer: Any) -> list[list[int]]:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace("{% endfor %}", "[EOS]{% endfor %}", 1)
    rows = load_training(section, Encoder(tokenizer, ends=[2]), max_length=1000).rows
    return [response.tokens.tolist() for row in rows for response in row.responses]


def test_a_prompt_opens_once(chat_tokenizer: Any, plain_tokenizer: Any, tmp_path: Path) -> None:
    """A rendered text begins with the token that the tokenizer adds."""
    rows = [{"prompt": text, "answer": "2"} for text in ("[BOS]1+1=", "1+2=", "[BOS][BOS]1+3=")]
    path = _lines(tmp_path / "rows.jsonl", rows)
    kept = _load(path, plain_tokenizer, unusable="filter").train[0].rows
    assert [prompt.tokens.tolist().count(1) for prompt in kept] == [1, 1]
    with pytest.raises(DataError, match=rf"{path}:3: the prompt begins with two BOS tokens"):
        _load(path, plain_tokenizer)
    opening = copy.deepcopy(chat_tokenizer)
    opening.chat_template = (
        "[BOS]{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}{% endif %}"
    )
    rows = [{"prompt": [{"role": "user", "content": text}], "answer": "2"} for text in ("1", "[BOS]2")]
    assert _load(_lines(path, rows), opening, unusable="filter").report.unusable == 1


def test_a_row_that_the_template_refuses_is_left_out(chat_tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": role, "content": "1"}], "answer": "2"} for role in ("user", "robot")]
    path = _lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=rf"{path}:2: .*no robots"):
        _load(path, chat_tokenizer)
    data = _load(path, chat_tokenizer, unusable="filter")
    assert (data.report.rows, data.report.unusable) == (1, 1)
