"""Remove LaTeX layout: spacing, sizes, colours, the height of brackets, the distance of rows.

It takes one linear pass from left to right, so that the second backslash of a row's end starts no command.
"""

from __future__ import annotations

import re

_LENGTH = (
    r"[ ]?[+-]?[ ]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[ ]?(?:pt|em|ex|mu|mm|cm|in|pc|bp|dd|cc|sp|px)(?![A-Za-z])"
)
_LAYOUT = re.compile(
    rf"""
    (?P<row>\\\\\*?(?:[ ]?\[{_LENGTH}[ ]?\])?|\\(?:cr|tabularnewline)(?![A-Za-z]))
    |(?P<space>
        \\[,;:>\ ]|~
        |\\(?:quad|qquad|enspace|enskip|thinspace|medspace|thickspace|allowbreak|nobreak|hfill?)(?![A-Za-z])
        |\\[hm]space\*?[ ]?\{{[^{{}}]*\}}|\\(?:hskip|mskip|kern|mkern){_LENGTH}
    )
    |(?P<nothing>
        (?:
            \\!
            |\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])(?:[ ]*\.)?
            |\\(?:(?:display|text|script|scriptscript)style|tiny|scriptsize|footnotesize|small|normalsize)
                (?![A-Za-z])
            |\\(?:[lL]arge|LARGE|[hH]uge|bf|it|sl|sf|tt|bfseries|itshape|boldmath|normalfont)(?![A-Za-z])
            |\\(?:hline|strut|mathstrut|null|relax|neg(?:thin|med|thick)space|underline)(?![A-Za-z])
            |\\(?:text)?color(?:box)?[ ]?(?:\[[^\[\]]*\])?[ ]?\{{[^{{}}]*\}}
            |\\[hv]?phantom[ ]?\{{[^{{}}]*\}}
        )[ ]*
    )
    """,
    re.VERBOSE,
)
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,[ ]*\\!)[ ]*(?=[0-9]{3}(?![0-9]))")
"""Thousands separator: TeX sets no space after this comma, unlike a list's."""
_DECIMALS = re.compile(r"\.(?:[0-9]{3}\\, ?)+[0-9]{1,3}(?![0-9])")
"""Decimals with thin spaces: 0.123\\,45 is one number."""
_COMMA = re.compile(r"\{,\} *")
_BEFORE_GROUP = re.compile(r"(\\[A-Za-z]+) +(?=\{)|(\\\$) +(?=[0-9.])")
_COMMAND_AT_END = re.compile(r"\\[A-Za-z]+\Z")
_LONGEST_COMMAND = 30
_NESTED = 8
"""Maximum number of nested groups that are removed, one pass each."""


def without_layout(text: str) -> str:
    """Return the text with plain spaces and without commands that only change its look."""
    text = _DECIMALS.sub(lambda match: re.sub(r"\\, ?", "", match[0]), _THOUSANDS.sub("", text))
    text = _LAYOUT.sub(_plain, text)
    return _BEFORE_GROUP.sub(r"\1\2", _COMMA.sub(",", re.sub(" {2,}", " ", text)))


def _plain(match: re.Match[str]) -> str:
    if match["row"]:
        return "\\\\"
    if match["space"]:
        return " "
    before = match.string[max(0, match.start() - _LONGEST_COMMAND) : match.start()]
    following = match.string[match.end() : match.end() + 1]
    return " " if following.isalpha() and _COMMAND_AT_END.search(before) else ""


def without_braces(text: str) -> str:
    """Strip braces that enclose the whole text."""
    for _ in range(_NESTED):
        if not (text[:1] == "{" and text[-1:] == "}" and text[1:-1].strip() and _is_group(text)):
            break
        text = text[1:-1].strip()
    return text


def _is_group(text: str) -> bool:
    """Return True if the first brace is closed by the last one."""
    depth, position = 0, 0
    while position < len(text):
        if text[position] == "\\":
            position += 2
            continue
        depth += (text[position] == "{") - (text[position] == "}")
        position += 1
        if depth == 0:
            return position == len(text)
    return False
