"""Inline markup: code, links, strong and emphasised text."""

from __future__ import annotations

import html
import re

_CODE = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_STRONG = re.compile(r"\*\*(?=\S)(.+?)(?<=\S)\*\*", re.DOTALL)
_EMPHASIS = re.compile(r"(?<!\*)\*(?=\S)(.+?)(?<=\S)\*(?!\*)", re.DOTALL)
_SAFE = ("http://", "https://", "mailto:", "/", "#")


def inline_html(text: str) -> str:
    """Return a text's HTML. Code is taken as it is: nothing in it is markup."""
    text = html.escape(text, quote=False)
    text = _CODE.sub(r"<code>\1</code>", text)
    text = _LINK.sub(_link, text)
    text = _STRONG.sub(r"<strong>\1</strong>", text)
    return _EMPHASIS.sub(r"<em>\1</em>", text)


def _link(match: re.Match[str]) -> str:
    title, address = match[1], match[2]
    if not address.startswith(_SAFE):
        return match[0]
    return f'<a href="{address.replace(chr(34), "%22")}">{title}</a>'
