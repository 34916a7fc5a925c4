"""Conversations as tokens: a beginning is retokenised only after its last added token, with equal tokens."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, pre_tokenizers

from mrl.data.conversation import Encoder, Rendered
from tests.support import chat_tokenizers

SAID = (
    "What is 3 times 4?", " a  b\n", "é2 <b> 17\n\n", "", "times\t12 ", "no [INST] <|im_end|> here </s>",
    "x",
)  # fmt: skip


def conversation(turns: int) -> tuple[dict[str, str], ...]:
    roles = ("user", "assistant")
    return tuple({"role": roles[n % 2], "content": f"{SAID[n % len(SAID)]}{n}"} for n in range(2 * turns))


def text_of(tokenizer: Any, turns: int) -> str:
    return tokenizer.apply_chat_template(list(conversation(turns)), tokenize=False)


def with_greedy_tokens() -> Any:
    """Build added tokens that strip spaces, match whole words only, or match normalised text."""
    tokenizer = chat_tokenizers.qwen()
    tokens = [
        AddedToken("<|im_start|>", special=True, normalized=False, rstrip=True),
        AddedToken("<b>", special=False, normalized=False, lstrip=True),
        AddedToken("times", special=False, normalized=False, single_word=True),
        AddedToken("here", special=False, normalized=True),
    ]
    tokenizer.backend_tokenizer.add_tokens(tokens)
    return tokenizer


def with_a_mark_at_the_beginning() -> Any:
    """Build Llama 2's case: a space before a text's first piece, none after an added token."""
    tokenizer = chat_tokenizers.mistral()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return tokenizer


SCHOOLS = chat_tokenizers.ALL | {"greedy": with_greedy_tokens, "first": with_a_mark_at_the_beginning}


@pytest.mark.parametrize("school", SCHOOLS)
def test_every_beginning_of_a_conversation_has_the_tokens_that_it_has_by_itself(school: str) -> None:
    tokenizer = SCHOOLS[school]()
    text = text_of(tokenizer, 8)
    added = tokenizer.added_tokens_decoder.items()
    cutting = {number for number, token in added if not token.normalized}
    whole, cut = Rendered(text, tokenizer, cutting), 0
    for end in range(1, len(text) + 1):
        ids = tokenizer(text[:end], add_special_tokens=False)["input_ids"]
        length, differs = whole.beginning(text[:end])
        if whole.ids[: len(ids)] == ids:
            assert length == len(ids), text[:end]
        else:
            cut += 1
            assert length is None and whole.ids[:differs] == ids[:differs] != whole.ids[: len(ids)]
    assert 0 < cut < len(text)
    other = text.replace("What", "That", 1)
    assert whole.beginning(other)[0] is None, "its end is the same"


def test_what_a_conversation_costs_grows_with_its_tokens_and_not_with_their_square() -> None:
    tokenizer, seen = chat_tokenizers.qwen(), 0

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, texts: str | list[str], **options: Any) -> Any:
            nonlocal seen
            seen += len("".join(texts))
            return tokenizer(texts, **options)

    encoder, shares = Encoder(Counted(), ends=[tokenizer.eos_token_id]), []
    for turns in (4, 40):
        seen = 0
        encoder.messages(conversation(turns), first=1, place="row")
        shares.append(seen / len(text_of(tokenizer, turns)))
    assert shares[1] < 1.2 * shares[0]
