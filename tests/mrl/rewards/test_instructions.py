"""Every instruction check, satisfied and violated, and rows that name checks wrongly."""

import functools
import time
from typing import Any

import pytest

from mrl.errors import DataError
from mrl.rewards.instructions.checks import CHECKS
from mrl.rewards.instructions.instruction_rules import InstructionRules
from mrl.rewards.instructions.instruction_verifier import Check, parse_checks, verify_instructions
from mrl.rewards.instructions.plain_text import VisibleResponse

POEM = "First line here.\n\nSecond part, with *stress* and **bold**.\n\nP.S. done"

CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "num_words": ({"relation": "exactly", "count": 3}, "one two three", "one two"),
    "num_sentences": ({"relation": "at_least", "count": 2}, "A cat. A dog!", "A cat."),
    "num_paragraphs": ({"relation": "exactly", "count": 3}, POEM, "one\ntwo"),
    "num_divided_parts": ({"divider": "***", "relation": "exactly", "count": 2}, "a\n\nb\n***\nc",
        "a\n***\n***\nb"),
    "num_lines": ({"relation": "at_most", "count": 2}, "a\n\nb", "a\nb\nc"),
    "num_characters": ({"relation": "at_most", "count": 5}, " abcde ", "abcdef"),
    "num_bullets": ({"relation": "exactly", "count": 2}, "* a\n- b", "* a"),
    "num_numbered_items": ({"relation": "exactly", "count": 2}, "1. a\n2) b", "1.a"),
    "num_sections": ({"relation": "at_least", "count": 1}, "# Title\ntext", "text # no"),
    "num_highlights": ({"relation": "exactly", "count": 2}, POEM, "plain"),
    "num_placeholders": ({"relation": "at_least", "count": 1}, "Dear [name]", "Dear []"),
    "num_capital_words": ({"relation": "exactly", "count": 1}, "I say NO", "I say no"),
    "letter_frequency": ({"letter": "q", "relation": "at_least", "count": 2}, "Quiet queen", "quiet"),
    "word_frequency": ({"word": "cat", "relation": "exactly", "count": 2}, "Cat and cat, catalogue", "cat"),
    "contains_words": ({"words": ["red fox", "den"]}, "A Red Fox in its den.", "A red fox in Denmark"),
    "avoids_words": ({"words": ["bad"]}, "a badge", "a BAD day"),
    "starts_with": ({"phrase": "Dear"}, "Dear you", "Hello Dear"),
    "ends_with": ({"phrase": "Bye."}, "text Bye.\n", "Bye. text"),
    "all_lower_case": ({}, "only small, 3", "Big"),
    "all_upper_case": ({}, "ONLY BIG, 3", "ONLY big"),
    "no_commas": ({}, "no such sign", "one, two"),
    "json_only": ({}, '```json\n{"a": [1]}\n```', 'here: {"a": 1}'),
    "quoted": ({}, '"all of it"', '"part" of it'),
    "has_title": ({}, "<<A title>>\ntext", "<A title>"),
    "has_postscript": ({"marker": "P.S."}, POEM, "text P.S."),
    "paragraph_starts_with": ({"number": 2, "word": "second"}, POEM, "Second\n\nthird"),
    "one_of": ({"options": ["yes", "no"]}, " yes ", "yes and no"),
    "contains_one_of": ({"options": ["Yes.", "No."]}, "No. Never.", "Nothing."),
    "two_different_responses": ({}, "one\n******\ntwo", "one\n******\none"),
    "language_letters": ({"script": "cyrillic"}, "\u043f\u0440\u0438\u0432\u0435\u0442 42", "hello"),
}  # fmt: skip


def test_every_check_has_a_case_and_there_are_twenty() -> None:
    assert set(CASES) == set(CHECKS)
    assert len(CHECKS) >= 20


@pytest.mark.parametrize("name", CASES)
def test_check_holds_and_fails(name: str) -> None:
    arguments, good, bad = CASES[name]
    checks = parse_checks([{"check": name, **arguments}], place="rows:1")
    assert verify_instructions(good, checks).value == 1.0
    assert verify_instructions(bad, checks).value == 0.0
    assert verify_instructions("", checks).value == 0.0, "an empty response passes nothing"


@functools.cache
def long_reading(piece: str) -> VisibleResponse:
    return VisibleResponse(piece * (100_000 // len(piece)))


PIECES = (
    "* ", "[", "**", "<<", "\n\n", "a. ", " ", "A,", "{", "*a", "`a", "&a", "<!--", "\u0301\u0323",
    "\u0430",
)  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
def test_plain_text_is_linear(piece: str) -> None:
    start = time.process_time()
    assert len(long_reading(piece).prose) <= 100_000
    assert time.process_time() - start < 2.0, f"slow on {piece!r}"


@pytest.mark.parametrize("name", CASES)
def test_checks_are_linear(name: str) -> None:
    arguments = CASES[name][0]
    for piece in PIECES:
        reading = long_reading(piece)
        assert len(reading.prose) <= 100_000
        start = time.process_time()
        CHECKS[name](reading, **arguments)
        assert time.process_time() - start < 2.0, f"{name} is slow on {piece!r}"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("a<b and c>d", "a<b and c>d"), ("<<b>>", "<<b>>"), ("snake_case_name", "snake_case_name"),
        ("2 * 3 * 4", "2 * 3 * 4"), ("* * *", "* * *"), ("**Bold *it* more**", "Bold it more"),
        ("- *item*", "- item"), ("u\u0308ber", "\u00fcber"),
        ("\u043f\u0440\u0438\u0432\u0435\u0442 \u0430", "\u043f\u0440\u0438\u0432\u0435\u0442 \u0430"),
        ("\ufdfa", "\ufdfa"),
    ],
)  # fmt: skip
def test_what_is_seen_of_a_text(text: str, seen: str) -> None:
    assert VisibleResponse(text).prose == seen


def test_checks_are_composed() -> None:
    checks = (Check("no_commas", {}), Check("num_words", {"relation": "at_most", "count": 3}))
    assert verify_instructions("three short words", checks).value == 1.0
    half = verify_instructions("four words, not three", checks, InstructionRules(partial=True))
    assert half.value == 0.0
    half = verify_instructions("four words not three", checks, InstructionRules(partial=True))
    assert half.value == 0.5
    assert half.parts == {"0.no_commas": 1.0, "1.num_words": 0.0}
    assert "num_words" in half.reason


def test_checks_may_be_json_text() -> None:
    assert parse_checks('{"check": "no_commas"}', place="rows:1") == (Check("no_commas", {}),)


@pytest.mark.parametrize(
    "raw",
    [
        "no_commas", "[{", [], [{"name": "no_commas"}], [{"check": "no_comma"}], [{"check": "num_words"}],
        [{"check": "num_words", "relation": "about", "count": 3}],
        [{"check": "num_words", "relation": "exactly", "count": "3"}], [{"check": "no_commas", "count": 3}],
        [{"check": "contains_words", "words": "cat"}], [{"check": "starts_with", "phrase": ""}],
    ],
    ids=str,
)  # fmt: skip
def test_bad_rows_are_named(raw: Any) -> None:
    with pytest.raises(DataError, match="rows:9"):
        parse_checks(raw, place="rows:9")
