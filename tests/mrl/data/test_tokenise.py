"""Text and messages to tokens: the template's own special tokens, never a closing one on an open prompt."""

from typing import Any

import pytest

from mrl.data.shapes import Row
from mrl.data.tokenise import encode, render
from mrl.errors import DataError


def row(prompt: Any) -> Row:
    return Row(place="f:3", prompt=prompt, ground_truth="4", domain="default", tag="", metadata={})


MESSAGES = ({"role": "system", "content": "s"}, {"role": "user", "content": "q"})


def test_text_stays_as_it_is(chat_tokenizer: Any) -> None:
    assert render(row("3+4="), chat_tokenizer, chat_template=True) == ("3+4=", False)


def test_messages_go_through_the_template(chat_tokenizer: Any) -> None:
    assert render(row(MESSAGES), chat_tokenizer, chat_template=True) == ("<system>s<user>q<assistant>", True)
    assert render(row(MESSAGES[1:]), chat_tokenizer, chat_template=False) == ("q", False)


def test_several_messages_without_a_template_are_refused(plain_tokenizer: Any) -> None:
    assert render(row(MESSAGES[1:]), plain_tokenizer, chat_template=True) == ("q", False)
    with pytest.raises(DataError, match=r"f:3: the prompt has 2 messages"):
        render(row(MESSAGES), plain_tokenizer, chat_template=True)


def test_a_template_that_refuses_is_named(chat_tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"f:3.*\['robot'\].*no robots"):
        render(row(({"role": "robot", "content": "x"},)), chat_tokenizer, chat_template=True)


def test_special_tokens(plain_tokenizer: Any, closing_tokenizer: Any) -> None:
    plain, templated = encode(["ab", "ab"], [False, True], plain_tokenizer)
    assert plain.dtype == "int32"
    assert plain[0] == 1 and plain[1:].tolist() == templated.tolist()
    (open_end,) = encode(["ab"], [False], closing_tokenizer)
    assert open_end.tolist() == plain.tolist(), "the tokenizer's closing token is not part of a prompt"
