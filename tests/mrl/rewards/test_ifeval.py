"""Rows in the vocabulary of IFEval and RLVR-IFeval use the matching checks."""

import json
from typing import Any

import pytest

from mrl.errors import DataError
from mrl.rewards.instructions.ifeval import ALIASES
from mrl.rewards.instructions.instruction_verifier import parse_checks, verify_instructions

TALL = "Some WORDS are TALL."

IFEVAL: dict[str, tuple[dict[str, Any], str, str]] = {
    "keywords:existence": ({"keywords": ["fox", "den"]}, "A fox in a den.", "A fox."),
    "keywords:frequency": ({"keyword": "red fox", "frequency": 2, "relation": "at least"},
        "Red fox, red fox!", "A red fox."),
    "keywords:forbidden_words": ({"forbidden_words": ["fox"]}, "A foxy cat.", "A fox."),
    "keywords:letter_frequency": ({"letter": "q", "let_frequency": 2, "let_relation": "less than"}, "Quiet.",
        "Quiet queen."),
    "language:response_language": ({"language": "ta"}, "\u0bb5\u0ba3\u0b95\u0bcd\u0b95\u0bae\u0bcd", "hello"),
    "length_constraints:number_sentences": ({"num_sentences": 2, "relation": "less than"}, "One.",
        "One. Two."),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "a\n\nb\n***\nc", "a\n\nb"),
    "length_constraints:number_words": ({"num_words": 3, "relation": "at least"}, "one two three", "one two"),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"}, "a\n\nSo, b", "a\n\nSo, b\n\nc",
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[a] and [b]", "[a]"),
    "detectable_content:postscript": ({"postscript_marker": "P.P.S"}, "text\n\np.p.s bye", "text P.P.S"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n* b", "* a\n* b\n* c"),
    "detectable_format:constrained_response": ({}, "My answer is no.", "no."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 1}, "*a* and *b*", "a"),
    "detectable_format:multiple_sections": ({"section_spliter": "Section", "num_sections": 2},
        "SECTION 1\na\nSection 2\nb", "Section 1\na"),
    "detectable_format:json_format": ({}, '{"a": 1}', "a: 1"),
    "detectable_format:title": ({}, "<<Foxes>>\ntext", "Foxes"),
    "combination:two_responses": ({}, "a\n******\nb", "a\n******\na"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say it."}, "say it. I do.", "I do. Say it."),
    "startend:end_checker": ({"end_phrase": "Any questions?"}, '"So. any questions?"', "Any questions? No."),
    "startend:quotation": ({}, '"all"', 'all "of it"'),
    "change_case:capital_word_frequency": ({"capital_frequency": 2, "capital_relation": "at least"}, TALL,
        "Some words."),
    "change_case:english_capital": ({}, "ALL", "All"),
    "change_case:english_lowercase": ({}, "all", "All"),
    "punctuation:no_comma": ({}, "a b", "a, b"),
}  # fmt: skip

RLVR: dict[str, tuple[dict[str, Any], str, str]] = {
    "verify_keywords": ({"keyword_list": ["fox"]}, "A fox.", "A cat."),
    "verify_keyword_frequency": ({"word": "fox", "N": 2}, "Fox and fox.", "A fox."),
    "validate_forbidden_words": ({"forbidden_words": ["fox"]}, "A cat.", "A fox."),
    "verify_letter_frequency": ({"letter": "q", "N": 1}, "quiet", "quiet queen"),
    "validate_response_language": ({"language": "ko"}, "\ud55c\uad6d\uc5b4", "hello"),
    "verify_paragraph_count": ({"N": 2}, "a\n* * *\nb", "a\n\nb"),
    "validate_word_constraint": ({"N": 20, "quantifier": "around"}, "w " * 22, "w " * 23),
    "verify_sentence_constraint": ({"N": 3, "quantifier": "around"}, "A. B.", "A."),
    "validate_paragraphs": ({"N": 2, "first_word": "So", "i": 1}, "So it is.\n\nb", "So it is."),
    "verify_postscript": ({"postscript_marker": "P.S."}, "text\nP.S. bye", "text"),
    "validate_placeholders": ({"N": 1}, "[a] [b]", "a"),
    "verify_bullet_points": ({"N": 1}, "- a", "- a\n- b"),
    "validate_title": ({}, "<<a>>", "a"),
    "validate_choice": ({"options": ["yes", "no"]}, "yes, sure", "perhaps"),
    "validate_highlighted_sections": ({"N": 2}, "*a* *b*", "*a*"),
    "validate_sections": ({"N": 1, "section_splitter": "PART"}, "PART 1 a", "PART a"),
    "validate_json_format": ({}, "[1]", "one"),
    "validate_repeat_prompt": ({"original_prompt": "Say."}, "Say. Yes.", "Yes."),
    "validate_two_responses": ({}, "a ****** b", "a"),
    "validate_uppercase": ({}, "A", "a"),
    "validate_lowercase": ({}, "a", "A"),
    "validate_frequency_capital_words": ({"N": 1, "quantifier": "at most"}, "NO", "NO NO"),
    "validate_end": ({"end_phrase": "Bye."}, "So: Bye.", "Bye. So."),
    "validate_quotation": ({}, '"a"', "a"),
    "validate_no_commas": ({}, "a", "a,"),
}


