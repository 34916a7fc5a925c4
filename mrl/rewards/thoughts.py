"""Marks around models' thoughts, one table for all families, and their form in a decoded response.

Many tokenizers make these marks special tokens, which decoding drops. So thoughts are found by token ids and
written between <think> and </think> for verifiers (`mrl.rewards.visible`), whatever the family's marks are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

OPENING, CLOSING = "<think>", "</think>"
MARKS = (
    (OPENING, CLOSING),  # Qwen, DeepSeek, GLM, MiniMax-M2, Kimi-K2, OLMo, Phi, Nemotron, Ernie, Hunyuan
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),  # MiniMax-M3
    ("<|channel>", "<channel|>"),  # Gemma 4
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    ("<thought>", "</thought>"),  # EXAONE
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("◁think▷", "◁/think▷"),  # Kimi-VL
)
"""(opening mark, closing mark) of a thought."""
_CHANNEL, _MESSAGE, _START, _END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
"""gpt-oss (harmony): <|start|>ROLE<|channel|>CHANNEL<|message|>TEXT<|end|>; all but `final` are thoughts."""
_FINAL = "final"
_LIKE_A_MARK = re.compile(
    r"[<\[{◁].*(?:think|thought|reason|analy[sz]|channel|reflect|scratchpad)", re.IGNORECASE
)
_OPENED = tuple(mark for mark, _ in MARKS[1:])
_OPENED_CHANNEL = re.compile(rf"{re.escape(_CHANNEL)}\s*(?!{_FINAL}\b)[^<]*{re.escape(_MESSAGE)}$")


def opens_thought(prompt: str) -> bool:
    """Return True if a prompt's text ends with an opened thought."""
    end = prompt.rstrip()
    return end.endswith((OPENING, *_OPENED)) or _OPENED_CHANNEL.search(end[-200:]) is not None


def as_thought(response: str) -> str:
    """Return a response with the opening mark of the thought that its prompt opened."""
    return response if response.startswith(OPENING) else OPENING + response


class ThoughtMarks:
    """Marks of one tokenizer that decoding would drop or that are not <think> and </think>."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = {
            str(token): (number, token.special) for number, token in tokenizer.added_tokens_decoder.items()
        }
        self._special = {number for number, special in added.values() if special}
        pairs = {mark: shown for pair in MARKS for mark, shown in zip(pair, (OPENING, CLOSING), strict=True)}
        self._shown = {
            added[mark][0]: shown
            for mark, shown in pairs.items()
            if mark in added and (added[mark][1] or mark != shown)
        }
        harmony = {mark: added[mark][0] for mark in (_CHANNEL, _MESSAGE, _START, _END) if mark in added}
        self._harmony = harmony if {_CHANNEL, _MESSAGE} <= harmony.keys() else {}
        known = {mark for pair in MARKS for mark in pair} | {_CHANNEL, _MESSAGE, _START, _END}
        self.unknown = sorted(
            mark
            for mark, (_, special) in added.items()
            if special and mark not in known and _LIKE_A_MARK.search(mark)
        )
        """Special tokens that look like marks of thoughts but are not in the table."""

    def __bool__(self) -> bool:
        """Return True if there are any."""
        return bool(self._shown or self._harmony)

    def overrides(self, tokens: Sequence[int]) -> list[str | None]:
        """Return the text to write for each token; None is the token's own text."""
        if self._harmony:
            return self._channel_overrides(tokens)
        return [self._shown.get(token, "" if token in self._special else None) for token in tokens]

    def _channel_overrides(self, tokens: Sequence[int]) -> list[str | None]:
        texts: list[str | None] = []
        header: list[int] | None = None
        """Tokens of the current header; None outside one."""
        is_open = has_text = has_message = False
        channel, message = self._harmony[_CHANNEL], self._harmony[_MESSAGE]
        for token in tokens:
            if token in (channel, self._harmony.get(_START)):
                header = [*(header or []), token]
                texts.append("")
            elif token == message:
                if header is None and has_message:
                    texts.append("")
                    continue
                if header is None:  # the prompt started it
                    header, texts = [channel, *tokens[: len(texts)]], [""] * len(texts)
                closes = self._is_final(header) and (is_open or has_text)
                opens = not self._is_final(header) and not is_open
                texts.append(CLOSING if closes else OPENING if opens else "\n" if is_open else "")
                is_open, has_text, has_message, header = not self._is_final(header), True, True, None
            elif header is not None:
                header.append(token)
                texts.append("")
            else:
                texts.append("" if token in self._special else None)
                has_text = has_text or token not in self._special
        return texts

    def _is_final(self, header: Sequence[int]) -> bool:
        """Return True if the message after this header is visible: the assistant's, in `final` or none."""
        text = self._tokenizer.decode(list(header), skip_special_tokens=False)
        role, has_channel, channel = text.rpartition(_CHANNEL)
        role = role if has_channel else channel
        words = role.rpartition(_START)[2].split()
        return words in ([], ["assistant"]) and (not has_channel or channel.split()[:1] == [_FINAL])
