"""Symbolic comparison of two answers with math-verify, behind a gate. Runs only in a process that can be
killed.

The gate is a grammar of what an answer may look like given the ground truth: commands, letters and relations
must occur in the ground truth or be on a short list, and sizes are capped before any parser sees the text.
No parser that evaluates Python is used (math-verify's plain-expression reader is one and is left out).
Direction is fixed: ground truth first.
"""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

from mrl.config.sections.reward import MathsRules
from mrl.rewards.contract import scored
from mrl.rewards.maths.numbers import tidy
from mrl.samples import Verdict

MAX_NESTING = 12
MAX_DIGIT_RUN = 30
MAX_OPERATORS = 80
MAX_POWERS = 8
MAX_EXPONENT = 1000
MAX_NODES = 300

_ALWAYS = frozenset(
    [
        "frac",
        "sqrt",
        "pi",
        "cdot",
        "times",
        "div",
        "sin",
        "cos",
        "tan",
        "sec",
        "csc",
        "cot",
        "arcsin",
        "arccos",
        "arctan",
        "log",
        "ln",
        "exp",
        "circ",
        "degree",
    ]
)
_ORDER = frozenset(["le", "ge", "leq", "geq", "lt", "gt", "leqslant", "geqslant"])
_WORDS = {"sqrt", "pi"}
_RELATIONS = ("=", "<", ">", ",", ";", "|", "!", "&", ":", "_", "[", "]")
_COMMAND = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL)
_LETTERS = re.compile(r"[A-Za-z]+")
_ALLOWED = re.compile(r"[0-9A-Za-z+\-*/^_(){}\[\],.;:|!=<>&%' \\]*")
_TEXT = re.compile(r"(?:\\(?:text|textbf|mathrm|textrm|mbox)\{ ?)?\(?([A-Za-z][A-Za-z '\-]*)\)?(?: ?\})?")


def compare(answer: str, ground_truth: str, rules: MathsRules) -> Verdict:
    """Verdict on a tidied answer that is not plainly a number, or whose ground truth is not."""
    word = text_answer(ground_truth)
    if word is not None:
        right = text_answer(answer) == word
        return scored(float(right), "same text" if right else "other text")
    objection = gate(answer, ground_truth)
    if objection:
        return scored(0.0, objection)
    try:
        parsed = parse(answer)
    except Exception as error:  # a parser's refusal of text that is no mathematics is the sample's fault
        return scored(0.0, f"not readable as mathematics ({type(error).__name__})")
    parsed_ground_truth = parse(ground_truth)
    objection = _shape_objection(parsed, parsed_ground_truth)
    if objection:
        return scored(0.0, objection)
    from math_verify import verify

    # timeout_seconds=None: math-verify's own limit is an alarm signal; ours is the process' deadline.
    right = bool(verify(parsed_ground_truth, parsed, timeout_seconds=None))
    return scored(float(right), "equal" if right else "not equal")


def text_answer(text: str) -> str | None:
    """A word answer (choice letter, yes/no, a name) in lower case; None for mathematics, where one small
    letter is a variable."""
    match = _TEXT.fullmatch(text)
    if not match or (len(match[1]) == 1 and match[1].islower()) or match[1] in _WORDS:
        return None
    return " ".join(match[1].lower().split())


def gate(answer: str, ground_truth: str) -> str:
    """Why an answer is not even parsed; empty when it may be."""
    if not _ALLOWED.fullmatch(answer):
        return "characters that no answer needs"
    commands, ground_truth_commands = set(_COMMAND.findall(answer)), set(_COMMAND.findall(ground_truth))
    if ground_truth_commands & _ORDER or re.search("[<>]", ground_truth):
        ground_truth_commands |= _ORDER
    foreign = commands - ground_truth_commands - _ALWAYS - {"{", "}", "%"}
    if foreign:
        return f"command \\{min(foreign)[:20]} that the ground truth does not have"
    plain, ground_truth_plain = _COMMAND.sub("#", answer), _COMMAND.sub("#", ground_truth)
    for sign in _RELATIONS:
        ordered = sign in "<>" and bool(ground_truth_commands & _ORDER)
        if sign in plain and sign not in ground_truth_plain and not ordered:
            return f"{sign!r}: a relation, list or function the ground truth does not have"
    if plain.count(",") != ground_truth_plain.count(",") or plain.count("=") > ground_truth_plain.count("="):
        return "another number of parts than the ground truth"
    letters = set(_LETTERS.findall(plain)) - _WORDS - {"e", "i"}
    extra = {c for run in letters for c in run} - {
        c for run in _LETTERS.findall(ground_truth_plain) for c in run
    }
    if extra or any(len(run) > 4 and run not in ground_truth_plain for run in letters):
        return "free variables or words the ground truth does not have"
    if re.search(r"[0-9] +[0-9.]", plain):
        return "numbers side by side"
    return _size_objection(plain, answer)


