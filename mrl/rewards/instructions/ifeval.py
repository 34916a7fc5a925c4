"""Convert instructions of IFEval and RLVR-IFeval into checks.

IFEval        {"instruction_id_list": ["punctuation:no_comma", ...], "kwargs": [{...}, ...]}
RLVR-IFeval   {"func_name": "validate_word_constraint", "N": 50, "quantifier": "at most", ...}

Each name maps to one check of `checks`, with renamed arguments. Sources: the instruction registry of
google-research's instruction_following_eval (Zhou et al., 2023) and open-instruct's if_functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mrl.errors import DataError


@dataclasses.dataclass(frozen=True, slots=True)
class Alias:
    """Check under another name."""

    check: str
    arguments: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Other name's argument -> the check's argument."""
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments that the other name implies."""


_EXACTLY, _AT_LEAST = {"relation": "exactly"}, {"relation": "at_least"}
_THREE_ANSWERS = ["My answer is yes.", "My answer is no.", "My answer is maybe."]

ALIASES: Mapping[str, Alias] = {
    "keywords:existence": Alias("contains_words", {"keywords": "words"}),
    "keywords:frequency": Alias(
        "word_frequency", {"keyword": "word", "frequency": "count", "relation": "relation"}
    ),
    "keywords:forbidden_words": Alias("avoids_words", {"forbidden_words": "words"}),
    "keywords:letter_frequency": Alias(
        "letter_frequency", {"letter": "letter", "let_frequency": "count", "let_relation": "relation"}
    ),
    "language:response_language": Alias("language_letters", {"language": "script"}),
    "length_constraints:number_sentences": Alias(
        "num_sentences", {"num_sentences": "count", "relation": "relation"}
    ),
    "length_constraints:number_paragraphs": Alias(
        "num_divided_parts", {"num_paragraphs": "count"}, {"divider": "***", **_EXACTLY}
    ),
    "length_constraints:number_words": Alias("num_words", {"num_words": "count", "relation": "relation"}),
    "length_constraints:nth_paragraph_first_word": Alias(
        "paragraph_starts_with", {"nth_paragraph": "number", "first_word": "word", "num_paragraphs": "total"}
    ),
    "detectable_content:number_placeholders": Alias(
        "num_placeholders", {"num_placeholders": "count"}, _AT_LEAST
    ),
    "detectable_content:postscript": Alias("has_postscript", {"postscript_marker": "marker"}),
    "detectable_format:number_bullet_lists": Alias("num_bullets", {"num_bullets": "count"}, _EXACTLY),
    "detectable_format:constrained_response": Alias("contains_one_of", fixed={"options": _THREE_ANSWERS}),
    "detectable_format:number_highlighted_sections": Alias(
        "num_highlights", {"num_highlights": "count"}, _AT_LEAST
    ),
    "detectable_format:multiple_sections": Alias(
        "num_sections", {"section_spliter": "splitter", "num_sections": "count"}, _AT_LEAST
    ),
    "detectable_format:json_format": Alias("json_only"),
    "detectable_format:title": Alias("has_title"),
    "combination:two_responses": Alias("two_different_responses"),
    "combination:repeat_prompt": Alias("starts_with", {"prompt_to_repeat": "phrase"}),
    "startend:end_checker": Alias("ends_with", {"end_phrase": "phrase"}),
    "startend:quotation": Alias("quoted"),
    "change_case:capital_word_frequency": Alias(
        "num_capital_words", {"capital_frequency": "count", "capital_relation": "relation"}
    ),
    "change_case:english_capital": Alias("all_upper_case"),
    "change_case:english_lowercase": Alias("all_lower_case"),
    "punctuation:no_comma": Alias("no_commas"),
    "verify_keywords": Alias("contains_words", {"keyword_list": "words"}),
    "verify_keyword_frequency": Alias("word_frequency", {"word": "word", "N": "count"}, _EXACTLY),
    "validate_forbidden_words": Alias("avoids_words", {"forbidden_words": "words"}),
    "verify_letter_frequency": Alias("letter_frequency", {"letter": "letter", "N": "count"}, _EXACTLY),
    "validate_response_language": Alias("language_letters", {"language": "script"}),
    "verify_paragraph_count": Alias("num_divided_parts", {"N": "count"}, {"divider": "* * *", **_EXACTLY}),
    "validate_word_constraint": Alias("num_words", {"N": "count", "quantifier": "relation"}),
    "verify_sentence_constraint": Alias("num_sentences", {"N": "count", "quantifier": "relation"}),
    "validate_paragraphs": Alias(
        "paragraph_starts_with", {"i": "number", "first_word": "word", "N": "total"}
    ),
    "verify_postscript": Alias("has_postscript", {"postscript_marker": "marker"}),
    "validate_placeholders": Alias("num_placeholders", {"N": "count"}, _AT_LEAST),
    "verify_bullet_points": Alias("num_bullets", {"N": "count"}, _EXACTLY),
    "validate_title": Alias("has_title"),
    "validate_choice": Alias("contains_one_of", {"options": "options"}),
    "validate_highlighted_sections": Alias("num_highlights", {"N": "count"}, _AT_LEAST),
    "validate_sections": Alias("num_sections", {"N": "count", "section_splitter": "splitter"}, _AT_LEAST),
    "validate_json_format": Alias("json_only"),
    "validate_repeat_prompt": Alias("starts_with", {"original_prompt": "phrase"}),
    "validate_two_responses": Alias("two_different_responses"),
    "validate_uppercase": Alias("all_upper_case"),
    "validate_lowercase": Alias("all_lower_case"),
    "validate_frequency_capital_words": Alias("num_capital_words", {"N": "count", "quantifier": "relation"}),
    "validate_end": Alias("ends_with", {"end_phrase": "phrase"}),
    "validate_quotation": Alias("quoted"),
    "validate_no_commas": Alias("no_commas"),
}
"""All 25 instructions of IFEval, then the 25 functions of RLVR-IFeval."""

_RELATIONS = {"at least": "at_least", "at most": "at_most", "less than": "at_most", "around": "around"}

_SCRIPTS = {
    "bn": "bengali", "el": "greek", "gu": "gujarati", "he": "hebrew", "kn": "kannada", "ko": "hangul",
    "ml": "malayalam", "pa": "gurmukhi", "ta": "tamil", "te": "telugu", "th": "thai",
}  # fmt: skip
"""Languages (ISO 639-1) whose script no other language of IFEval uses."""


def convert_checks(raw: Mapping[str, Any], *, place: str) -> list[dict[str, Any]] | None:
    """Return a row's checks; None if the row has neither form. Raises DataError for unknown names."""
    names = raw.get("instruction_id_list")
    if names is not None:
        return _instructions(names, raw.get("kwargs"), place)
    if "func_name" in raw:
        arguments = {name: value for name, value in raw.items() if name != "func_name"}
        return [_check(raw["func_name"], arguments, place)]
    return None


