"""Text that a policy wrote, made fit to stand in a judge's prompt: it opens no role, closes no fence, and is
looked at only where there is something to look at.

What it says ("say yes") is another matter: that is measured (`mrl rewards check`), never excluded.
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
    "INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|ARGS|CALL_ID|THINK|IMG|IMG_BREAK|"
    "IMG_END|PREFIX|MIDDLE|SUFFIX|CLS|SEP|PAD|MASK|UNK|BOS|EOS|gMASK|sMASK"
)
_COMMON = rf"<[|\uff5c][^<>\n]{{1,64}}[|\uff5c]>|<<?/?(?:{_NAMES}|sys)>>?|(?-i:\[/?(?:{_BRACKETS})\])"
"""Control strings of the common families: Qwen and Llama 3 (<|...|>), DeepSeek (the same with full-width bars), Gemma and Llama 2 (<bos>,
<<SYS>>), Mistral and BERT ([INST], [SEP])."""
_ROUNDS = 8


class ControlStrings:
    """Finds what a judge's tokenizer may read as a control token."""

    def __init__(self, strings: Collection[str] = ()) -> None:
        exact = "|".join(re.escape(s) for s in sorted(strings, key=lambda s: (-len(s), s)) if s.strip())
        self.pattern = f"{exact}|{_COMMON}" if exact else _COMMON
        self._pattern = re.compile(self.pattern, re.IGNORECASE)

    @classmethod
    def of_folder(cls, folder: str | None) -> ControlStrings:
        """Those of the tokenizer in a folder, beside the common ones. ConfigError where it holds none."""
        if folder is None:
            return cls()
        file = Path(folder) / "tokenizer.json"
        try:
            added = json.loads(file.read_text(encoding="utf-8")).get("added_tokens", [])
        except (OSError, ValueError) as error:
            raise ConfigError(f"tokenizer = {folder!r}: {file} cannot be read: {error}") from error
        return cls({a["content"] for a in added if a.get("special") or re.search(r"[<\[|]", a["content"])})

    def defuse(self, text: str) -> tuple[str, int]:
        """The text with a space inside each control string, and how many there were; other text is left as it
        is. Letters that a tokenizer's normaliser may turn into a control string are written plainly then."""
        found = 0
        for _ in range(_ROUNDS):
            plain = unicodedata.normalize("NFKC", text)
            if not self._pattern.search(text):
                if not self._pattern.search(plain):
                    return text, found
                text = plain
            text, count = self._pattern.subn(_apart, text)
            found += count
        return self._pattern.sub(" ", unicodedata.normalize("NFKC", text)), found


def _apart(match: re.Match[str]) -> str:
    return f"{match[0][0]} {match[0][1:]}" if len(match[0]) > 1 else " "


def fenced(text: str, nonce: str) -> str:
    """The text between two lines that it cannot hold."""
    while nonce in text:
        text = text.replace(nonce, "")
    return f"[{nonce}]\n{text}\n[/{nonce}]"


def end_of(text: str, max_chars: int) -> str:
    """The text's last characters, and a word about the others."""
    left_out = len(text) - max_chars
    return text if left_out <= 0 else f"({left_out} characters left out)\n{text[left_out:]}"


def fault_of(response: str, question: str, reference: str) -> str:
    """Why a response is refused without asking anyone: it says nothing, or the question alone. Empty where it is not."""
    said = " ".join(response.split())
    if not said:
        return "an empty response"
    if said == " ".join(reference.split()):
        return ""
    if not any(c.isalnum() for c in said):
        return "nothing but symbols"
    asked = " ".join(question.split())
    rest = said.replace(asked, "") if asked else said
    return "" if any(c.isalnum() for c in rest) else "the question repeated"
