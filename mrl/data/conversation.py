"""Tokenise prompts with responses, and mark the assistant's messages and their end tokens as trained.

A conversation is rendered and tokenised as a whole. The text before a turn of the assistant must be its
prefix, token for token; otherwise the row is refused. Plain text is tokenised as the policy sees it: the
prompt alone, then the response.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from mrl.data.messages import Messages
from mrl.data.template_usage import TemplateUsage, Tools
from mrl.data.templates import TEMPLATE_ERRORS, apply_template
from mrl.data.tokenise import encode_texts, has_double_bos, template_names
from mrl.errors import DataError


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt and its continuation in tokens."""

    tokens: np.ndarray
    """[T] int64."""
    mask: np.ndarray
    """[T] bool: True for trained tokens."""
    prompt_length: int
    """Tokens before the first trained one."""


class Encoder:
    """A model's tokenizer, for the rows of `mrl tune`."""

    def __init__(
        self, tokenizer: Any, *, ends: Collection[int], chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """`ends`: the end-of-text tokens of a response; the first of them closes plain text."""
        self._tokenizer, self._ends = tokenizer, tuple(ends)
        self._kwargs = dict(chat_template_kwargs or {})
        self._tools: Tools = None
        self._own: Mapping[str, Any] = {}
        self.unread = TemplateUsage(template_names(tokenizer))
        """What the template has not used in the conversations so far."""

    def for_row(self, tools: Tools, arguments: Mapping[str, Any]) -> Encoder:
        """Return an encoder that shows a row's tools; its template arguments override those of all rows."""
        encoder = copy.copy(self)
        encoder._tools, encoder._own, encoder._kwargs = tools, arguments, {**self._kwargs, **arguments}
        return encoder

    @functools.cached_property
    def _cutting(self) -> frozenset[int]:
        """Added tokens that split a text; empty if the tokenizer does not return token offsets."""
        if not self._tokenizer.is_fast:
            return frozenset()
        added = self._tokenizer.added_tokens_decoder.items()
        return frozenset(number for number, token in added if not token.normalized)

    def text(self, prompt: str, response: str, *, place: str) -> Encoded:
        """Encode plain text: a prompt, its response and the end token."""
        self.unread.count_unrendered((), self._tools, self._own)
        return self._plain(prompt, response, place)

    def _plain(self, prompt: str, response: str, place: str) -> Encoded:
        left = encode_texts([prompt], [False], self._tokenizer)[0]
        right = encode_texts([response], [True], self._tokenizer)[0]
        if not len(left):
            raise DataError(f"{place}: the prompt is empty")
        tokens = np.concatenate([left, right, self._ends[:1]]).astype(np.int64)
        self._require_one_opening(tokens, place)
        return Encoded(tokens, np.arange(len(tokens)) >= len(left), len(left))

    def messages(self, messages: Messages, *, first: int, place: str) -> Encoded:
        """Encode a conversation up to its last assistant message; train those from index `first` on."""
        if not getattr(self._tokenizer, "chat_template", None):
            self.unread.count_unrendered(messages, self._tools, self._own)
            return self._without_template(messages, first=first, place=place)
        text = self._text(messages, place)
        self.unread.check(
            messages,
            self._tools,
            self._own,
            lambda other, tools: self.for_row(tools, self._own)._text(other, place),
            text,
        )
        whole, spans = Rendered(text, self._tokenizer, self._cutting), []
        turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
        if not turns or not turns[0]:
            raise DataError(
                f"{place}: no assistant message to train on; at least one must follow another message"
            )
        for turn in turns:
            before = self._text(messages[:turn], place, to_go_on=True)
            after = self._text(messages[: turn + 1], place)
            spans.append(self._span(whole, before, after, turn, place))
        tokens = np.array(whole.ids[: spans[-1][1]], np.int64)
        self._require_one_opening(tokens, place)
        mask = np.zeros(len(tokens), bool)
        for start, end in spans:
            mask[start:end] = True
        return Encoded(tokens, mask, spans[0][0])

    def _span(self, whole: Rendered, before: str, after: str, turn: int, place: str) -> tuple[int, int]:
        """Return the token span of one turn, up to and including its end token."""
        start, stop = (self._tokens_of(whole, part, turn, place) for part in (before, after))
        ends = [i for i in range(start, stop) if whole.ids[i] in self._ends]
        if not ends:
            raise DataError(
                f"{place}: the chat template renders message {turn} without an end token ({self._ends}); a "
                "model tuned on it would not stop"
            )
        return start, ends[-1] + 1

    def _tokens_of(self, whole: Rendered, part: str, turn: int, place: str) -> int:
        """Return the number of tokens of a prefix of the conversation."""
        length, first_difference = whole.beginning(part)
        if length is None:
            raise DataError(
                f"{place}: the conversation up to message {turn} is not a prefix of the whole one (token "
                f"{first_difference}), because the chat template or the tokenizer changes it if more "
                "follows; train only on the last turn (tune.data.turns: last), or change the row"
            )
        return length

    def _without_template(self, messages: Messages, *, first: int, place: str) -> Encoded:
        if len(messages) != 2 or messages[1]["role"] != "assistant" or first > 1:
            raise DataError(
                f"{place}: the tokenizer has no chat template to join {len(messages)} messages; use text, or "
                "add a template to the model's folder"
            )
        return self._plain(messages[0]["content"], messages[1]["content"], place)

    def _text(self, messages: Sequence[Mapping[str, Any]], place: str, *, to_go_on: bool = False) -> str:
        try:
            return apply_template(
                self._tokenizer, messages, tools=self._tools, add_generation_prompt=to_go_on, **self._kwargs
            )
        except TEMPLATE_ERRORS as error:
            roles = [message["role"] for message in messages]
            raise DataError(f"{place}: the chat template rejects the roles {roles}: {error}") from error

    def _require_one_opening(self, tokens: np.ndarray, place: str) -> None:
        if has_double_bos(tokens, self._tokenizer):
            raise DataError(f"{place}: the row begins with two BOS tokens; remove the one in the text")


class Rendered:
    """A conversation's text in tokens, and the number of tokens of its prefixes.

    The tokenizer finds its added tokens first, and they split the text: what follows one is tokenised
    independently of what precedes it (`AddedVocabulary` of Hugging Face's tokenizers). So a prefix is
    tokenised again only from its last such token on, and the cost of a conversation is linear, not quadratic.
    """

    def __init__(self, text: str, tokenizer: Any, cutting: Collection[int]) -> None:
        """`cutting`: the added tokens that are found before the text is normalised."""
        self._text, self._tokenizer = text, tokenizer
        if not cutting:
            self.ids, self._cuts = _ids(text, tokenizer), list[tuple[int, int, int]]()
            return
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        self.ids = list(encoding["input_ids"])
        spans = zip(self.ids, encoding["offset_mapping"], strict=True)
        self._cuts = [(end, start, n) for n, (token, (start, end)) in enumerate(spans) if token in cutting]
        """(end, start, number) of each such token: its span in the text and its index."""

    def beginning(self, part: str) -> tuple[int | None, int]:
        """Return (tokens of `part`, 0), or (None, first differing token) if `part` is not a token prefix."""
        last = bisect.bisect_left(self._cuts, (len(part),)) - 1
        if last >= 0 and self._text.startswith(part):
            _, start, number = self._cuts[last]
            part_ids = _ids(part[start:], self._tokenizer)
            if self.ids[number : number + len(part_ids)] == part_ids:
                return number + len(part_ids), 0
        part_ids = _ids(part, self._tokenizer)
        if self.ids[: len(part_ids)] == part_ids:
            return len(part_ids), 0
        pairs = enumerate(zip(self.ids, part_ids, strict=False))
        return None, next((i for i, (a, b) in pairs if a != b), len(self.ids))


def _ids(text: str, tokenizer: Any) -> list[int]:
    return encode_texts([text], [True], tokenizer)[0].tolist()
