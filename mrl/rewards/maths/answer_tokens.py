"""Split an answer's text into tokens. The list of commands and words is closed; other text is Unreadable."""

from __future__ import annotations

import re
from typing import NamedTuple


class Unreadable(ValueError):
    """The text is not mathematics that this parser supports; the message names the first such part."""


class Token(NamedTuple):
    """Token of a `kind`: number, letter, function, sign, text or name (of \\begin and \\end)."""

    kind: str
    text: str
    spaced: bool = False
    """True if a space is before it."""


MAX_TOKENS = 400
MAX_NESTING = 24

_FUNCTIONS = """
    sin cos tan sec csc cot arcsin arccos arctan arcsec arccsc arccot asin acos atan sinh cosh tanh
    log ln lg exp sqrt abs max min gcd lcm
"""
FUNCTIONS = frozenset(_FUNCTIONS.split())
_LETTERS = """
    alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau
    upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar
"""
_GREEK = frozenset(_LETTERS.split())
_SIGNS = {
    "cdot": "*", "times": "*", "ast": "*", "div": "/", "le": "<=", "leq": "<=", "leqslant": "<=", "ge": ">=",
    "geq": ">=", "geqslant": ">=", "lt": "<", "gt": ">", "ne": "!=", "neq": "!=", "pm": "+-", "in": "in",
    "cup": "cup", "mp": "-+", "infty": "inf", "pi": "pi", "frac": "frac", "binom": "binom", "dbinom": "binom",
    "tbinom": "binom", "circ": "circ", "degree": "degree", "lfloor": "lfloor", "rfloor": "rfloor",
    "lceil": "lceil", "rceil": "rceil", "langle": "langle", "rangle": "rangle", "lbrace": "\\{",
    "rbrace": "\\}", "lbrack": "[", "rbrack": "]", "vert": "|", "lvert": "|", "rvert": "|", "mid": "|",
    "emptyset": "empty", "varnothing": "empty", "overline": "overline", "begin": "begin", "end": "end",
    "prime": "'", "colon": ":", "text": "text", "lor": "or", "vee": "or", "sqrt": "sqrt",
}  # fmt: skip
_FONTS = frozenset(["mathbf", "boldsymbol", "mathit", "mathsf", "mathcal", "bm"])
_ACCENTS = frozenset(["vec", "hat", "bar", "tilde"])
_TEXT = frozenset(
    ["text", "mathrm", "textrm", "mbox", "operatorname", "textbf", "textit", "mathbb", "textup"]
)
_WORDS = {
    "pi": "pi",
    "or": "or",
    "and": "and",
    "infinity": "inf",
    "inf": "inf",
    "oo": "inf",
    "union": "cup",
    "U": "cup",
}
_UNICODE = {
    "\u03c0": "\\pi ", "\u221a": "\\sqrt ", "\u00d7": "\\times ", "\u00b7": "\\cdot ", "\u22c5": "\\cdot ",
    "\u00f7": "/", "\u2264": "\\le ", "\u2265": "\\ge ", "\u2260": "\\ne ", "\u221e": "\\infty ",
    "\u222a": "\\cup ", "\u2208": "\\in ", "\u00b0": "^\\circ ", "\u00b1": "\\pm ", "\u2205": "\\emptyset ",
    "\u2044": "/", "\u2212": "-", "\u00bd": "\\frac12 ", "\u00bc": "\\frac14 ", "\u00be": "\\frac34 ",
    "\u2070": "^{0}", "\u00b9": "^{1}", "\u00b2": "^{2}", "\u00b3": "^{3}", "\u2074": "^{4}",
    "\u2075": "^{5}", "\u2076": "^{6}", "\u2077": "^{7}", "\u2078": "^{8}", "\u2079": "^{9}",
    "\u03b8": "\\theta ", "\u03b1": "\\alpha ", "\u03b2": "\\beta ", "\u03b3": "\\gamma ",
    "\u03bb": "\\lambda ", "\u221b": "\\sqrt[3]", "\u03c6": "\\phi ", "\u27e8": "\\langle ",
    "\u27e9": "\\rangle ",
}  # fmt: skip
_UNICODE_TABLE = str.maketrans(_UNICODE)
_NUMBER = re.compile(
    r"(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3}(?![0-9.]))?"
    r"|1[eE][+-][0-9](?![0-9.])|[0-9]+(?:[eE](?:[0-9]{1,3}|[+-][0-9]{2,3})(?![0-9.]))?"
)
_EXPONENT = re.compile(r"[eE][0-9]")
_COMMAND = re.compile(r"\\([A-Za-z]+|\\|[{}|%$,;:!& ])")
_GROUP = re.compile(r" ?\{([^{}]{0,200})\}")
_RUN = re.compile(r"[A-Za-z]+")
_PLAIN_SIGN = re.compile(r"<=|>=|!=|\*\*|[-+*/^_(){}\[\],;=<>|!&':]")
_THOUSANDS = re.compile(r"(?<![0-9])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")
_OPENS, _CLOSES = ("(", "[", "{", "\\{", "begin"), (")", "]", "}", "\\}", "end")
_PLAIN = {"**": "^", ";": ","}


