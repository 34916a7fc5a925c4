"""Make a policy's text safe in a judge's prompt: it opens no role, closes no fence, and is refused if empty.

Its content ("say yes") is not filtered; `mrl rewards check` measures what it does to the judge.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Collection
from pathlib import Path

from mrl.errors import ConfigError

_NAMES = (
    "s|bos|eos|pad|unk|mask|cls|sep|think|thinking|tool_call|tool_calls|tool_response|tools|"
    "start_of_turn|end_of_turn|start_of_image|end_of_image|image_soft_token|sop|eop|gmask|human|bot"
)
_BRACKETS = (
    "INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|ARGS|CALL_ID|THINK|IMG|"
    "IMG_BREAK|IMG_END|PREFIX|MIDDLE|SUFFIX|CLS|SEP|PAD|MASK|UNK|BOS|EOS|gMASK|sMASK"
)
_COMMON = rf"<[|\uff5c][^<>\n]{{1,64}}[|\uff5c]>|<<?/?(?:{_NAMES}|sys)>>?|(?-i:\[/?(?:{_BRACKETS})\])"
"""Control strings of the common families: Qwen and Llama 3 (<|...|>), DeepSeek (the same with full-width
bars), Gemma and Llama 2 (<bos>, <<SYS>>), Mistral and BERT ([INST], [SEP])."""
_ROUNDS = 8


class ControlStrings:
    """Finder of strings that a judge's tokenizer may read as control tokens."""

    def __init__(self, strings: Collection[str] = ()) -> None:
        exact = "|".join(re.escape(s) for s in sorted(strings, key=lambda s: (-len(s), s)) if s.strip())
        self.pattern = f"{exact}|{_COMMON}" if exact else _COMMON
        self._pattern = re.compile(self.pattern, re.IGNORECASE)

    @classmethod
    def of_folder(cls, folder: str | None) -> ControlStrings:
        """Return a finder for the folder's tokenizer. Raises ConfigError if tokenizer.json is unreadable."""
        if folder is None:
            return cls()
        file = Path(folder) / "tokenizer.json"
        try:
            added = json.loads(file.read_text(encoding="utf-8")).get("added_tokens", [])
        except (OSError, ValueError) as error:
            raise ConfigError(f"tokenizer = {folder!r}: {file} cannot be read: {error}") from error
        return cls({a["content"] for a in added if a.get("special") or re.search(r"[<\[|]", a["content"])})

    def defuse(self, text: str) -> tuple[str, int]:
        """Return the text with a space inside each control string, and their number. Other text stays
        as it is, unless its NFKC form contains a control string: then that form is used."""
        total = 0
        for _ in range(_ROUNDS):
            plain = unicodedata.normalize("NFKC", text)
            if not self._pattern.search(text):
                if not self._pattern.search(plain):
                    return text, total
                text = plain
            text, count = self._pattern.subn(_apart, text)
            total += count
        return self._pattern.sub(" ", unicodedata.normalize("NFKC", text)), total


def _apart(match: re.Match[str]) -> str:
    return f"{match[0][0]} {match[0][1:]}" if len(match[0]) > 1 else " "


def fenced(text: str, nonce: str) -> str:
    """Return the text between two lines that it cannot contain."""
    while nonce in text:
        text = text.replace(nonce, "")
    return f"[{nonce}]\n{text}\n[/{nonce}]"


def tail(text: str, max_chars: int) -> str:
    """Return the text's last `max_chars` characters, after a note on how many were left out."""
    left_out = len(text) - max_chars
    return text if left_out <= 0 else f"({left_out} characters left out)\n{text[left_out:]}"


def rejection_reason(response: str, question: str, reference: str) -> str:
    """Return why a response is rejected unjudged (it is empty, or only the question); "" if it is not."""
    text = " ".join(response.split())
    if not text:
        return "an empty response"
    if text == " ".join(reference.split()):
        return ""
    if not any(c.isalnum() for c in text):
        return "nothing but symbols"
    prompt = " ".join(question.split())
    remaining = text.replace(prompt, "") if prompt else text
    return "" if any(c.isalnum() for c in remaining) else "the question repeated"
