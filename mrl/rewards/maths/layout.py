"""What LaTeX sets and nobody reads: spacing, sizes, colours, the height of brackets, the distance of rows.

One pass from left to right, linear in the length, so that the second backslash of a row's end begins nothing.
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
            |\\(?:(?:display|text|script|scriptscript)style|tiny|scriptsize|footnotesize|small|normalsize)(?![A-Za-z])
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
"""A comma that is no list's: TeX sets no space after it."""
_DECIMALS = re.compile(r"\.(?:[0-9]{3}\\, ?)+[0-9]{1,3}(?![0-9])")
"""0.123\\,45 is one number: decimals have no commas."""
_COMMA = re.compile(r"\{,\} *")
_BEFORE_GROUP = re.compile(r"(\\[A-Za-z]+) +(?=\{)|(\\\$) +(?=[0-9.])")
_COMMAND_AT_END = re.compile(r"\\[A-Za-z]+\Z")
_LONGEST_COMMAND = 30
_NESTED = 8
"""Groups around each other that are taken away: each is a pass."""


def without_layout(text: str) -> str:
    """Return the text with one kind of space, and without what only changes how it looks."""
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
    """Return what a group holds that is all of the text; braces set nothing."""
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
