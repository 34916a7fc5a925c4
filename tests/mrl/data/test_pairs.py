"""Preferences and demonstrations of every shape get the intended tokens; bad rows are refused by name."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from mrl.config.sections.tune import TuneDataSection, TuneFile, TuneSection
from mrl.data.conversation import Encoder
from mrl.data.tune_rows import (
    TuneRow,
    TuneRows,
    build_tune_batch,
    load_training,
    load_validation_rows,
    mismatched_rows,
    num_steps,
    overlapping_rows,
    step_row_numbers,
)
from mrl.data.tune_shapes import read_labelled, read_pair
from mrl.errors import DataError
from tests.support.chat_tokenizers import CHATML, deepseek, llama, qwen

ASK = {"role": "user", "content": "What is 3 times 4?"}
GOOD = {"role": "assistant", "content": "The answer is 12"}
BAD = {"role": "assistant", "content": "42"}
FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last or m.role == 'user' else m.content.split('</think>')[-1] }}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Drops thoughts from all turns but the last."""


def encoder(tokenizer: Any) -> Encoder:
    return Encoder(tokenizer, ends=[tokenizer.eos_token_id])


def section(path: Path | str, *, name: str = "dpo", **changes: Any) -> TuneSection:
    data = {"train": str(path)} | changes.pop("data", {})
    return TuneSection(objective={"name": name}, data=data, output="out", **changes)  # type: ignore[arg-type]


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def loaded(path: Path, tokenizer: Any, *, max_length: int = 200, **changes: Any) -> TuneRows:
    return load_training(section(path, **changes), encoder(tokenizer), max_length=max_length)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": ASK["content"], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": [ASK], "chosen": GOOD["content"], "rejected": BAD["content"]},
    ],
    ids=["messages", "whole", "prompt and whole", "texts"],
)
@pytest.mark.parametrize("make", [qwen, deepseek])
def test_every_shape_of_a_pair_is_the_same_tokens(row: dict[str, Any], make: Any, tmp_path: Path) -> None:
    """The template's prompt, responses trained up to their end token, and one opening token."""
    tokenizer = make()
    (pair,) = loaded(written(tmp_path / "a.jsonl", row), tokenizer).rows
    prompt = tokenizer.apply_chat_template([ASK], tokenize=False, add_generation_prompt=True)
    for encoded, answer in zip(pair.responses, (GOOD, BAD), strict=True):
        assert tokenizer.decode(encoded.tokens[~encoded.mask]) == prompt
        assert tokenizer.decode(encoded.tokens[encoded.mask]) == answer["content"] + tokenizer.eos_token
        assert encoded.prompt_length == int((~encoded.mask).sum())
    assert pair.sides == (True, False)


def test_texts_are_split_where_both_dialogues_ask_the_same() -> None:
    begin = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: sum?\n\nAssistant:"
    pair = read_pair({"chosen": begin + " 4", "rejected": begin + " 45"}, place="a:1")
    assert (pair.prompt, pair.responses) == (begin, (" 4", " 45"))


def test_labelled_rows_and_pairs_taken_apart() -> None:
    (one,) = read_labelled({"prompt": "a", "completion": "b", "label": False}, place="a:1")
    assert (one.responses, one.sides) == (("b",), (False,))
    both = read_labelled({"prompt": "a", "chosen": "b", "rejected": "c"}, place="a:1")
    assert [(row.responses, row.sides) for row in both] == [(("b",), (True,)), (("c",), (False,))]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "no column 'rejected'"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "the same"),
        ({"chosen": [ASK, GOOD], "rejected": [GOOD, ASK]}, "share their first messages"),
        ({"prompt": "a", "chosen": "b", "rejected": [BAD]}, "both be text or both be messages"),
        ({"chosen": "b", "rejected": "c"}, "Assistant:"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, "prompt is empty"),
    ],
)
def test_a_bad_pair_is_refused_by_name(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"a\.jsonl:1.*{message}"):
        loaded(written(tmp_path / "a.jsonl", row), qwen())


def test_every_turn_of_the_assistant_is_trained_up_to_its_end(tmp_path: Path) -> None:
    tokenizer, path = qwen(), written(tmp_path / "a.jsonl", {"messages": [ASK, GOOD, ASK, BAD]})
    for turns, expected in (("all", f"{GOOD['content']}<|im_end|>42<|im_end|>"), ("last", "42<|im_end|>")):
        (row,) = loaded(path, tokenizer, name="sft", data={"turns": turns}).rows
        (encoded,) = row.responses
        assert tokenizer.decode(encoded.tokens[encoded.mask]) == expected
        assert encoded.mask[-1]


