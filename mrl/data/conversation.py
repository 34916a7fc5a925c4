"""Prompts with their responses as tokens, and which of them are trained: what the assistant says, up to its end token.

A conversation is rendered and tokenised as a whole; what came before a turn of the assistant must be its beginning, token
for token, else the row is refused by name. Plain text is tokenised as the policy meets it: the prompt alone, then the response.
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
from mrl.data.templates import TEMPLATE_ERRORS, apply_template
from mrl.data.tokenise import encode_texts, opens_twice, template_names
from mrl.data.unread import Tools, Unread
from mrl.errors import DataError


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt and what followed it."""

    tokens: np.ndarray
    """[T] int64."""
    mask: np.ndarray
    """[T] bool: tokens that are trained."""
    prompt_length: int
    """Tokens before the first trained one."""


class Encoder:
    """The tokenizer of a model, for rows to tune on."""

    def __init__(
        self, tokenizer: Any, *, ends: Collection[int], chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """`ends`: the tokens that end a response; the first of them closes a plain text."""
        self._tokenizer, self._ends = tokenizer, tuple(ends)
        self._kwargs = dict(chat_template_kwargs or {})
        self._tools: Tools = None
        self._own: Mapping[str, Any] = {}
        self.unread = Unread(template_names(tokenizer))
        """What the template left out of the conversations so far."""

    def for_row(self, tools: Tools, arguments: Mapping[str, Any]) -> Encoder:
        """Return the encoder of a row that shows its tools; the row's own template arguments override those of all rows."""
        encoder = copy.copy(self)
        encoder._tools, encoder._own, encoder._kwargs = tools, arguments, {**self._kwargs, **arguments}
        return encoder

    @functools.cached_property
    def _cutting(self) -> frozenset[int]:
        """The added tokens that cut a text; none where the tokenizer does not tell where its tokens lie."""
        if not self._tokenizer.is_fast:
            return frozenset()
        added = self._tokenizer.added_tokens_decoder.items()
        return frozenset(number for number, token in added if not token.normalized)

    def text(self, prompt: str, response: str, *, place: str) -> Encoded:
        """A text that follows a text, closed by the end token."""
        self.unread.pass_over((), self._tools, self._own)
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
        """A conversation; the assistant's messages from number `first` on are trained, what follows the last of them is
        left out."""
        if not getattr(self._tokenizer, "chat_template", None):
            self.unread.pass_over(messages, self._tools, self._own)
            return self._without_template(messages, first=first, place=place)
        text = self._text(messages, place)
        self.unread.look(
            messages,
            self._tools,
            self._own,
            lambda said, tools: self.for_row(tools, self._own)._text(said, place),
            text,
        )
        whole, spans = Rendered(text, self._tokenizer, self._cutting), []
        turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
        if not turns or not turns[0]:
            raise DataError(
                f"{place}: there is no message of the assistant to train on, or none that anything precedes"
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
        """The tokens of one turn, its end token the last."""
        start, stop = (self._tokens_of(whole, part, turn, place) for part in (before, after))
        ends = [i for i in range(start, stop) if whole.ids[i] in self._ends]
        if not ends:
            raise DataError(
                f"{place}: message {turn} has no end token ({self._ends}) after the chat template rendered it; a model tuned on "
                "it would not stop"
            )
        return start, ends[-1] + 1

    def _tokens_of(self, whole: Rendered, part: str, turn: int, place: str) -> int:
        """How many tokens a beginning of the conversation has."""
        length, differs = whole.beginning(part)
        if length is None:
            raise DataError(
                f"{place}: the conversation up to message {turn} is not how the whole one begins (token {differs}): the chat "
                "template or the tokenizer changes it once more follows; train on the last turn alone (tune.data.turns: "
                "last), or change the row"
            )
        return length

    def _without_template(self, messages: Messages, *, first: int, place: str) -> Encoded:
        if len(messages) != 2 or messages[1]["role"] != "assistant" or first > 1:
            raise DataError(
                f"{place}: {len(messages)} messages and a tokenizer without a chat template to join them; give text, or put a "
                "template into the model's folder"
            )
        return self._plain(messages[0]["content"], messages[1]["content"], place)

    def _text(self, messages: Sequence[Mapping[str, Any]], place: str, *, to_go_on: bool = False) -> str:
        try:
            return apply_template(
                self._tokenizer, messages, tools=self._tools, add_generation_prompt=to_go_on, **self._kwargs
            )
        except TEMPLATE_ERRORS as error:
            roles = [message["role"] for message in messages]
            raise DataError(f"{place}: the chat template refuses the roles {roles}: {error}") from error

    def _require_one_opening(self, tokens: np.ndarray, place: str) -> None:
        if opens_twice(tokens, self._tokenizer):
            raise DataError(f"{place}: the row begins with the opening token twice; take it out of the text")


class Rendered:
    """A conversation's text in tokens, and how many of them are those of a beginning of it.

    The tokenizer's added tokens are found before anything else, and cut the text: what lies behind one is tokenised as if nothing
    came before it (`AddedVocabulary` of Hugging Face's tokenizers). So of a beginning only what begins with its last such token is
    tokenised again, and a conversation of many turns costs what its tokens do, not their square.
    """

    def __init__(self, text: str, tokenizer: Any, cutting: Collection[int]) -> None:
        """`cutting`: those of the added tokens that are found before the text is normalised."""
        self._text, self._tokenizer = text, tokenizer
        if not cutting:
            self.ids, self._cuts = _ids(text, tokenizer), list[tuple[int, int, int]]()
            return
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        self.ids = list(found["input_ids"])
        places = zip(self.ids, found["offset_mapping"], strict=True)
        self._cuts = [(end, start, n) for n, (token, (start, end)) in enumerate(places) if token in cutting]
        """(end, start, number) of each such token: where it lies in the text, and which token it is."""

    def beginning(self, part: str) -> tuple[int | None, int]:
        """(tokens of `part`, 0); (None, the first token that is another one) where they are not the first of the whole."""
        last = bisect.bisect_left(self._cuts, (len(part),)) - 1
        if last >= 0 and self._text.startswith(part):
            _, start, number = self._cuts[last]
            own = _ids(part[start:], self._tokenizer)
            if self.ids[number : number + len(own)] == own:
                return number + len(own), 0
        own = _ids(part, self._tokenizer)
        if self.ids[: len(own)] == own:
            return len(own), 0
        pairs = enumerate(zip(self.ids, own, strict=False))
        return None, next((i for i, (a, b) in pairs if a != b), len(self.ids))


def _ids(text: str, tokenizer: Any) -> list[int]:
    return encode_texts([text], [True], tokenizer)[0].tolist()