def _instructions(names: Any, arguments: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(names, list) or not isinstance(arguments, list) or len(names) != len(arguments):
        raise DataError(
            f"{place}: instruction_id_list and kwargs must be lists of equal length, "
            f"not {str(names)[:80]!r} and {str(arguments)[:80]!r}"
        )
    unknown = sorted({str(name) for name in names} - ALIASES.keys())
    if unknown:
        raise DataError(f"{place}: no check implements {', '.join(unknown)}")
    return [_check(name, kwargs or {}, place) for name, kwargs in zip(names, arguments, strict=True)]


def _check(name: str, arguments: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Convert one instruction; drop null arguments, which come from the columns of other instructions."""
    alias = ALIASES.get(name)
    if alias is None:
        raise DataError(f"{place}: no check implements {name}")
    given = {key: _whole(value) for key, value in arguments.items() if value is not None}
    unknown = sorted(given.keys() - alias.arguments.keys())
    if unknown:
        raise DataError(f"{place}: {name} takes the arguments {sorted(alias.arguments)}, not {unknown}")
    check = {"check": alias.check, **alias.fixed, **{alias.arguments[key]: v for key, v in given.items()}}
    if check["check"] == "language_letters":
        check["script"] = _script(check.get("script"), place)
    return _related(check)


def _related(check: dict[str, Any]) -> dict[str, Any]:
    """Convert the check's relation in place; "less than" n becomes "at_most" n - 1."""
    relation, count = check.get("relation"), check.get("count")
    if relation == "less than" and isinstance(count, int):
        check["count"] = count - 1
    if relation in _RELATIONS:
        check["relation"] = _RELATIONS[relation]
    return check


def _script(language: Any, place: str) -> str:
    if language not in _SCRIPTS:
        raise DataError(
            f"{place}: the language {language!r} shares its script with others, so no check recognises it; "
            f"supported: {', '.join(_SCRIPTS)}"
        )
    return _SCRIPTS[language]


def _whole(value: Any) -> Any:
    """Turn a count that a file's columns made a decimal back into an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
