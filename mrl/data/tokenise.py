"""Convert between texts and token ids: prompts by chat template or plain encoding, responses back to text."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import batched, pairwise
from typing import Any

import numpy as np

from mrl.config.sections.model import ModelSection
from mrl.data.hub_models import TOKENIZER_FILES, model_folder
from mrl.data.row_shapes import DataRow
from mrl.data.templates import TEMPLATE_ERRORS, apply_template
from mrl.errors import DataError
from mrl.rewards.thoughts import ThoughtMarks
from mrl.tokenizer_folder import load_tokenizer

AT_ONCE = 1024
"""Texts per tokenizer call; each takes tens of kilobytes during the call."""


def load_tokenizer_for(model: ModelSection) -> Any:
    """Return the tokenizer for a configuration's rows; its template uses model.chat_template_date. Raises
    ConfigError as `load_tokenizer` does. Of a model of the hub, only the tokenizer is downloaded."""
    return load_tokenizer(
        model_folder(model.path, "model.path", files=TOKENIZER_FILES),
        trust_remote_code=model.trust_remote_code,
        date=model.chat_template_date,
    )


def render(
    row: DataRow,
    tokenizer: Any,
    *,
    chat_template: bool,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[str, bool]:
    """Return the text the model reads, and True if a chat template made it (it then contains special tokens).

    `chat_template_kwargs` are the template's arguments for all rows; a row's own override them.
    """
    if isinstance(row.prompt, str):
        return row.prompt, False
    if chat_template and getattr(tokenizer, "chat_template", None):
        return _apply(row, tokenizer, {**(chat_template_kwargs or {}), **row.chat_template_kwargs}), True
    if row.tools:
        raise DataError(f"{row.place}: the row has tools, but there is no chat template to render them")
    if len(row.prompt) == 1 and row.prompt[0].get("content") is not None:
        return row.prompt[0]["content"], False
    raise DataError(
        f"{row.place}: the prompt has {len(row.prompt)} messages, but there is no chat template to join "
        "them; use a tokenizer with one (and data.chat_template=true) or write the prompt as text"
    )


def template_names(tokenizer: Any) -> set[str]:
    """Return the words in the chat template; empty without one. Other argument names have no effect."""
    template = getattr(tokenizer, "chat_template", None) or ""
    source = "\n".join(template.values()) if isinstance(template, dict) else template
    return set(re.findall(r"[A-Za-z_]\w*", source))


def encode_texts(texts: Sequence[str], templated: Sequence[bool], tokenizer: Any) -> list[np.ndarray]:
    """Return the ids of each text, [T] int32. A template writes its special tokens itself. Plain text gets
    the tokenizer's BOS token if it does not begin with it, and no EOS token."""
    encoded: list[np.ndarray | None] = [None] * len(texts)
    for with_template in (False, True):
        indices = (i for i, flag in enumerate(templated) if flag is with_template)
        for batch in batched(indices, AT_ONCE):
            ids = tokenizer([texts[i] for i in batch], add_special_tokens=not with_template)["input_ids"]
            for i, tokens in zip(batch, ids, strict=True):
                if not with_template:
                    tokens = _opened_once(_without_closing(tokens, texts[i], tokenizer), tokenizer)
                encoded[i] = np.asarray(tokens, dtype=np.int32)
    return [tokens for tokens in encoded if tokens is not None]


def decoder(tokenizer: Any, ends: Collection[int] = ()) -> Callable[[list[np.ndarray]], list[str]]:
    """Return a function that decodes token arrays [T] in batches: without special tokens, thoughts between
    <think> and </think>, spaces as the policy wrote them.

    `ends`: end-of-text tokens; a last one is dropped even if the tokenizer does not call it special.
    """
    marks = ThoughtMarks(tokenizer)

    def decode(tokens: list[np.ndarray]) -> list[str]:
        rows = [t.tolist() for t in tokens]
        rows = [row[:-1] if row and row[-1] in ends else row for row in rows]
        return _with_marks(rows, tokenizer, marks) if marks else _texts(rows, tokenizer)

    return decode


