"""Choice of the program among a response's Markdown code blocks.

Fences are those of CommonMark (three or more backticks or tildes, closed by at least as many of the same),
also indented, in a list or in a quotation; text after the language is ignored. The last block that defines
the entry point counts, not the last block: usage and output often follow. Nothing here parses Python.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from mrl.rewards.code.tasks import CodeTask
from mrl.rewards.visible import answer_frames, visible_text

_PYTHON = ("python", "python3", "py", "py3")
_MARKDOWN = ("", "markdown", "md", "mdx")
"""Languages of blocks that may contain blocks."""
_FENCE = re.compile(
    r"(?P<prefix>[ \t>]*(?:(?:[-*+]|[0-9]{1,9}[.)])[ \t]+)?)(?P<marks>`{3,}|~{3,})(?P<info>.*)"
)
_LANGUAGE = re.compile(r"[\s{.]*([A-Za-z0-9_+#-]*)")


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Closed code block."""

    language: str
    """Lower case; empty if the fence names none."""
    text: str


def program_in(response: str, task: CodeTask) -> str | None:
    """Return a task's program from a response's visible part (all of it without fences), or None."""
    text = _framed(visible_text(response))
    if not any(marks in text for marks in ("```", "~~~")):
        return text if text.strip() else None
    code = list(blocks(text))
    chosen = _defining(code, task.entry_point) or (_bodies(code) if task.context else []) or _likely(code)
    return chosen[-1].text.strip("\n") if chosen else None


def _framed(text: str) -> str:
    """Return the text of the last <answer>, if there is one, unless only the text outside it has code."""
    frames = answer_frames(text)
    has_code = [
        any(marks in part for marks in ("```", "~~~")) for part in (text, frames[-1] if frames else "")
    ]
    return frames[-1].strip() + "\n" if frames and has_code[0] == has_code[1] else text


def describe_program(text: str, task: CodeTask) -> dict[str, str]:
    """Return the program in a visible text and its entry point, for people."""
    return {"program": program_in(text, task) or "none", "entry point": task.entry_point or "standard input"}


def blocks(text: str, *, closed: bool = False) -> Iterator[Block]:
    """Yield all blocks in order, each before those inside it. `closed`: the text's end closes an open one."""
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
    text = "\n".join(line[prefix.match(line).end() :] for line in lines)  # type: ignore[union-attr]
    match = _LANGUAGE.match(opening["info"])
    language = match[1].lower() if match else ""
    yield Block(language, text)
    if language in _MARKDOWN:
        yield from blocks(text, closed=True)


def _defining(code: Sequence[Block], name: str | None) -> list[Block]:
    """Return the blocks that define the name at their outermost level, or else anywhere."""
    if not name:
        return []
    name = re.escape(name)
    bound = rf"^{name}[ \t]*(?:[:,][^=\n]*)?=(?!=)|^(?:from[ \t].{{1,100}})?import[ \t].{{0,200}}\b{name}\b"
    defined = rf"(?:async[ \t]+)?(?:def|class)[ \t]+{name}\b"
    for pattern in (rf"^{defined}|{bound}", rf"^[ \t]+{defined}"):
        if chosen := [block for block in code if re.search(pattern, block.text, re.MULTILINE)]:
            return chosen
    return []


def _bodies(code: Sequence[Block]) -> list[Block]:
    """Return the blocks that continue the task's own code: they start with an indented line."""
    return [block for block in code if re.match(r"\n*[ \t]+\S", block.text)]


def _likely(code: Sequence[Block]) -> list[Block]:
    """Return the Python blocks, else those without a language, else all."""
    for languages in (_PYTHON, ("",)):
        if chosen := [block for block in code if block.language in languages]:
            return chosen
    return list(code)
