"""Make small tokenizers from files: one token per character, with or without a chat template, or byte-level
BPE.

All are folders that `transformers.AutoTokenizer` loads. Id 0 is padding, id 1 the end of text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mrl.data.row_files import read_rows
from mrl.errors import DataError

PAD, END = "<pad>", "<end>"
ROLES = ("system", "user", "assistant", "tool")
CHAT_TEMPLATE = (
    "{%- for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor -%}<end>{%- endfor -%}"
    "{%- if add_generation_prompt %}<assistant>{% endif -%}"
)
"""Each message between its role's mark and the end of text; tools are not shown."""


def write_characters(files: Sequence[str | Path], folder: str | Path) -> int:
    """Make one token per character that occurs in the files' strings; return the vocabulary's size."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = sorted({c for text in texts(files) for c in text})
    vocabulary = {token: i for i, token in enumerate([PAD, END, "<unknown>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return _save(tokenizer, folder)


def write_chat(files: Sequence[str | Path], folder: str | Path) -> int:
    """Add a mark for each role and CHAT_TEMPLATE to `write_characters`; return the vocabulary's size."""
    from transformers import AutoTokenizer

    write_characters(files, folder)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<{role}>" for role in ROLES]})
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(str(folder))
    return len(tokenizer)


def write_bpe(files: Sequence[str | Path], folder: str | Path, *, vocab_size: int) -> int:
    """Train byte-level BPE on all strings of the files; return the vocabulary's size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + 2:
        raise DataError(
            f"vocab_size = {vocab_size} is too small for byte-level BPE; set at least {len(alphabet) + 2}"
        )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts(files), trainer)
    return _save(tokenizer, folder)


def texts(files: Iterable[str | Path]) -> Iterator[str]:
    """Yield every string in the rows of data files, including nested ones."""
    for file in files:
        for _, row in read_rows(file):
            yield from _strings(row)


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _save(tokenizer: object, folder: str | Path) -> int:
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
    fast.save_pretrained(str(folder))
    return len(fast)
