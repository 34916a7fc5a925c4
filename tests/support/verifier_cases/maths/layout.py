"""LaTeX layouts of equal answers: spacing, sizes, colours, braces, names of a tuple."""

from __future__ import annotations

import random
from collections.abc import Iterator

from mrl.rewards.maths.answer_tokens import FUNCTIONS
from tests.support.verifier_cases.case import Case, Generator
from tests.support.verifier_cases.maths.boxed import boxed

_ANYWHERE = (
    "", "", " ", "  ", "~", "\\,", "\\, ", "\\;", "\\:", "\\>", "\\ ", "\\!", "\\! ", "\\quad ", "\\qquad ",
    "\\thinspace ", "\\hspace{2pt}", "\\hspace*{-1em}", "\\mspace{3mu} ", "\\kern2pt ", "\\displaystyle ",
    "\\textstyle ", "\\large ", "\\Large\n", "\\small ", "\\color{red}", "\\color[rgb]{1,0,0} ",
    "\\phantom{0}", "\\vphantom{x} ", "\\negthinspace ", "\u2009",
)  # fmt: skip
_AROUND = (
    "{}", "{{{}}}", "${}$", "{{\\large {}}}", "\\textcolor{{blue}}{{{}}}", "\\color{{red}}{{{}}}",
    "{{\\color{{red}} {}}}", "\\colorbox{{yellow}}{{${}$}}", "{{${}$}}", "\\displaystyle {}",
    "\\left. {}\\right.",
)  # fmt: skip
_BRACKETS = (
    ("", ""), ("\\left", "\\right"), ("\\bigl", "\\bigr"), ("\\Big", "\\Big"), ("\\Biggl ", "\\Biggr "),
)  # fmt: skip
_ROWS = (
    "\\\\", "\\\\ ", "\\\\[6pt]", "\\\\[0.3em] ", "\\\\ [-1ex]", "\\\\*", "\\\\*[2mm]", "\\cr ",
    "\\\\ \\hline ",
)  # fmt: skip
_THOUSANDS = (",", "{,}", "{,} ", ",\\!", ",\\! ", ", \\!", "\\,", "\\, ", "\\ ")


def set_differently(rng: random.Random) -> Iterator[Case]:
    """Vary the layout of equal and other answers; never three digits after a comma (17,\\! 170)."""
    while True:
        a, b, c = rng.sample(range(2, 60), 3)
        opening, closing = rng.choice(_BRACKETS)
        for shape in (
            "@{a}@", "@\\frac{{{a}}}{{61}}@", "x^2@+@{a}x@-@{b}", "{a}@\\sqrt{{3}}@+@\\pi@", "@{a}@\\pi@ r@",
            "{o}(@{a}@,@{b}@,@{c}@{e})", "{o}\\{{@{a}@,@{b}@{e}\\}}", "{o}[@{a}@,@99@{e})", "x@=@{a}",
            "x@<@{a}@", "x@\\le@ {a}",
        ):  # fmt: skip
            truth, wrong = (shape.format(a=n, b=b, c=c, o="", e="").replace("@", "") for n in (a, a + 1))
            for number, right in ((a, True), (a + 1, False)):
                text = _laid_out(shape.format(a=number, b=b, c=c, o=opening, e=closing), rng)
                yield boxed(text, truth, right, "layout of the answer")
            text = _laid_out(shape.format(a=a, b=b, c=c, o=opening, e=closing), rng)
            yield boxed(truth, text, True, "layout of the ground truth")
            yield boxed(wrong, text, False, "layout of the ground truth")
        yield from _matrices(a, b, c, rng)
        yield from _thousands(rng)


def _laid_out(shape: str, rng: random.Random) -> str:
    parts = shape.split("@")
    return rng.choice(_AROUND).format(
        "".join(part + rng.choice(_ANYWHERE) for part in parts[:-1]) + parts[-1]
    )


def _matrices(a: int, b: int, c: int, rng: random.Random) -> Iterator[Case]:
    truth = f"\\begin{{pmatrix}} {a} & {b} \\\\ {c} & {a} \\end{{pmatrix}}"
    name = rng.choice(("pmatrix", "bmatrix", "smallmatrix", "pmatrix*"))
    argument = "[r]" if name.endswith("*") else ""
    end = rng.choice(("", "\\\\", "\\\\[2pt]"))
    for last, right in ((a, True), (b, False)):
        rows = f"{a}&{b}{rng.choice(_ROWS)}{c}\\,&\\;{last}{end}"
        yield boxed(f"\\begin{{{name}}}{argument}{rows}\\end{{{name}}}", truth, right, "spacing of rows")
    rows = f"{a}&{b}{rng.choice(_ROWS)}{c}&{a}"
    yield boxed(truth, f"\\begin{{bmatrix}}{rows}\\end{{bmatrix}}", True, "spacing of rows")


def _thousands(rng: random.Random) -> Iterator[Case]:
    groups = [str(rng.randint(1, 999)), *(f"{rng.randint(0, 999):03}" for _ in range(rng.randint(1, 3)))]
    number, between = "".join(groups), rng.choice(_THOUSANDS)
    written = between.join(groups)
    yield boxed(number, written, True, "thousands")
    yield boxed(written, number, True, "thousands")
    if between != ",":  # that may be a list
        yield boxed(", ".join(groups[::-1]), written, False, "thousands as a list")
    yield boxed(str(int(number) + 1), written, False, "thousands")