def _size_objection(plain: str, answer: str) -> str:
    depth = deepest = 0
    for char in plain:
        depth += (char in "({[") - (char in ")}]")
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        return f"nesting deeper than {MAX_NESTING}"
    if re.search(rf"[0-9]{{{MAX_DIGIT_RUN + 1},}}", plain):
        return f"more than {MAX_DIGIT_RUN} digits in a row"
    if sum(plain.count(sign) for sign in "+-*/^") + answer.count("\\") > MAX_OPERATORS:
        return f"more than {MAX_OPERATORS} operators"
    return _power_objection(answer)


def _power_objection(answer: str) -> str:
    powers = answer.count("^") + answer.count("**")
    if powers > MAX_POWERS:
        return f"more than {MAX_POWERS} powers"
    for match in re.finditer(r"(?:\^|\*\*) *[({]*[-+]?([0-9]+)", answer):
        if int(match[1]) > MAX_EXPONENT:
            return f"exponent above {MAX_EXPONENT}"
    if re.search(r"(?:\^|\*\*)[^+*/,=]{0,40}(?:\^|\*\*)", answer) and powers > 1 and _has_tower(answer):
        return "a power in an exponent"
    for match in re.finditer(r"([0-9]*)[)}]? *!", answer):
        if not match[1] or int(match[1]) > 50:
            return "factorial of something large or unknown"
    return ""


def _has_tower(answer: str) -> bool:
    """True where an exponent holds another power."""
    for match in re.finditer(r"(?:\^|\*\*) *", answer):
        end = _end_of_exponent(answer, match.end())
        if "^" in answer[match.end() : end] or "**" in answer[match.end() : end]:
            return True
        if answer[end : end + 1] == "^" or answer[end : end + 2] == "**":
            return True
    return False


def _end_of_exponent(answer: str, start: int) -> int:
    if answer[start : start + 1] not in ("{", "("):
        return min(start + 1, len(answer))
    depth = 0
    for position in range(start, len(answer)):
        depth += (answer[position] in "({") - (answer[position] in ")}")
        if depth == 0:
            return position + 1
    return len(answer)


@functools.lru_cache(maxsize=512)
def parse(text: str) -> Any:
    """A sympy object from LaTeX. Raises whatever the grammar raises for text that is no mathematics."""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import normalize_latex

    config = NormalizationConfig(
        basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    return latex2sympy(normalize_latex(_as_latex(text), config=config), is_real=True, convert_degrees=False)


def parse_ground_truth(text: str) -> None:
    """Raises ValueError for a ground truth that cannot be compared with; called when data is loaded."""
    ground_truth = tidy(text)
    if not ground_truth:
        raise ValueError("the ground truth is empty")
    if text_answer(ground_truth) is not None:
        return
    objection = _size_objection(_COMMAND.sub("#", ground_truth), ground_truth)
    if objection:
        raise ValueError(objection)
    try:
        parsed = parse(ground_truth)
    except Exception as error:  # the grammar raises several unrelated kinds; all mean the same here
        raise ValueError(
            f"not readable as mathematics ({type(error).__name__}: {str(error)[:120]})"
        ) from error
    objection = _shape_objection(parsed, parsed)
    if objection:
        raise ValueError(objection)


def _as_latex(text: str) -> str:
    """`sqrt(x)` and `pi` as LaTeX commands."""
    text = re.sub(r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi ", text)
    while match := re.search(r"(?<![A-Za-z\\])sqrt *\(", text):
        end = _end_of_exponent(text, match.end() - 1)
        text = f"{text[: match.start()]}\\sqrt{{{text[match.end() : end - 1]}}}{text[end:]}"
    return re.sub(r"(?<![A-Za-z\\])sqrt", r"\\sqrt", text).replace("**", "^")


def _shape_objection(parsed: Any, ground_truth: Any) -> str:
    import sympy

    if not isinstance(parsed, sympy.Basic | sympy.MatrixBase):
        return "not a mathematical object"
    if any(True for _ in itertools.islice(sympy.preorder_traversal(parsed), MAX_NODES, None)):
        return f"more than {MAX_NODES} nodes"
    if parsed.has(sympy.nan, sympy.zoo):
        return "undefined value"
    if parsed.has(sympy.oo, -sympy.oo) and not ground_truth.has(sympy.oo, -sympy.oo):
        return "infinite value"
    if {str(s) for s in parsed.free_symbols} - {str(s) for s in ground_truth.free_symbols}:
        return "free variables the ground truth does not have"
    return ""