def tokenise(text: str) -> list[Token]:
    """Return the tokens of a tidy text. Raises Unreadable for unsupported text, and above the limits."""
    if text.count(", ") and _THOUSANDS.search(text):
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    text = text.translate(_UNICODE_TABLE)
    tokens: list[Token] = []
    position, depth = 0, 0
    while position < len(text):
        start = position
        while position < len(text) and text[position] in " $":
            position += 1
        if position == len(text):
            break
        pairs, position = _next(text, position)
        spaced = start < position and text[start] == " "
        tokens += [Token(kind, body, spaced and number == 0) for number, (kind, body) in enumerate(pairs)]
        depth += sum((b in _OPENS) - (b in _CLOSES) for k, b in pairs if k == "sign")
        if len(tokens) > MAX_TOKENS or abs(depth) > MAX_NESTING:
            raise Unreadable("too many tokens or nested brackets")
    return tokens


def _next(text: str, position: int) -> tuple[list[tuple[str, str]], int]:
    char = text[position]
    if char == "\\":
        return _command(text, position)
    if match := _NUMBER.match(text, position):
        if _EXPONENT.match(text, match.end()):
            raise Unreadable("an exponent of ten that is too large")
        return [("number", match[0])], match.end()
    if match := _RUN.match(text, position):
        return _run(match[0]), match.end()
    if match := _PLAIN_SIGN.match(text, position):
        return [("sign", _PLAIN.get(match[0], match[0]))], match.end()
    raise Unreadable(f"character {char!a}")


def _command(text: str, position: int) -> tuple[list[tuple[str, str]], int]:
    match = _COMMAND.match(text, position)
    if not match:
        raise Unreadable("a stray backslash")
    name, end = match[1], match.end()
    if name in FUNCTIONS:
        return [("function", name)], end
    if name in _GREEK:
        return [("letter", name)], end
    if name in _FONTS:
        return [], end
    if name in _TEXT or name in _ACCENTS or name in ("begin", "end"):
        group = _GROUP.match(text, end)
        inner = group[1].strip() if group else ""
        end = group.end() if group else end
        if name in ("begin", "end"):
            return [("sign", name), ("name", inner)], end
        if name in _ACCENTS:
            return [("letter", f"{name} {inner}")], end
        if name != "text" and name not in ("textbf", "mathbb") and _is_one_thing(inner):
            return _run(inner), end
        if inner in ("or", "and"):
            return [("sign", inner)], end
        return [("text", inner if name != "mathbb" else f"mathbb {inner}")], end
    if name in _SIGNS:
        return [("sign", _SIGNS[name])], end
    if name in "{}|\\":
        return [("sign", "\\" + name)], end
    if name in ",;:! &":
        return [], end
    raise Unreadable(f"command \\{name[:20]}")


def _is_one_thing(inner: str) -> bool:
    """Return True for one letter or a function's name: a font command around it is ignored."""
    return inner.isascii() and inner.isalpha() and (len(inner) == 1 or inner in FUNCTIONS)


def _run(run: str) -> list[tuple[str, str]]:
    """Split a run of letters: a word of mathematics, or functions and single letters, which are a product."""
    if run in _WORDS:
        return [("sign", _WORDS[run])]
    pairs: list[tuple[str, str]] = []
    position = 0
    while position < len(run):
        function = next((n for n in _BY_LENGTH if run.startswith(n, position)), "")
        pairs.append(("function", function) if function else ("letter", run[position]))
        position += len(function) or 1
    letters = sum(kind == "letter" for kind, _ in pairs)
    if letters > 4:
        raise Unreadable(f"the unknown word {run[:20]!r}")
    return pairs


_BY_LENGTH = sorted(FUNCTIONS - {"ln", "lg"}, key=len, reverse=True) + ["ln"]
