"""Normalise text, so that texts that look the same compare equal.

`plain_text` unifies characters and drops invisible ones; `prose` drops markdown's emphasis too.
Sources: Unicode's compatibility forms (UAX #15), its Default_Ignorable_Code_Point property (UAX #44), its
confusable letters (UTS #39), CommonMark's emphasis.
"""

from __future__ import annotations

import functools
import html
import re
import unicodedata

_WHOLE = re.compile("([\u2057\u3300-\u33ff\ufdf0-\ufdfd])")
"""Single characters that NFKC would spell out as words: they stay one character."""
_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\uffff\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_DECORATION = re.compile("[\u0305\u0332-\u0338\u20d0-\u20f0]")
"""Combining marks that strike through, underline or enclose a letter."""
_STACK = re.compile(r"[^\w\s\x00-\x7f]{31,}")
_STACKED = 30
"""Longest run of combining marks that is kept: normalisation takes quadratic time to order longer ones."""
_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_COMMENT = re.compile(r"<!--(?:(?!<!--|-->).){0,2000}-->", re.DOTALL)
_INLINE_TAG = re.compile(
    r"(?<!<)</?(?:b|i|u|s|em|strong|span|mark|wbr|sub|sup)"
    r"(?: [a-z]{1,20}=[\"'][^\"'<>\n]{0,80}[\"']){0,4} ?/?>(?!>)",
    re.IGNORECASE,
)
_FRAME = re.compile(r"<answer>(.*)</answer>", re.DOTALL)
_SAME_SIGNS = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201b\u02bc", "'"),
        **dict.fromkeys("\u201c\u201d\u201f", '"'),
        **dict.fromkeys("\u2010\u2011", "-"),
        **dict.fromkeys("\u2028\x0b\x0c\x85", "\n"),
        "\u2029": "\n\n",
        "\u2800": " ",
    }
)
_LOOKALIKES = str.maketrans(
    "\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0456\u0458\u0455\u04bb\u0501\u051b\u051d"
    "\u0410\u0412\u0415\u041a\u041c\u041d\u041e\u0420\u0421\u0422\u0425\u0406\u0408\u0405"
    "\u03bf\u03bd\u03b1\u03b9\u03c1"
    "\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7",
    "aeopcyxijshdqw" + "ABEKMHOPCTXIJS" + "ovaip" + "ABEZHIKMNOPTYX",
)
"""Cyrillic and Greek letters that look like Latin ones."""
_LETTERS = re.compile(r"[^\W\d_]+")
_LATIN = re.compile("[A-Za-z\u00c0-\u024f]")
_EMPHASIS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?<!\*)\*\*\*(?=[^\s*])([^*\n]{1,2000})(?<=\S)\*\*\*(?!\*)",
        r"(?<!\*)\*(?=[^\s*])([^*\n]{1,2000})(?<=\S)\*(?!\*)",
        r"(?<!\*)\*\*(?=[^\s*])([^*\n]{1,2000})(?<=\S)\*\*(?!\*)",
        r"(?<!\w)__(?=[^\s_])([^_\n]{1,2000})(?<=\S)__(?!\w)",
        r"(?<![\w])_(?=[^\s_])([^_\n]{1,2000})(?<=\S)_(?!\w)",
        r"~~(?=[^\s~])([^~\n]{1,2000})(?<=\S)~~",
        r"(?<!`)`(?=[^`])([^`\n]{1,2000})`(?!`)",
    )
)
"""No pattern matches across its own mark, so each takes linear time."""


def plain_text(text: str) -> str:
    """Return the text with unified characters and without invisible ones, in linear time.

    Full-width characters become ordinary ones, entities their characters, curly quotes straight ones.
    Zero-width characters, soft hyphens, comments and inline tags are removed. Letters of another script
    among Latin ones become the Latin letters that they look like.
    """
    text = _INLINE_TAG.sub("", _COMMENT.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))
    text = _ENTITY.sub(lambda entity: html.unescape(entity[0]), text)
    if text.isascii():
        return _INVISIBLE.sub("", text).translate(_SAME_SIGNS)
    parts = _WHOLE.split(_STACK.sub(_shortened, text))
    parts[::2] = [unicodedata.normalize("NFKC", part) for part in parts[::2]]
    text = _DECORATION.sub("", _INVISIBLE.sub("", "".join(parts))).translate(_SAME_SIGNS)
    return _in_latin_letters(unicodedata.normalize("NFC", text))


def prose(plain: str) -> str:
    """Return plain text without markdown's marks of emphasis and inline code."""
    for pattern in _EMPHASIS:
        plain = pattern.sub(r"\1", plain)
    return plain


def _shortened(run: re.Match[str]) -> str:
    marks = run[0]
    return marks[:_STACKED] + "".join(c for c in marks[_STACKED:] if not unicodedata.combining(c))


def _in_latin_letters(text: str) -> str:
    """Turn words of lookalike letters into Latin, if the text is mostly Latin or the word mixes scripts."""
    mostly_latin = 2 * len(_LATIN.findall(text)) >= sum(c.isalpha() for c in text)

    def rewritten(word: re.Match[str]) -> str:
        latin = word[0].translate(_LOOKALIKES)
        if latin == word[0] or not latin.isascii():
            return word[0]
        return latin if mostly_latin or _LATIN.search(word[0]) else word[0]

    return _LETTERS.sub(rewritten, text)


class VisibleResponse:
    """Response in three forms: as written without thoughts, as plain text, and without emphasis."""

    def __init__(self, written: str) -> None:
        """Take the visible text; answer tags around all of it are removed."""
        framed = _FRAME.fullmatch(written.strip())
        self.written = framed[1] if framed else written

    @functools.cached_property
    def text(self) -> str:
        """Plain text, with markdown."""
        return plain_text(self.written).strip()

    @functools.cached_property
    def prose(self) -> str:
        """Plain text without markdown's emphasis."""
        return prose(self.text)
