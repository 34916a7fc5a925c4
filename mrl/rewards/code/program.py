"""The program of a response: which of its code blocks is meant, read as Markdown is.

Fences are those of CommonMark (three or more backticks or tildes, closed by at least as many of the same),
indented, in a list or in a quotation too; what stands behind the language does not matter. The last block that
defines the entry point counts, not the last block: usage and output often follow. Nothing here parses Python.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from mrl.rewards.code.tasks import CodeTask
from mrl.rewards.visible import answer_frames, visible_text

_PYTHON = ("python", "python3", "py", "py3")
_MARKDOWN = ("", "markdown", "md", "mdx")
"""Blocks that may hold blocks."""
_FENCE = re.compile(
    r"(?P<prefix>[ \t>]*(?:(?:[-*+]|[0-9]{1,9}[.)])[ \t]+)?)(?P<marks>`{3,}|~{3,})(?P<info>.*)"
)
_LANGUAGE = re.compile(r"[\s{.]*([A-Za-z0-9_+#-]*)")


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A closed code block."""

    language: str
    """In lower case; empty where the fence names none."""
    text: str


def program_in(response: str, task: CodeTask) -> str | None:
    """The program for a task in what is visible of a response; where that has no fence, all of it. None where
    no block is closed."""
    text = _framed(visible_text(response))
    if not any(marks in text for marks in ("```", "~~~")):
        return text if text.strip() else None
    found = list(blocks(text))
    chosen = _defining(found, task.entry_point) or (_bodies(found) if task.context else []) or _likely(found)
    return chosen[-1].text.strip("\n") if chosen else None


def _framed(text: str) -> str:
    """What the last <answer> holds, where there is one and no code is outside it alone."""
    frames = answer_frames(text)
    has_code = [
        any(marks in part for marks in ("```", "~~~")) for part in (text, frames[-1] if frames else "")
    ]
    return frames[-1].strip() + "\n" if frames and has_code[0] == has_code[1] else text


def reading_of(text: str, task: CodeTask) -> dict[str, str]:
    """What a person is told of the program in a visible text."""
    return {"program": program_in(text, task) or "none", "entry point": task.entry_point or "standard input"}


def blocks(text: str, *, closed: bool = False) -> Iterator[Block]:
    """All blocks in order, each before those inside it. `closed`: the end of the text closes an open one, as
    the end of the block around it does."""
    opening: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        fence = _FENCE.match(line)
        if opening is None:
            opening, lines = (fence, []) if fence and _opens(fence) else (None, [])
        elif fence and _closes(fence, opening):
            yield from _with_inner(opening, lines)
            opening = None
        else:
            lines.append(line)
    if opening is not None and closed:
        yield from _with_inner(opening, lines)


def _opens(fence: re.Match[str]) -> bool:
    return fence["marks"][0] == "~" or "`" not in fence["info"]


def _closes(fence: re.Match[str], opening: re.Match[str]) -> bool:
    return (
        fence["marks"].startswith(opening["marks"])
        and not fence["info"].strip()
        and not fence["prefix"].strip(" \t>")
        and len(fence["prefix"]) <= len(opening["prefix"]) + 3
    )


def _with_inner(opening: re.Match[str], lines: Sequence[str]) -> Iterator[Block]:
    quote = ">" if ">" in opening["prefix"] else ""
    prefix = re.compile(rf"[ \t{quote}]{{0,{len(opening['prefix'])}}}")
    text = "\n".join(line[prefix.match(line).end() :] for line in lines)  # type: ignore[union-attr] it matches ""
    found = _LANGUAGE.match(opening["info"])
    language = found[1].lower() if found else ""
    yield Block(language, text)
    if language in _MARKDOWN:
        yield from blocks(text, closed=True)


def _defining(found: Sequence[Block], name: str | None) -> list[Block]:
    """Blocks that define the name at their outermost level, or else anywhere."""
    if not name:
        return []
    name = re.escape(name)
    bound = rf"^{name}[ \t]*(?:[:,][^=\n]*)?=(?!=)|^(?:from[ \t].{{1,100}})?import[ \t].{{0,200}}\b{name}\b"
    defined = rf"(?:async[ \t]+)?(?:def|class)[ \t]+{name}\b"
    for pattern in (rf"^{defined}|{bound}", rf"^[ \t]+{defined}"):
        if chosen := [block for block in found if re.search(pattern, block.text, re.MULTILINE)]:
            return chosen
    return []


def _bodies(found: Sequence[Block]) -> list[Block]:
    """Blocks that go on where the task's own code ends, with an indented line."""
    return [block for block in found if re.match(r"\n*[ \t]+\S", block.text)]


def _likely(found: Sequence[Block]) -> list[Block]:
    """Blocks of Python; else those of no language, else all."""
    for languages in (_PYTHON, ("",)):
        if chosen := [block for block in found if block.language in languages]:
            return chosen
    return list(found)
