"""Encode texts of others so that they never yield one of the tokenizer's added tokens."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from mrl.errors import ConfigError

_CUT = "\ue0f3"
"""Character of private use that no token spans."""


class PlainEncoder:
    """Encoder of plain texts, and of a template's text around them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = {
            number: str(token)
            for number, token in tokenizer.added_tokens_decoder.items()
            if number != tokenizer.unk_token_id
        }
        self.added_ids = set(added)
        names = sorted(added.values(), key=len, reverse=True)
        self.added = re.compile("|".join(map(re.escape, names)) if names else r"(?!)")
        """Pattern of the added tokens' texts."""

    def plain(self, text: str) -> list[int]:
        """Encode a text without added tokens: an added token's own text is cut after its first character."""
        ids = self._ids(text)
        if self.added_ids.isdisjoint(ids):
            return ids
        cuts = [0, *(match.start() + 1 for match in self.added.finditer(text)), len(text)]
        parts = [text[start:end] for start, end in itertools.pairwise(cuts)]
        ids = [i for part in self._tokenizer(parts, add_special_tokens=False)["input_ids"] for i in part]
        if self.added_ids.isdisjoint(ids):
            return ids
        # They overlap, or one is a single character: encode letter by letter, and drop added tokens.
        return [i for letter in text for i in self._ids(letter) if i not in self.added_ids]

    def protected(self, value: Any) -> Any:
        """Return JSON values whose texts have a cut in each added token's text, for `encode`.

        Raise ConfigError for an added token of one character, which cannot be cut."""
        if isinstance(value, str):
            return self._with_cuts(value.replace(_CUT, "\N{REPLACEMENT CHARACTER}"))
        if isinstance(value, Mapping):
            return {self.protected(key): self.protected(inner) for key, inner in value.items()}
        return [self.protected(inner) for inner in value] if isinstance(value, list | tuple) else value

    def encode(self, text: str) -> list[int]:
        """Encode a template's text, added tokens included; no token spans a cut of `protected`."""
        parts = text.split(_CUT)
        return [i for ids in self._tokenizer(parts, add_special_tokens=False)["input_ids"] for i in ids]

    def _with_cuts(self, text: str) -> str:
        while (mark := next(filter(None, map(self.added.search, text.split(_CUT))), None)) is not None:
            if len(mark.group()) == 1:
                raise ConfigError(f"a text contains the token {mark.group()!r}")
            text = text.replace(mark.group(), mark.group()[0] + _CUT + mark.group()[1:])
        return text

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
