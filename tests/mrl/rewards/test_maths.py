"""The maths verifier on real ground truths, equal and unequal forms, and every attack."""

import random
import time
from pathlib import Path

import pytest

from mrl.errors import DataError
from mrl.rewards.kinds.maths import Maths
from mrl.rewards.kinds.reward_section import KindPart
from mrl.rewards.maths.maths_rules import MathsRules
from mrl.rewards.maths.maths_verifier import parse_maths_ground_truth, verify_exactly, verify_symbolically
from mrl.rewards.maths.numbers import exact_number, normalise_answer
from mrl.rewards.maths.symbolic import RAISED, compare
from mrl.samples import Verdict, VerdictKind
from tests import data_sets

RULES = MathsRules()


def verify(response: str, ground_truth: str, rules: MathsRules = RULES) -> Verdict:
    """Return the verdict of both stages in this process; the gate makes it safe for these cases."""
    return verify_exactly(response, ground_truth, rules) or verify_symbolically(response, ground_truth, rules)


def value(answer: str, ground_truth: str) -> float | None:
    verdict = verify(f"\\boxed{{{answer}}}", ground_truth)
    assert verdict.kind is VerdictKind.SCORED
    return verdict.value


def test_all_gsm8k_ground_truths_score_one_and_shifted_ones_zero() -> None:
    solutions = [row["answer"] for row in data_sets.rows("gsm8k")]
    assert len(solutions) == (8792 if data_sets.WHOLE else 128)
    ground_truths = [
        parse_maths_ground_truth(s.rpartition("####")[2], rules=RULES, place="x") for s in solutions
    ]
    unshifted = [verify_exactly(s, g, RULES) for s, g in zip(solutions, ground_truths, strict=True)]
    assert all(v is not None and v.value == 1.0 for v in unshifted)
    shifted = ground_truths[1:] + ground_truths[:1]
    different = [
        (s, g) for s, g, own_ground_truth in zip(solutions, shifted, ground_truths, strict=True)
        if exact_number(normalise_answer(g)) != exact_number(normalise_answer(own_ground_truth))
    ]  # fmt: skip
    assert len(different) > 0.966 * len(solutions)
    verdicts = [verify_exactly(s, g, RULES) for s, g in different]
    assert all(v is not None and v.value == 0.0 for v in verdicts)


