"""Blocks: headings, paragraphs, lists, quotations and fenced code."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from markup.inline import inline_html

_HEADING = re.compile(r"(#{1,6}) +(.+?)(?: +#+)?")
_BULLET = re.compile(r"[-*+] +(.*)")
_NUMBER = re.compile(r"\d+[.)] +(.*)")
_FENCE = re.compile(r"(```+|~~~+) *(\w*).*")


def to_html(text: str) -> str:
    """Return the HTML of a text, one block per line."""
    return "\n".join(_blocks(text.replace("\r\n", "\n").split("\n")))


def _blocks(lines: list[str]) -> Iterator[str]:
    place = 0
    while place < len(lines):
        line = lines[place]
        if not line.strip():
            place += 1
        elif match := _FENCE.fullmatch(line):
            end = _end_of_fence(lines, place, match[1])
            language = f' class="language-{match[2]}"' if match[2] else ""
            code = html.escape("\n".join(lines[place + 1 : end]), quote=False)
            yield f"<pre><code{language}>{code}</code></pre>"
            place = end + 1
        elif match := _HEADING.fullmatch(line):
            yield f"<h{len(match[1])}>{inline_html(match[2])}</h{len(match[1])}>"
            place += 1
        elif line.startswith(">"):
            end = place
            while end < len(lines) and lines[end].startswith(">"):
                end += 1
            inner = [quoted[1:].removeprefix(" ") for quoted in lines[place:end]]
            yield f"<blockquote>{''.join(_blocks(inner))}</blockquote>"
            place = end
        elif _BULLET.fullmatch(line) or _NUMBER.fullmatch(line):
            pattern, tag = (_BULLET, "ul") if _BULLET.fullmatch(line) else (_NUMBER, "ol")
            items, place = _items(lines, place, pattern)
            yield f"<{tag}>{''.join(f'<li>{inline_html(item)}</li>' for item in items)}</{tag}>"
        else:
            end = place
            while end < len(lines) and lines[end].strip() and not (end > place and _starts_block(lines[end])):
                end += 1
            yield f"<p>{inline_html(' '.join(part.strip() for part in lines[place:end]))}</p>"
            place = end


def _starts_block(line: str) -> bool:
    return line.startswith(">") or any(
        kind.fullmatch(line) is not None for kind in (_HEADING, _FENCE, _BULLET, _NUMBER)
    )


def _end_of_fence(lines: list[str], place: int, fence: str) -> int:
    """Return the line that closes a fence: as many marks or more; else one past the last line."""
    for end in range(place + 1, len(lines)):
        mark = lines[end].strip()
        if len(mark) >= len(fence) and set(mark) == {fence[0]}:
            return end
    return len(lines)


def _items(lines: list[str], place: int, pattern: re.Pattern[str]) -> tuple[list[str], int]:
    """Return a list's items and the line after it; indented lines continue an item."""
    items: list[str] = []
    while place < len(lines):
        if match := pattern.fullmatch(lines[place]):
            items.append(match[1])
        elif items and lines[place].startswith("  ") and lines[place].strip():
            items[-1] += f" {lines[place].strip()}"
        else:
            break
        place += 1
    return items, place
