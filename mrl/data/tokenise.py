"""Between texts and token ids: prompts by the tokenizer's own chat template or its plain encoding, responses back to text."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import batched, pairwise
from typing import Any

import numpy as np

from mrl.config.sections.model import ModelSection
from mrl.data.row_shapes import DataRow
from mrl.data.templates import TEMPLATE_ERRORS, apply_template
from mrl.errors import DataError
from mrl.rewards.thoughts import ThoughtMarks
from mrl.tokenizer_folder import load_tokenizer

AT_ONCE = 1024
"""Texts that a tokenizer is given in one call: each takes tens of kilobytes until that is over."""


def tokenizer_of(model: ModelSection) -> Any:
    """Return the tokenizer with which the rows of a configuration are rendered: its template writes model.chat_template_date. Raises
    ConfigError as `load_tokenizer` does."""
    return load_tokenizer(
        model.path, trust_remote_code=model.trust_remote_code, date=model.chat_template_date
    )


def render(
    row: DataRow,
    tokenizer: Any,
    *,
    chat_template: bool,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[str, bool]:
    """The text the model reads, and whether a chat template made it (its special tokens are in the text
    then).

    `chat_template_kwargs` are the template's arguments for all rows; a row's own go before them.
    """
    if isinstance(row.prompt, str):
        return row.prompt, False
    if chat_template and getattr(tokenizer, "chat_template", None):
        return _apply(row, tokenizer, {**(chat_template_kwargs or {}), **row.chat_template_kwargs}), True
    if row.tools:
        raise DataError(f"{row.place}: the row has tools and there is no chat template to show them with")
    if len(row.prompt) == 1 and row.prompt[0].get("content") is not None:
        return row.prompt[0]["content"], False
    raise DataError(
        f"{row.place}: the prompt has {len(row.prompt)} messages and there is no chat template to join them with; "
        "use a tokenizer with one (and data.chat_template=true) or give the prompt as text"
    )


def template_names(tokenizer: Any) -> set[str]:
    """The words that stand in the chat template; an argument that is none of them has no effect. Empty
    without one."""
    template = getattr(tokenizer, "chat_template", None) or ""
    source = "\n".join(template.values()) if isinstance(template, dict) else template
    return set(re.findall(r"[A-Za-z_]\w*", source))


def encode_texts(texts: Sequence[str], templated: Sequence[bool], tokenizer: Any) -> list[np.ndarray]:
    """The ids of each text, [T] int32. A template writes its special tokens itself; plain text gets the
    tokenizer's own opening tokens where it does not begin with them, never a closing one."""
    encoded: list[np.ndarray | None] = [None] * len(texts)
    for with_template in (False, True):
        every = (i for i, flag in enumerate(templated) if flag is with_template)
        for where in batched(every, AT_ONCE):
            ids = tokenizer([texts[i] for i in where], add_special_tokens=not with_template)["input_ids"]
            for i, tokens in zip(where, ids, strict=True):
                if not with_template:
                    tokens = _opened_once(_without_closing(tokens, texts[i], tokenizer), tokenizer)
                encoded[i] = np.asarray(tokens, dtype=np.int32)
    return [tokens for tokens in encoded if tokens is not None]


def decoder(tokenizer: Any, ends: Collection[int] = ()) -> Callable[[list[np.ndarray]], list[str]]:
    """Return what turns token arrays [T] into texts, many at a time: without special tokens, thoughts between <think> and </think>;
    spaces stay as the policy wrote them.

    `ends`: the end-of-text tokens, of which a last one is no text either where the tokenizer does not call it special.
    """
    marks = ThoughtMarks(tokenizer)

    def decode(tokens: list[np.ndarray]) -> list[str]:
        rows = [t.tolist() for t in tokens]
        rows = [row[:-1] if row and row[-1] in ends else row for row in rows]
        return _with_marks(rows, tokenizer, marks) if marks else _texts(rows, tokenizer)

    return decode


def _texts(rows: list[list[int]], tokenizer: Any, *, special: bool = False) -> list[str]:
    """The texts of rows of tokens, special tokens in them or left out."""
    if tokenizer.is_fast:
        return tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=not special)
    return [
        tokenizer.decode(row, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        for row in rows
    ]


def _with_marks(rows: list[list[int]], tokenizer: Any, marks: ThoughtMarks) -> list[str]:
    """The texts of rows in which thoughts are marked. What lies between two marks is decoded behind the first of them: some tokenizers
    drop the space in front of a first token."""
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


def pieces(tokenizer: Any) -> Callable[[np.ndarray], list[str]]:
    """[T] tokens to T texts, special tokens by their names; a character that lies across tokens is a replacement in each.

    A token's text is what it adds behind the token before it: some tokenizers drop the space in front of a first one.
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
    """The prompt up to where the policy goes on: after the assistant's header, or inside its last message, as
    in TRL."""
    goes_on = row.prompt[-1]["role"] == "assistant"  # type: ignore[index]
    try:
        return apply_template(
            tokenizer,
            row.prompt,  # type: ignore[arg-type]
            tools=row.tools,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            **arguments,
        )
    except TEMPLATE_ERRORS as error:
        roles = [message["role"] for message in row.prompt]  # type: ignore[index]
        raise DataError(
            f"{row.place}: the chat template refuses messages with the roles {roles}: {error}"
        ) from error


def opens_twice(tokens: Sequence[int] | np.ndarray, tokenizer: Any) -> bool:
    """Whether tokens [T] begin with the opening token and the opening token."""
    opening = tokenizer.bos_token_id
    return opening is not None and len(tokens) > 1 and tokens[0] == tokens[1] == opening


def _opened_once(tokens: list[int], tokenizer: Any) -> list[int]:
    """A text that was rendered with a template beforehand begins with the opening token that the tokenizer adds."""
    return tokens[1:] if opens_twice(tokens, tokenizer) else tokens


def _without_closing(tokens: list[int], text: str, tokenizer: Any) -> list[int]:
    end = tokenizer.eos_token_id
    if tokens and end is not None and tokens[-1] == end and not text.endswith(tokenizer.eos_token):
        return tokens[:-1]
    return tokens
