"""Tokenising: the template's own special tokens, no closing token on an open prompt."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast, dynamic_module_utils

from mrl.data.row_shapes import DataRow
from mrl.data.tokenise import AT_ONCE, decoder, encode_texts, render, token_decoder
from mrl.errors import ConfigError, DataError
from mrl.models.families import FAMILIES
from mrl.prepare.tokenizer import write_bpe
from mrl.tokenizer_folder import AUTO_CLASS_TYPES, CLASSES, load_tokenizer

OWN_TOKENIZER = """
from transformers import PreTrainedTokenizer


class Letters(PreTrainedTokenizer):
    def __init__(self, **fields):
        self._letters = {chr(code): code - 32 for code in range(32, 127)}
        super().__init__(eos_token="~", **fields)

    vocab_size = property(lambda self: len(self._letters))

    def get_vocab(self):
        return dict(self._letters)

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return self._letters[token]

    def _convert_id_to_token(self, index):
        return chr(index + 32)

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)
"""


def row(prompt: Any) -> DataRow:
    return DataRow(place="f:3", prompt=prompt, ground_truth="4", domain="default", tag="", metadata={})


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
    plain, templated = encode_texts(["ab", "ab"], [False, True], plain_tokenizer)
    assert plain.dtype == "int32"
    assert plain[0] == 1 and plain[1:].tolist() == templated.tolist()
    (open_end,) = encode_texts(["ab"], [False], closing_tokenizer)
    assert open_end.tolist() == plain.tolist(), "the tokenizer's closing token is not part of a prompt"


def test_a_large_file_is_tokenised_in_parts(plain_tokenizer: Any) -> None:
    """In order, templated texts among others: only one part at a time has the tokenizer's objects."""
    texts = ["a" * (1 + n % 7) for n in range(2 * AT_ONCE + 3)]
    templated = [n % 5 == 0 for n in range(len(texts))]
    sizes = []

    def counted(part: list[str], **options: Any) -> Any:
        sizes.append(len(part))
        return plain_tokenizer(part, **options)

    counted.eos_token_id = plain_tokenizer.eos_token_id  # type: ignore[attr-defined]
    counted.eos_token = plain_tokenizer.eos_token  # type: ignore[attr-defined]
    counted.bos_token_id = plain_tokenizer.bos_token_id  # type: ignore[attr-defined]
    encoded = encode_texts(texts, templated, counted)
    singly = [
        encode_texts([text], [flag], plain_tokenizer)[0] for text, flag in zip(texts, templated, strict=True)
    ]
    assert [ids.tolist() for ids in encoded] == [ids.tolist() for ids in singly]
    assert max(sizes) == AT_ONCE and sum(sizes) == len(texts)


def test_a_folders_own_tokenizer_is_run_where_it_is_trusted(tmp_path, monkeypatch) -> None:
    """Kimi-K2's case: an unknown model type, and a tokenizer in Python."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k2"}))
    (folder / "letters.py").write_text(OWN_TOKENIZER)
    settings = {"tokenizer_class": "Letters", "auto_map": {"AutoTokenizer": ["letters.Letters", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"letters\.py: read it, then set model\.trust_remote_code=true"):
        load_tokenizer(str(folder))
    tokenizer = load_tokenizer(str(folder), trust_remote_code=True)
    (ids,) = encode_texts(["2+2"], [False], tokenizer)
    assert ids.tolist() == [18, 11, 18]
    assert decoder(tokenizer)([ids]) == ["2+2"]


@pytest.mark.parametrize("name", CLASSES)
def test_a_tokenizer_is_what_transformers_takes_the_folder_for(name: str, tmp_path: Path) -> None:
    """For every family, even if the folder's class is loaded without AutoTokenizer."""
    (tmp_path / "texts.jsonl").write_text(json.dumps({"prompt": "a few words, 12 + 34 = 46: a few more"}))
    write_bpe([tmp_path / "texts.jsonl"], tmp_path, vocab_size=270)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": name}))
    assert "" in AUTO_CLASS_TYPES["TokenizersBackend"]
    for model_type in ("", *FAMILIES):
        if model_type:
            (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        ours, theirs = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
        assert type(ours) is type(theirs), model_type
        assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str(), model_type
        assert ours.special_tokens_map == theirs.special_tokens_map
        assert ours.init_kwargs.keys() == theirs.init_kwargs.keys(), model_type


def test_the_texts_of_single_tokens_keep_their_spaces_and_join_to_the_whole() -> None:
    """The tokenizer drops the space before a first token."""
    inner = Tokenizer(models.WordLevel({"\u2581one": 0, "\u2581two": 1, "s": 2, "</s>": 3}, unk_token="s"))
    inner.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    texts = token_decoder(tokenizer)(np.array([0, 1, 2, 1, 3], np.int32))
    assert texts[:4] == ["one", " two", "s", " two"] and texts[4].strip() == "</s>"
    assert token_decoder(tokenizer)(np.zeros(0, np.int32)) == []