def products(rng: random.Random) -> Iterator[Case]:
    """Yield products of letters with spaces, reordered, with signs; and with another letter or a sum."""
    while True:
        names = rng.sample("abckmnpqrstuvwxyz", rng.randint(2, 4))
        other = rng.choice([n for n in "abckmnpqrstuvwxyz" if n not in names])
        ways = [" ".join(names), "\\cdot ".join(names), "\\,".join(names), "  ".join(names[::-1])]
        joined = "".join(names)
        if len(names) < 4 and joined not in {"any", "sun", "sky"} | FUNCTIONS:  # more of them are a word
            ways.append(joined)
        answer, truth = rng.sample(ways, 2)
        yield boxed(answer, truth, True, "a product with spaces")
        yield boxed(" ".join([*names[1:], other]), truth, False, "another letter")
        yield boxed(" + ".join(names), truth, False, "a sum")
        yield boxed(" ".join([*names, names[0]]), truth, False, "one letter twice")


def named(rng: random.Random) -> Iterator[Case]:
    """Yield tuples and sets with and without names."""
    while True:
        values = rng.sample(range(-20, 60), rng.randint(2, 3))
        names = ["x", "y", "z"][: len(values)]
        turned = values[1:] + values[:1]
        bare, text = _tuple(values), f"({', '.join(names)}) = {_tuple(values)}"
        spelled = ", ".join(f"{n} = {v}" for n, v in zip(names, values, strict=True))
        swapped = f"({', '.join(names[::-1])}) = {_tuple(values[::-1])}"
        for answer, truth in ((text, bare), (bare, text), (spelled, text), (text, spelled), (swapped, text)):
            yield boxed(answer, truth, True, "a named tuple")
        yield boxed(f"({','.join(names)})={_tuple(turned)}", bare, False, "another order in a named tuple")
        yield boxed(f"({','.join(names[::-1])})={bare}", text, False, "names exchanged")
        yield boxed(f"({','.join(names[::-1])})={bare}", bare, False, "names exchanged")
        members = f"\\{{{', '.join(map(str, values))}\\}}"
        for form in ("S = {}", "x \\in {}", "{}"):
            answer, truth = rng.sample([form.format(members), members], 2)
            yield boxed(answer, truth, True, "a named set")
            less = f"\\{{{', '.join(map(str, values[1:]))}\\}}"
            yield boxed(form.format(less), members, False, "a named set without one")


def _tuple(values: list[int]) -> str:
    return f"({', '.join(map(str, values))})"


def short_exponents(rng: random.Random) -> Iterator[Case]:
    """Truths like 1e-5 are numerals; Euler's number in their place is incorrect."""
    while True:
        digit, exponent = rng.randint(1, 9), rng.randint(1, 9)
        truth = f"{digit}{rng.choice('eE')}-{exponent}"
        value = f"0.{'0' * (exponent - 1)}{digit}"
        for text in (
            truth, f"{digit}\\times 10^{{-{exponent}}}", f"{digit}E-{exponent}", f"{digit}e-0{exponent}",
            value, f"\\frac{{{digit}}}{{{10**exponent}}}",
        ):  # fmt: skip
            yield boxed(text, truth, True, "a short exponent")
        euler = 2.718281828459045 * digit - exponent
        for text in (
            f"{digit}e - {exponent}", f"-{exponent} + {digit}e", f"{euler!r}", f"e-{exponent}", value + "1",
            f"{digit}\\times 10^{{{exponent}}}",
        ):  # fmt: skip
            yield boxed(text, truth, False, "Euler's number for a short exponent")
        yield boxed(f"{digit + 1}e-{exponent}", f"{digit + 1}e - {exponent}", True, "Euler's number itself")


def beyond_floats(rng: random.Random) -> Iterator[Case]:
    """Yield numbers beyond floats, with and without a tolerance."""
    while True:
        digits, exponent = rng.randint(1001, 9989), rng.choice((1, -1)) * rng.randint(310, 990)
        truth = f"{digits}\\times 10^{{{exponent}}}"
        near, far = f"{digits * 10 + 1}e{exponent - 1}", f"{digits * 12}e{exponent - 1}"
        yield boxed(near, truth, False, "near, exactly")
        yield boxed(near, truth, True, "near, with a tolerance", relative_tolerance=1e-2)
        yield boxed(far, truth, False, "far, with a tolerance", relative_tolerance=1e-2)
        yield boxed(f"{digits}e{exponent}", truth, True, "the same number", relative_tolerance=1e-2)
        yield boxed(truth, str(digits), False, "for an ordinary number", relative_tolerance=1e-2)
        close, root = f"1.41\\times 10^{{{exponent}}}", f"\\sqrt2\\cdot 10^{{{exponent}}}"
        if rng.random() < 0.1:  # thousands of digits
            yield boxed(close, root, True, "an irrational one", relative_tolerance=1e-2)


GENERATORS: dict[str, Generator] = {
    "maths: layout": set_differently, "maths: products with spaces": products,
    "maths: named tuples and sets": named, "maths: short exponents": short_exponents,
    "maths: beyond floats": beyond_floats,
}  # fmt: skip