def test_every_name_has_a_case() -> None:
    assert set(IFEVAL) | set(RLVR) == set(ALIASES)
    assert (len(IFEVAL), len(RLVR)) == (25, 25)


@pytest.mark.parametrize("name", IFEVAL)
def test_an_instruction_of_ifeval(name: str) -> None:
    """A parquet row has every instruction's arguments; those of other instructions are null."""
    arguments, good, bad = IFEVAL[name]
    everything = dict.fromkeys([key for other, _, _ in IFEVAL.values() for key in other])
    raw = {"instruction_id_list": [name], "kwargs": [everything | arguments]}
    checks = parse_checks(raw, place="rows:1")
    assert (verify_instructions(good, checks).value, verify_instructions(bad, checks).value) == (1.0, 0.0)


@pytest.mark.parametrize("name", RLVR)
def test_a_function_of_rlvr_ifeval(name: str) -> None:
    arguments, good, bad = RLVR[name]
    everything = dict.fromkeys([key for other, _, _ in RLVR.values() for key in other])
    checks = parse_checks(json.dumps({"func_name": name, **everything, **arguments}), place="rows:1")
    assert (verify_instructions(good, checks).value, verify_instructions(bad, checks).value) == (1.0, 0.0)


def test_a_row_has_one_check_for_each_instruction() -> None:
    raw = {
        "instruction_id_list": ["length_constraints:number_words", "punctuation:no_comma"],
        "kwargs": [{"num_words": 300.0, "relation": "less than"}, None],
    }
    words, commas = parse_checks(raw, place="rows:1")
    assert (words.name, words.arguments) == ("num_words", {"relation": "at_most", "count": 299})
    assert (commas.name, commas.arguments) == ("no_commas", {})


def test_instructions_that_go_together_can_be_followed_together() -> None:
    """IFEval combines lower case with a capitalised closing phrase, and quotes around both."""
    raw = {
        "instruction_id_list": [
            "change_case:english_lowercase", "startend:end_checker", "startend:quotation",
        ],
        "kwargs": [{}, {"end_phrase": "Is there anything else?"}, {}],
    }  # fmt: skip
    assert (
        verify_instructions('"no. is there anything else?"', parse_checks(raw, place="rows:1")).value == 1.0
    )


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"instruction_id_list": ["count:words", "copy:all"], "kwargs": [{}, {}]},
         "implements copy:all, count:words"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "lists of equal length"),
        ({"instruction_id_list": ["punctuation:no_comma"]}, "lists of equal length"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"count": 3}]}, r"not \['count'\]"),
        ({"instruction_id_list": ["startend:end_checker"], "kwargs": [{}]}, r"missing \['phrase'\]"),
        ({"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "de"}]},
         "language 'de'"),
        ({"func_name": "verify_everything"}, "implements verify_everything"),
        ({"func_name": "validate_word_constraint", "N": 3, "quantifier": "nearly"},
         r"invalid type or value: \['relation'\]"),
        ({"func_name": "validate_word_constraint", "N": 0, "quantifier": "less than"}, r"value: \['count'\]"),
    ],
)  # fmt: skip
def test_what_no_check_implements_is_refused_by_name(raw: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=f"rows:9: .*{says}"):
        parse_checks(raw, place="rows:9")
