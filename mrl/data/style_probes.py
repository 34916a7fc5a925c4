"""Responses with another manner and the same content, by which a reward model is asked what it pays for.

Each probe changes the chosen response of held-out pairs: a model that scores content moves little, one that learnt a manner moves
with it (length, lists and flattery are what is found most: RewardBench 2, arXiv 2506.01937; "RM-Bench", 2410.16184).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mrl.data.conversation import Encoded
from mrl.data.tokenise import encode_texts
from mrl.data.tune_rows import TuneRow

MOST_RESPONSES = 64
"""Of a validation, from its beginning, that are probed."""
TEXTS: dict[str, Callable[[str], str]] = {
    "padding": lambda text: (
        f"{text} That is the answer to the question. Please let me know if anything else is needed."
    ),
    "bullets": lambda text: "\n".join(f"- {part}" for part in re.split(r"(?<=[.!?])\s+|\n+", text) if part),
    "hedging": lambda text: f"I think, though I may well be wrong, that it could be this: {text}",
    "flattery": lambda text: f"What a wonderful and thoughtful question! {text}",
}
"""What is written with the tokenizer, where it can write it."""
TOKENS: dict[str, Callable[[np.ndarray, np.random.Generator, Sequence[int]], np.ndarray]] = {
    "repetition": lambda own, draw, known: np.concatenate([own, own]),
    "gibberish": lambda own, draw, known: np.concatenate([own, draw.choice(known, size=max(4, len(own)))]),
    "cut_off": lambda own, draw, known: own[: len(own) // 2],
}
"""What is made of the response's own tokens [T], or of `known` ones, which write text."""


@dataclasses.dataclass(frozen=True, slots=True)
class StyleProbe:
    """One manner, and the responses that have it."""

    name: str
    numbers: tuple[int, ...]
    """The validation rows whose chosen responses were changed."""
    rows: tuple[TuneRow, ...]
    """Of one response each."""


def style_probes(
    rows: Sequence[TuneRow], tokenizer: Any, *, max_length: int, seed: int
) -> tuple[StyleProbe, ...]:
    """Probes of the first rows, as a reward model takes them (mrl.data.tune_rows.reward_model_rows). A response that the tokenizer cannot write in
    a manner, that the manner does not change, or that gets longer than max_length tokens, is left out; so are probes without any."""
    writer, found = _Writer(tokenizer, seed), dict[str, list[tuple[int, TuneRow]]]()
    for number, row in enumerate(rows[:MOST_RESPONSES]):
        response = row.responses[0]
        own = response.tokens[response.prompt_length : -2]
        for name, tokens in writer.manners(own):
            if 0 < len(tokens) <= max_length - response.prompt_length - 1 and not np.array_equal(tokens, own):
                changed = dataclasses.replace(row, responses=(_with(response, tokens),), sides=(True,))
                found.setdefault(name, []).append((number, changed))
    return tuple(
        StyleProbe(name, tuple(n for n, _ in made), tuple(row for _, row in made))
        for name, made in found.items()
    )


class _Writer:
    """Writes a response's tokens in each manner."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._tokenizer, self._draw = tokenizer, np.random.default_rng(seed)
        self._known = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))

    def manners(self, own: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        text = self._text(own)
        for name, write in TEXTS.items():
            if (written := self._written(write(text))) is not None:
                yield name, written
        for name, make in TOKENS.items():
            yield name, make(own, self._draw, self._known)

    def _written(self, text: str) -> np.ndarray | None:
        """The text's tokens; None where they do not say it."""
        tokens = encode_texts([text], [True], self._tokenizer)[0]
        return tokens if self._text(tokens) == text else None

    def _text(self, tokens: np.ndarray) -> str:
        return str(self._tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False))


def _with(response: Encoded, own: np.ndarray) -> Encoded:
    """The same prompt and end with other tokens between."""
    parts = [response.tokens[: response.prompt_length], own, response.tokens[-2:]]
    tokens = np.concatenate(parts).astype(np.int64)
    return Encoded(tokens, np.arange(len(tokens)) == len(tokens) - 1, response.prompt_length)
