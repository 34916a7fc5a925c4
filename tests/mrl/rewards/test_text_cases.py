"""Generated cases of the checks that read text: none is misjudged, and a planted fault in each class is caught."""

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from mrl.rewards import visible
from mrl.rewards.instructions import checks, format, plain_text
from mrl.rewards.maths import answers
from mrl.rewards.maths.maths_rules import MathsRules
from tests.support.verifier_cases import instructions as instruction_cases
from tests.support.verifier_cases import places, shapes
from tests.support.verifier_cases.case import take
from tests.support.verifier_cases.judged import misjudged

GENERATORS = places.GENERATORS | instruction_cases.GENERATORS | shapes.GENERATORS
NEVER = re.compile(r"(?!)")


@pytest.mark.parametrize("name", GENERATORS)
def test_no_case_is_misjudged(name: str) -> None:
    assert misjudged(take(GENERATORS[name], 600, seed=1)) == []


def one_place(text: str) -> list[str]:
    answer = answers.final_answer(text, MathsRules())
    return [] if answer.text is None else [answer.text]


def unchanged(text: str, *_: Any) -> str:
    return text


FAULTS: list[tuple[str, ModuleType, str, Any]] = [
    ("maths: where the answer stands", visible, "OPENING", "<never>"),
    ("maths: where the answer stands", answers, "_is_placeholder", lambda text: False),
    ("maths: where the answer stands", answers, "read_answer", unchanged),
    ("maths: where the answer stands", answers, "_HEADING", NEVER),
    ("maths: where the answer stands", answers, "answer_frames", lambda text: []),
    ("maths: where the answer stands", answers, "_ALONE", NEVER),
    ("instructions: words", plain_text, "_EMPHASIS", ()),
    ("instructions: words", plain_text, "_INVISIBLE", NEVER),
    ("instructions: words", plain_text, "_in_latin_letters", unchanged),
    ("instructions: commas", checks, "_COMMAS", re.compile(",")),
    ("instructions: commas", plain_text, "_ENTITY", NEVER),
    ("instructions: nothing to see", plain_text, "_INVISIBLE", NEVER),
    ("instructions: lengths", plain_text, "_INVISIBLE", NEVER),
    ("instructions: lengths", plain_text, "_FRAME", NEVER),
    ("instructions: lengths", checks, "_WORD", re.compile(r"[^\W_]+(?:['-][^\W_]+)*")),
    ("instructions: JSON", checks, "_no_json", lambda constant: None),
    ("instructions: empty marks", checks, "_says_something", bool),
    ("format: one final answer", format, "marked_answers", one_place),
    ("format: tags", format, "plain_text", unchanged),
    ("repetition", format, "_units", lambda response: response.lower().split()),
]


def test_every_class_has_a_fault() -> None:
    assert {name for name, *_ in FAULTS} == set(GENERATORS)


@pytest.mark.parametrize(
    ("name", "module", "attribute", "fault"), FAULTS, ids=[f"{f[0]}, {f[2]}" for f in FAULTS]
)
def test_a_planted_fault_is_caught(
    name: str, module: ModuleType, attribute: str, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, attribute, fault)
    assert misjudged(take(GENERATORS[name], 300, seed=1))