USERS_ALONE = (
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("name", "row", "template", "sentences"),
    [
        (
            "sft",
            {"messages": [SYSTEM, ASK, GOOD | {"reasoning_content": "3 4s"}], "tools": [TOOL]},
            USERS_ALONE,
            ["the chat template does not use assistant.reasoning_content, system.content, tools, "
             "so the model never reads it"],
        ),
        (
            "dpo",
            {"prompt": [SYSTEM, ASK], "chosen": [GOOD], "rejected": [BAD], "tools": [TOOL]},
            USERS_ALONE,
            ["the chat template does not use system.content, tools, so the model never reads it"],
        ),
        ("sft", {"messages": [SYSTEM, ASK, GOOD], "tools": [TOOL]}, CHATML, []),
        (
            "sft",
            {"prompt": "3 times 4?", "response": "12", "tools": [TOOL]},
            CHATML,
            [
                "1 rows have tools, chat_template_kwargs or further message keys, "
                "but no template renders their prompt, so the model never reads them"
            ],
        ),
    ],
)  # fmt: skip
def test_what_of_the_rows_no_token_shows_is_named(
    name: str, row: dict[str, Any], template: str, sentences: list[str], tmp_path: Path
) -> None:
    reader = encoder(qwen(template))
    load_training(section(written(tmp_path / "a.jsonl", row), name=name), reader, max_length=200)
    assert reader.unread.sentences() == sentences


THINKS = "{% if thinking is defined and not thinking %}/no_think {% endif %}" + CHATML


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_a_row_s_own_template_arguments_override_those_of_all(name: str, ending: str, tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [ASK],
            "response": [GOOD],
            "chosen": [GOOD],
            "rejected": [BAD],
            "chat_template_kwargs": options,
        }
        for options in ({"thinking": False}, {"thinking": True}, None)
    ]
    path = written(tmp_path / "a.jsonl", *rows)
    if ending == "parquet":
        path = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    tokenizer = qwen(THINKS)
    reader = Encoder(tokenizer, ends=[tokenizer.eos_token_id], chat_template_kwargs={"thinking": False})
    encoded = load_training(section(path, name=name), reader, max_length=200).rows
    texts = [tokenizer.decode(row.responses[0].tokens) for row in encoded]
    assert ["/no_think" in text for text in texts] == [True, False, True]
    path = written(tmp_path / "b.jsonl", rows[0] | {"chat_template_kwargs": {"tokenize": True}})
    with pytest.raises(DataError, match=r"b\.jsonl:1: chat_template_kwargs must be an object"):
        load_training(section(path, name=name), reader, max_length=200)


def test_a_template_that_changes_earlier_turns_is_refused_unless_the_last_alone_is_trained(tmp_path) -> None:
    thought = {"role": "assistant", "content": "<think>hm</think>12"}
    path = written(tmp_path / "a.jsonl", {"messages": [ASK, thought, ASK, BAD]})
    with pytest.raises(DataError, match="not a prefix of the whole one"):
        loaded(path, qwen(FORGETS), name="sft")
    assert len(loaded(path, qwen(FORGETS), name="sft", data={"turns": "last"}).rows) == 1


