"""Responses are decoded in batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from mrl.data.tokenise import decoder


def test_many_texts_at_once_are_those_of_one_by_one(task: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    end = tokenizer.eos_token_id
    rows = [[*tokenizer.encode(text), end] for text in ("1 + 2 =", " 7 , 8 .", "")] + [[]]
    expected = [
        tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False) for row in rows
    ]
    assert decoder(tokenizer)([np.array(row, np.int32) for row in rows]) == expected
    assert expected[0] != "" and expected[2] == "" and decoder(tokenizer)([]) == []


def test_a_last_end_token_is_no_text_also_where_the_tokenizer_does_not_call_it_special(task: Path) -> None:
    """A second end token of generation_config.json is text only inside a response."""
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    one, two = tokenizer.encode("1 2")[0], tokenizer.encode("1 2")[-1]
    decode = decoder(tokenizer, (tokenizer.eos_token_id, two))
    assert decode([np.array([one, two], np.int32), np.array([two, one], np.int32)]) == ["1", "21"]
