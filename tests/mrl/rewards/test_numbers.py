"""Golden cases of exact numbers, of texts that are not numbers, and of slow inputs."""

import time
from fractions import Fraction

import pytest

from mrl.rewards.maths.numbers import exact_number, normalise_answer

NUMBERS = {
    "42": 42, "-7": -7, "+7": 7, "\u22127": -7, "007": 7, "1,234": 1234, "1,234,567.5": Fraction(2469135, 2),
    "1 234": 1234, "1\\,234": 1234, "1{,}234": 1234, "1.234": Fraction(617, 500), "0.50": Fraction(1, 2),
    ".5": Fraction(1, 2), "5.": 5, "1/2": Fraction(1, 2), "-3/6": Fraction(-1, 2),
    "\\frac{3}{4}": Fraction(3, 4), "\\dfrac{3}{4}": Fraction(3, 4), "-\\frac{3}{4}": Fraction(-3, 4),
    "\\frac{-3}{4}": Fraction(-3, 4), "-\\frac{-3}{4}": Fraction(3, 4), "\\frac34": Fraction(3, 4),
    "1e3": 1000, "4.5e33": 45 * 10**32, "4.5 \\times 10^{33}": 45 * 10**32,
    "1.5\\cdot 10^{-3}": Fraction(3, 2000), "-3 \u00d7 10^5": -300_000, "10^6": 10**6, "5 million": 5_000_000,
    "5 million dollars": 5_000_000, "0.\\overline{3}": Fraction(1, 3), "\\frac 1 2": Fraction(1, 2),
    "60\\text{ km/h}": 60, "12 square feet": 12, "90^\\circ": 90, "$18": 18, "\\$18": 18, "$\\$18.00$": 18,
    "\\(18\\)": 18, "-$5": -5, "18 dollars": 18, "18 \\text{ cm}": 18, "10%": 10, "10\\%": 10, "**12**": 12,
    "12.": 12,
}  # fmt: skip

NO_NUMBERS = [
    "", "-", ".", "e5", "1,23", "12,34", "1 1/2", "1/0", "\\frac{1}{0}", "1_000", "5 or 6", "5 and 6", "5, 6",
    "5;6", "5 thousands", "5 dozens", "5y", "5 y", "4b", "1+2m", "5 xyz", "2e-1", "5 squared", "x", "5x+1",
    "2^3", "1e9999", "0x10", "\u0665", "\uff15", "five", "nan", "inf", "5 pi", "\\text{5}", "--5", "5-",
    "1/2/3", "\\frac{1}{2}3", "((5))", "True", "__import__('os')", "5\x00", "9" * 301,
]  # fmt: skip


@pytest.mark.parametrize("text", NUMBERS)
def test_numbers_are_read_exactly(text: str) -> None:
    assert exact_number(normalise_answer(text)) == NUMBERS[text]


@pytest.mark.parametrize("text", NO_NUMBERS, ids=ascii)
def test_what_is_not_plainly_one_number_is_none(text: str) -> None:
    assert exact_number(normalise_answer(text)) is None


def test_a_percent_sign_is_dropped() -> None:
    assert exact_number("10%") == 10


@pytest.mark.parametrize(
    "piece",
    [" ", ",", "1,", "1 ", "\\", "\\,", "{", "\\frac{", "0", "-", "a ", "\\text{", "$", "/1"]
    + ["\\phantom{", "\\color[", "\\\\[1", "\\hspace{a}", "\\! ", "\\large ", ".123\\,", "1{,}", "\\a {"],
)
def test_time_grows_no_faster_than_the_length(piece: str) -> None:
    text = piece * (20_000 // len(piece))
    start = time.process_time()
    exact_number(normalise_answer(text))
    normalise_answer("{" * 1_000 + "1" + "}" * 1_000)
    assert time.process_time() - start < 0.2, "a pattern backtracks"