def test_a_turn_without_its_end_token_is_refused(tmp_path: Path) -> None:
    open_ended = qwen("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(DataError, match="without an end token"):
        loaded(written(tmp_path / "a.jsonl", {"messages": [ASK, GOOD]}), open_ended, name="sft")


def test_a_prompt_whose_tokens_join_the_responses_is_refused(tmp_path: Path) -> None:
    """This tokenizer joins two line ends with a following word."""
    with pytest.raises(DataError, match=r"message 1 is not a prefix of the whole one \(token \d+\)"):
        loaded(written(tmp_path / "a.jsonl", {"messages": [ASK, GOOD]}), llama(), name="sft")


def test_an_opening_token_that_stands_twice_is_refused(tmp_path: Path) -> None:
    tokenizer = deepseek()
    tokenizer.bos_token = "<｜begin▁of▁sentence｜>"  # noqa: RUF001
    tokenizer.chat_template = tokenizer.bos_token + tokenizer.chat_template
    with pytest.raises(DataError, match="two BOS tokens"):
        loaded(written(tmp_path / "a.jsonl", {"messages": [ASK, GOOD]}), tokenizer, name="sft")


def test_long_pairs_leave_as_a_whole_or_end_the_run(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": answer} for answer in ("c", "c" * 50)]
    path = written(tmp_path / "a.jsonl", *rows)
    line = r"1 of 2 rows are longer than model\.max_length = 20; the longest has \d+ tokens \(.*a\.jsonl:2\)"
    with pytest.raises(DataError, match=rf"a\.jsonl: {line}; raise the limit, or set tune\.data\.overlong"):
        loaded(path, qwen(), max_length=20)
    remaining = loaded(path, qwen(), max_length=20, data={"overlong": "filter"})
    assert len(remaining.rows) == 1 and re.search(f"1 rows; dropped: {line}", remaining.report)


def test_prompts_that_are_validated_too_and_rows_that_stand_twice_are_counted(tmp_path: Path) -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    other = row | {"prompt": "z"}
    path = written(tmp_path / "a.jsonl", row, row, other)
    data = {"validation": str(written(tmp_path / "v.jsonl", row))}
    training = loaded(path, qwen(), data=data)
    validation = load_validation_rows(section(path, data=data), encoder(qwen()), max_length=100)
    assert "1 of them duplicates" in training.report and overlapping_rows(training, validation) == 2


def test_rows_are_counted_without_a_second_copy_of_them(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}", "chosen": "ab " * 2000, "rejected": "ba " * 2000} for i in range(40)]
    path, tokenizer = written(tmp_path / "a.jsonl", *rows), qwen()
    tracemalloc.start()
    encoded = loaded(path, tokenizer, max_length=100_000)
    held, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tokens = sum(response.tokens.nbytes for row in encoded.rows for response in row.responses)
    assert tokens > 1 << 20 and most - held < tokens / 2


def some_rows(tmp_path: Path, count: int) -> TuneRows:
    rows = [{"prompt": f"{i}=", "chosen": f"{i}", "rejected": f"{i}0"} for i in range(count)]
    return loaded(written(tmp_path / "a.jsonl", *rows), qwen())


def test_epochs_visit_every_row_once_in_an_order_of_their_own(tmp_path: Path) -> None:
    rows, config = some_rows(tmp_path, 10), section("a", epochs=2, batch_rows=4)
    assert num_steps(config, 10) == 5
    drawn = np.concatenate([step_row_numbers(rows, config, step=s, seed=3) for s in range(1, 6)])
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10].tolist() != drawn[10:].tolist()
    np.testing.assert_array_equal(step_row_numbers(rows, config, step=3, seed=3), drawn[8:12])


def test_without_steps_and_epochs_every_row_is_visited_once(tmp_path: Path) -> None:
    rows, config = some_rows(tmp_path, 12), section("a", batch_rows=4)
    assert num_steps(config, 12) == 3
    drawn = np.concatenate([step_row_numbers(rows, config, step=s, seed=3) for s in range(1, 4)])
    assert sorted(drawn) == list(range(12))
    files = [{"path": "a", "probability": 1}, {"path": "b", "probability": 2}]
    with pytest.raises(ValueError, match="set steps instead"):
        section("a", data={"train": files})


def test_files_with_shares_are_drawn_by_them(tmp_path: Path) -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    few, many = written(tmp_path / "f.jsonl", row), written(tmp_path / "m.jsonl", *[row] * 9)
    files = (TuneFile(path=str(few), probability=3), TuneFile(path=str(many), probability=1))
    config = section(few, steps=1, batch_rows=4000).model_copy(update={"data": TuneDataSection(train=files)})
    rows = load_training(config, encoder(qwen()), max_length=100)
    share = float((step_row_numbers(rows, config, step=1, seed=0) == 0).mean())
    assert share == pytest.approx(0.75, abs=0.05)


def test_a_batch_keeps_pairs_whole_and_knows_each_response(tmp_path: Path) -> None:
    rows = some_rows(tmp_path, 3)
    batch = build_tune_batch(rows.rows[1:], [1, 2], {1: [-1.0, -2.0], 2: [-3.0, -4.0]})
    assert batch.whole_groups and batch.group_ids.tolist() == [0, 0, 1, 1]
    assert batch.samples["side"].tolist() == [1, 0, 1, 0]
    assert batch.samples["ref_logprob"].tolist() == [-1, -2, -3, -4]
    part = batch.select(np.array([2, 3]))
    assert part.whole_groups and part.samples["ref_logprob"].tolist() == [-3, -4]


def test_mismatched_rows_have_another_prompts_response(tmp_path: Path) -> None:
    tokenizer = qwen()
    rows = [{"prompt": f"{i}", "chosen": f"c{i}", "rejected": f"r{i}"} for i in range(2)]
    encoded = loaded(written(tmp_path / "a.jsonl", *rows), tokenizer, name="kto").rows
    texts = [tokenizer.decode(row.responses[0].tokens) for row in mismatched_rows(encoded, max_length=100)]
    end = tokenizer.eos_token
    assert texts == [f"0c1{end}", f"0c1{end}", f"1c0{end}", f"1c0{end}"]
    with pytest.raises(DataError, match="at least two prompts"):
        mismatched_rows(encoded[:2], max_length=100)


def test_a_digest_sees_what_is_trained(tmp_path: Path) -> None:
    rows = some_rows(tmp_path, 2)
    first = rows.rows[0]
    turned = TuneRow(first.place, first.responses[::-1], first.sides)
    assert TuneRows((turned, rows.rows[1]), None, "").digest() != rows.digest()
    assert some_rows(tmp_path, 2).digest() == rows.digest()


def test_a_demonstration_may_be_a_number_and_one_without_a_response_is_named(tmp_path: Path) -> None:
    tokenizer = qwen()
    path = written(tmp_path / "a.jsonl", {"prompt": "1+2=", "response": 3}, {"prompt": "a"})
    with pytest.raises(DataError, match=r"a\.jsonl:2: no column 'response'"):
        loaded(path, tokenizer, name="sft")
    (row,) = loaded(
        written(tmp_path / "b.jsonl", {"prompt": "1+2=", "response": 3}), tokenizer, name="sft"
    ).rows
    (encoded,) = row.responses
    assert tokenizer.decode(encoded.tokens[encoded.mask]) == f"3{tokenizer.eos_token}"
