"""Places of a final answer in a response, and decoys. Equality is the maths generators' subject."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction

from tests.support.verifier_cases.case import Case, Generator

_STEPS = ("We add the two.", "First multiply, then divide.", "So far so good.", "Let me check that again.")
_NO_ANSWER = ("", " ", "...", "\\text{answer}", "your answer", "\\ldots", "ANSWER", "?", "<answer>")
_FORMS = ("\\boxed{{{}}}", "#### {}", "Answer: {}", "<answer>{}</answer>")
_HEADINGS = ("## Answer:", "**Answer:**", "#### Solution", "#### Step 2: multiply", "### Final answer:")
_INSTRUCTIONS = (
    "I have to put my answer in \\boxed{{{0}}}.", '("Put your final answer within \\boxed{{{0}}}.")',
    "Write it as `Answer: [your answer]`.", "Answer: see below.", "<answer> answer here </answer>",
)  # fmt: skip


def places(rng: random.Random) -> Iterator[Case]:
    """Yield answers after thoughts, boxes or headings; and decoys in thoughts, or two answers."""
    while True:
        number = Fraction(rng.randint(-999, 9999), rng.choice((1, 1, 2, 4, 5, 8, 10)))
        wrong = number + rng.choice((1, -1, 10, Fraction(1, 2)))
        make, right, label = rng.choice(_MAKERS)
        yield Case("maths", make(rng, number, wrong), _plain(number), right, label)


def spelled(rng: random.Random, number: Fraction) -> str:
    ways = [_plain(number), f"\\frac{{{number.numerator}}}{{{number.denominator}}}"]
    if number.denominator == 1:
        ways = [_plain(number), f"{number.numerator:,}", f"{number.numerator}.0", f"${number.numerator}$"]
    return rng.choice(ways)


def _plain(number: Fraction) -> str:
    return str(number.numerator) if number.denominator == 1 else f"{float(number)}"


def _marked(rng: random.Random, number: Fraction) -> str:
    text = spelled(rng, number)
    return rng.choice(
        (
            f"So it is \\boxed{{{text}}}.", f"#### {text}", f"Answer: {text}", f"**Answer:** {text}",
            f"<answer>{text}</answer>", f"<answer>\n{text}\n</answer>", f"<answer>\\boxed{{{text}}}</answer>",
            f"<answer>Answer: {text}</answer>",
        )
    )  # fmt: skip


def _thought(rng: random.Random, number: Fraction) -> str:
    return f"{rng.choice(_STEPS)} {_marked(rng, number)}\n{rng.choice(_STEPS)}"


def _after_thought(rng: random.Random, number: Fraction, wrong: Fraction) -> str:
    opening = rng.choice(("<think>", "", "<think>\n", "<think>a</think><think>"))
    return f"{opening}{_thought(rng, rng.choice((number, wrong)))}</think>\n{_marked(rng, number)}"


def _before_open_thought(rng: random.Random, number: Fraction, wrong: Fraction) -> str:
    return f"<think>a</think>{_marked(rng, number)}\n<think>{_thought(rng, wrong)}"


def _among_noise(rng: random.Random, number: Fraction, wrong: Fraction) -> str:
    noise = rng.choice((rng.choice(_INSTRUCTIONS).format(rng.choice(_NO_ANSWER)), rng.choice(_HEADINGS)))
    return f"{noise}\n{rng.choice(_STEPS)}\n{_marked(rng, number)}"


def _twice(rng: random.Random, number: Fraction, wrong: Fraction) -> str:
    form = rng.choice(_FORMS)
    return "\n".join(form.format(spelled(rng, number)) for _ in range(rng.randint(2, 4)))


def _measured(rng: random.Random, number: Fraction, wrong: Fraction) -> str:
    unit = rng.choice((" km", "\\text{ kg}", " hours"))
    both = [f"\\boxed{{{_plain(number)}{rng.choice((unit, ''))}}}" for _ in range(2)]
    return ", so ".join([*both, f"\\boxed{{{spelled(rng, number)}}}"])


def _measured_twice(rng: random.Random, number: Fraction, wrong: Fraction) -> str:
    units = rng.sample((" km", " cm", " kg", " hours", " minutes"), 2)
    both = [f"\\boxed{{{_plain(abs(number) + 1)}{unit}}}" for unit in units]
    return " or ".join([*both, f"\\boxed{{{_plain(number)}}}"])


def _under_heading(rng: random.Random, number: Fraction, wrong: Fraction) -> str:
    heading = rng.choice(("**Answer:**", "## Answer:", "Final answer:"))
    return f"{rng.choice(_STEPS)}\n{heading}{rng.choice((chr(10), chr(10) * 2))}{spelled(rng, number)}\n"


def _unclosed(rng: random.Random, number: Fraction, wrong: Fraction) -> str:
    return rng.choice(("", "<think>a</think>", "done\n")) + f"<think>{_thought(rng, number)}"


def _closed_after(rng: random.Random, number: Fraction, wrong: Fraction) -> str:
    return f"{_thought(rng, number)}</think>{rng.choice(('', ' That is all.', _marked(rng, wrong)))}"


def _hedged(rng: random.Random, number: Fraction, wrong: Fraction) -> str:
    form = rng.choice(_FORMS)
    both = [form.format(spelled(rng, number)), form.format(spelled(rng, wrong))]
    rng.shuffle(both)
    return rng.choice(("\n", "\nor\n", "\n" + both[0] + "\n")).join(both)


def _nothing(rng: random.Random, number: Fraction, wrong: Fraction) -> str:
    noise = rng.choice((rng.choice(_HEADINGS), f"\\boxed{{{rng.choice(_NO_ANSWER)}}}", "Answer: see above"))
    return f"{rng.choice(_STEPS)} {_plain(number)} it is.\n{noise}\n{rng.choice(_STEPS)}"


_MAKERS = (
    (_after_thought, True, "after the last thought"),
    (_before_open_thought, True, "before a thought that stays open"),
    (_among_noise, True, "beside an instruction or heading"), (_twice, True, "twice, equal"),
    (_measured, True, "with its unit and without"), (_measured_twice, False, "with two units"),
    (_under_heading, True, "in the line under its heading"),
    (_unclosed, False, "in a thought that stays open"), (_closed_after, False, "in a thought alone"),
    (_hedged, False, "two different answers"), (_nothing, False, "no answer but a heading or an empty box"),
)  # fmt: skip

GENERATORS: dict[str, Generator] = {"maths: where the answer stands": places}