EQUAL = [
    ("\\frac{1}{2}", "0.5"), ("2\\sqrt{2}", "\\sqrt{8}"), ("1+x", "x+1"), ("\\pi/2", "\\frac{\\pi}{2}"),
    ("sqrt(2)/2", "\\frac{\\sqrt{2}}{2}"), ("\\{2,1\\}", "\\{1,2\\}"), ("(1, 2)", "(1,2)"),
    ("[1, 2)", "[1,2)"), ("1024", "2^{10}"), ("x>1", "1<x"), ("x = 5", "x=5"), ("(A)", "A"),
    ("\\text{(B)}", "B"), ("\\text{yes}", "Yes"), ("90^\\circ", "90"), ("(x-1)(x+1)", "x^2-1"),
    ("(-\\infty, 3]", "(-\\infty,3]"), ("5!", "5!"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ("\\sin(x)", "\\sin x"), ("(\\text{A})", "A"), ("\\mathbf{B}", "B"), ("\\text{April 5}", "April 5"),
    ("\\text{5}", "5"), ("x=5", "5"), ("5", "x=5"), ("x=\\frac12", "\\frac12"),
    ("x=1 \\text{ or } x=-2", "1,-2"), ("x>1", "(1,\\infty)"), ("1\\le x<2", "[1,2)"),
    ("x\\in[1,2)", "[1,2)"), ("[1,2)", "x\\in[1,2)"), ("\\frac{\\sqrt3}{2}", "\\sin 60^\\circ"),
    ("\\sin 60^\\circ", "\\frac{\\sqrt3}{2}"), ("-q+p", "p - q"), ("\\frac{n!}{k!(n-k)!}", "\\binom{n}{k}"),
    ("\\frac{\\pi}{2}\\text{ radians}", "90^\\circ"), ("3 PM", "3 pm"), ("3 p.m.", "3 PM"),
    ("10:30am", "10:30 a.m."), ("0.123\\,45", "0.12345"), ("\\underline{5}", "5"), ("5\\\\", "5"),
    ("\\frac{37m}{4}", "\\frac{37}{4} m"), ("I(0) e^{-\\frac{t}{R} C}", "I(0) e^{-t/RC}"), ("s\\,m", "m  s"),
    ("h b", "b h"), ("\\frac{h}{2} b", "\\frac12 b h"), ("\\sqrt2", "\\sqrt2 m"), ("x", "x m/s"),
]  # fmt: skip

UNEQUAL = [
    ("\\frac{1}{3}", "0.333"), ("\\sqrt{7}", "\\sqrt{8}"), ("x+2", "x+1"), ("(2,1)", "(1,2)"),
    ("(1,2)", "[1,2)"), ("B", "A"), ("A, B", "A"), ("AB", "A"), ("no", "yes"), ("y+1", "x+1"),
    ("\\{1,2,3\\}", "\\{1,2\\}"), ("x<1", "x>1"), ("x=6", "5"), ("5=x+1", "5"), ("x=y", "5"), ("5=5", "5"),
    ("3=2", "2"), ("1=2=3=2", "2"), ("1 \\lor 2", "2"), ("1 \\to 2", "2"), ("1 \\Rightarrow 2", "2"),
    ("2,3", "2"), ("2 or 3", "2"), ("2;3", "2"), ("\\pm 2", "2"), ("2|3", "2"), ("x", "2"),
    ("x\\ge1", "(1,\\infty)"), ("x=2\\cdot 3", "6"), ("1\\le x\\le 2", "[1,2)"), ("q-p", "p-q"),
    ("\\sin 30^\\circ", "\\frac{\\sqrt3}{2}"), ("\\_", "2"), ("\\text{two}", "2"), ("\\infty", "2"),
    ("\\frac{0}{0}", "0"), ("1/0", "0"), ("0/0", "1"), ("\\emptyset", "2"), ("2 2", "4"), ("[2", "2"),
    ("\\int_0^2 1 dx", "2"), ("\\sum_{n=1}^{2} 1", "2"), ("\\lim_{x\\to 0} 2", "2"), ("\\binom{2}{1}", "2"),
    ("2!", "2"), ("\\text{April 6}", "April 5"), ("2:3", "3:2"), ("2^{10}", "1024"), ("\\mathbb{R}", "2"),
    ("?", "2"), ("*", "2"), ("3 AM", "3 pm"), ("0", "I(0) e^{-t/RC}"), ("5 I(0)", "I(0) e^{-t/RC}"),
    ("0.12345", "0.123,45"), ("\\frac{37n}{4}", "\\frac{37}{4} m"), ("m", "m s"), ("b", "b h"),
    ("\\frac12 b", "\\frac12 b h"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "ground_truth"), EQUAL)
def test_equal_forms_score_one(answer: str, ground_truth: str) -> None:
    assert value(answer, ground_truth) == 1.0


@pytest.mark.parametrize(("answer", "ground_truth"), UNEQUAL)
def test_unequal_forms_and_hedges_score_zero(answer: str, ground_truth: str) -> None:
    assert value(answer, ground_truth) == 0.0


BOMBS = {
    "nested powers": "9^{9^{9^{9}}}", "tower without braces": "9^9^9^9", "python powers": "9**9**9**9",
    "parenthesised tower": "((9^9)^9)^9" + "^9" * 20, "large exponent": "2^{100000000}",
    "factorial tower": "100000!!!", "large factorial": "10000000!", "sum": "\\sum_{n=1}^{10^9} n",
    "product": "\\prod_{n=1}^{10^9} n", "integral": "\\int_0^1 e^{x^{x^x}} dx",
    "binomial": "\\binom{10^9}{10^8}", "many terms": "+".join(["1"] * 100_000),
    "nested braces": "{" * 100_000 + "1" + "}" * 100_000,
    "nested fractions": "\\frac{1}{" * 30 + "1" + "}" * 30, "digits": "1" * 1_000_000,
    "spaces": "1" + " " * 300 + "x", "commas": "," * 399, "backslashes": "\\" * 399,
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_at_once(name: str) -> None:
    start = time.process_time()
    assert value(BOMBS[name], "3") == 0.0
    assert time.process_time() - start < 0.5


PIECES = (
    r"1 2 10 x y \frac { } ( ) [ ] ^ _ + - * / = < \sin \sqrt \pi e i , \{ \} | ! \cup \in \infty \text{km} "
    r"\text{or} ^\circ \begin{pmatrix} \end{pmatrix} & \\ \overline 0. \pm \log_ \binom n 1e5 % \le \ln ' "
    r"\lfloor or and \max _2 \vec 9999"
)
TRUTHS = [
    "5", "x+1", "\\sqrt2", "\\{1,2\\}", "(1,2)", "x=5", "y=2x", "x>1", "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
    "10 km", "1011_2", "2+3i", "\\frac{\\pi}{2}", "(-\\infty,1)\\cup(2,3)", "x=1 or x=2", "n!", "90^\\circ",
    "1,2",
]  # fmt: skip


def test_no_text_makes_the_comparison_raise_or_take_long() -> None:
    numbers, pieces = random.Random(0), PIECES.split()
    start = time.process_time()
    for _ in range(4000):
        ground_truth = numbers.choice(TRUTHS)
        soup = "".join(numbers.choices(pieces, k=numbers.randint(1, 12)))
        verdict = compare(normalise_answer(numbers.choice(("", ground_truth)) + soup), ground_truth, RULES)
        assert not verdict.reason.startswith(RAISED), f"{soup} for {ground_truth}: {verdict.reason}"
    assert time.process_time() - start < 40.0


CODE = [
    "__import__('os').system('touch {canary}')", "open('{canary}','w')", "(lambda: open('{canary}','w'))()",
    "exec(\"open('{canary}','w')\")", "().__class__.__base__", "{{open('{canary}','w')}}",
    "x:=open('{canary}','w')", "\\text{{open('{canary}','w')}}", "\uff4fpen('{canary}','w')",
    "f\"{{open('{canary}','w')}}\"", "\\input{{{canary}}}",
]  # fmt: skip


@pytest.mark.parametrize("template", CODE)
def test_code_in_an_answer_never_runs(template: str, tmp_path: Path) -> None:
    canary = tmp_path / "c"
    assert value(template.format(canary=canary), "3") == 0.0
    assert value(template.format(canary=canary), "x+1") == 0.0
    assert not canary.exists()


@pytest.mark.parametrize("text", ["\\frac{1}{0}", "9^{9^{9}}", "+*/", "\\int_0^1 f(x) dx", "\\sum_n a_n"])
def test_a_ground_truth_that_nothing_reads_is_compared_as_text_and_said(text: str) -> None:
    assert parse_maths_ground_truth(text, rules=RULES, place="f:1") == text
    assert value(text, text) == 1.0 and value("3", text) == 0.0
    assert "compares its text" in Maths(KindPart(kind="maths")).remark(text)
    assert not Maths(KindPart(kind="maths")).remark("x^2+1")


def test_tolerance_rule_and_percent_signs() -> None:
    assert verify("\\boxed{3.14}", "3.141", MathsRules(relative_tolerance=0.01)).value == 1.0
    assert verify("\\boxed{3.14}", "3.141").value == 0.0
    assert verify("\\boxed{10\\%}", "10").value == 1.0
    assert verify("\\boxed{\\sqrt{4}}", "2", MathsRules(symbolic=False)).value == 0.0


def test_the_ground_truth_of_a_solution_is_its_last_box() -> None:
    solution = "First \\boxed{3}, then $x = \\boxed{\\frac{1}{2}}$. " + "And so on. " * 100
    assert parse_maths_ground_truth(solution, rules=RULES, place="f:1") == "\\frac{1}{2}"


@pytest.mark.parametrize("raw", [None, "", "  ", True, [1], {"a": 1}, "so \\boxed{}", "so \\boxed{4"])
def test_unusable_ground_truths_are_named_at_load(raw: object) -> None:
    with pytest.raises(DataError, match=r"file\.jsonl:7"):
        parse_maths_ground_truth(raw, rules=RULES, place="file.jsonl:7")


def test_exact_path_is_fast_enough() -> None:
    responses = [f"Some words of reasoning, {n} of them.\n" * 10 + f"#### {n}" for n in range(2000)]
    start = time.process_time()
    verdicts = [verify_exactly(response, str(n), RULES) for n, response in enumerate(responses)]
    seconds = time.process_time() - start
    assert all(v is not None and v.value == 1.0 for v in verdicts)
    assert 2000 / seconds > 2000, f"{2000 / seconds:.0f} samples/s"