def _texts(rows: list[list[int]], tokenizer: Any, *, special: bool = False) -> list[str]:
    """Decode rows of tokens, with or without special tokens."""
    if tokenizer.is_fast:
        return tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=not special)
    return [
        tokenizer.decode(row, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        for row in rows
    ]


def _with_marks(rows: list[list[int]], tokenizer: Any, marks: ThoughtMarks) -> list[str]:
    """Decode rows that contain thought marks. A segment between two marks is decoded together with the first
    mark, because some tokenizers drop the space in front of a first token."""
    parts: list[list[str | int]] = []
    segments: list[list[int]] = []
    marked: list[list[int]] = []
    for row in rows:
        parts.append([])
        for place, (token, shown) in enumerate(zip(row, marks.overrides(row), strict=True)):
            if shown is not None:
                parts[-1].append(shown)
                continue
            if not parts[-1] or isinstance(parts[-1][-1], str):
                parts[-1].append(len(segments))
                marked.append(row[place - 1 : place] if place else [])
                segments.append([])
            segments[-1].append(token)
    texts = _texts(
        [mark + segment for mark, segment in zip(marked, segments, strict=True)], tokenizer, special=True
    )
    before = _texts(marked, tokenizer, special=True)
    texts = [text.removeprefix(mark) for text, mark in zip(texts, before, strict=True)]
    return ["".join(part if isinstance(part, str) else texts[part] for part in row) for row in parts]


def token_decoder(tokenizer: Any) -> Callable[[np.ndarray], list[str]]:
    """Return a function from [T] tokens to T texts, special tokens by name; a character that spans tokens is
    a replacement character in each.

    A token's text is what it adds to the text of its predecessor: some tokenizers drop the space of a first
    one.
    """

    def decode(rows: list[list[int]]) -> list[str]:
        if tokenizer.is_fast:
            return tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=False)
        return [tokenizer.decode(row, clean_up_tokenization_spaces=False) for row in rows]

    def texts(tokens: np.ndarray) -> list[str]:
        ids = tokens.tolist()
        singles, pairs = sorted({*ids}), sorted(set(pairwise(ids)))
        alone = dict(zip(singles, decode([[token] for token in singles]), strict=True))
        both = dict(zip(pairs, decode([list(pair) for pair in pairs]), strict=True))
        return [alone[token] for token in ids[:1]] + [both[a, b][len(alone[a]) :] for a, b in pairwise(ids)]

    return texts


def _apply(row: DataRow, tokenizer: Any, arguments: Mapping[str, Any]) -> str:
    """Render up to where the policy continues: after the assistant's header or, as in TRL, in its last
    message."""
    continues = row.prompt[-1]["role"] == "assistant"  # type: ignore[index]
    try:
        return apply_template(
            tokenizer,
            row.prompt,  # type: ignore[arg-type]
            tools=row.tools,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **arguments,
        )
    except TEMPLATE_ERRORS as error:
        roles = [message["role"] for message in row.prompt]  # type: ignore[index]
        raise DataError(
            f"{row.place}: the chat template rejects messages with the roles {roles}: {error}"
        ) from error


def has_double_bos(tokens: Sequence[int] | np.ndarray, tokenizer: Any) -> bool:
    """Return True if tokens [T] begin with two BOS tokens."""
    opening = tokenizer.bos_token_id
    return opening is not None and len(tokens) > 1 and tokens[0] == tokens[1] == opening


def _opened_once(tokens: list[int], tokenizer: Any) -> list[int]:
    """Drop one BOS token of a text that was rendered with a template and got the tokenizer's BOS as well."""
    return tokens[1:] if has_double_bos(tokens, tokenizer) else tokens


def _without_closing(tokens: list[int], text: str, tokenizer: Any) -> list[int]:
    end = tokenizer.eos_token_id
    if tokens and end is not None and tokens[-1] == end and not text.endswith(tokenizer.eos_token):
        return tokens[:-1]
    return tokens
