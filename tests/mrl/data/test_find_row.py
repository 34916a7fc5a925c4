"""A row found by its place is the loader's prompt."""

from typing import Any

import pytest

from mrl.config.sections.data import DataSection
from mrl.data.find_row import find_row
from mrl.data.load_rows import load_data
from mrl.errors import DataError
from mrl.rewards.kinds.reward_section import RewardSection

MATHS = RewardSection.model_validate({"kind": "maths"})


def test_a_row_by_its_number_or_its_place(write_rows: Any, chat_tokenizer: Any) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{n}?"}], "answer": str(n)} for n in range(3)]
    first, second = write_rows(rows, "a.jsonl"), write_rows(rows[::-1], "b.jsonl")
    section = DataSection(train=first, validation=second)
    loaded = load_data(section, MATHS, chat_tokenizer)
    for which, like in (("2", loaded.train[0].rows[1]), ("b.jsonl:1", loaded.validation[0].rows[0])):
        picked = find_row(section, MATHS, chat_tokenizer, which)
        assert (picked.row, picked.text, picked.ground_truth) == (like.row, like.text, like.ground_truth)
        assert (picked.messages, dict(picked.metadata)) == (like.messages, dict(like.metadata))
    assert find_row(section, MATHS, None, f"{second}:3").text == "0?"
    with pytest.raises(DataError, match=r"no row 'b\.jsonl:4'"):
        find_row(section, MATHS, None, "b.jsonl:4")
