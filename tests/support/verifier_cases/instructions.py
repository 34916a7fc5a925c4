"""Instructions followed and not, hidden by invisible or similar signs, emphasis and padding."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from tests.support.verifier_cases.case import Case, Generator

WORDS = (
    "river", "stone", "lamp", "garden", "window", "paper", "silver", "morning", "copper",
    "violin", "harbour", "winter", "candle", "meadow", "ladder", "orange", "pencil", "forest",
    "bridge", "kettle", "summer", "thunder", "basket", "mirror", "button", "castle", "feather",
    "island", "jacket", "lemon",
)  # fmt: skip
INVISIBLE = "\u200b\u200c\u200d\u00ad\u2060\ufeff\u034f\u180e\ufe0f\U000e0041"
_COMMAS = ("\uff0c", "\ufe50", "\u3001", "\u060c", "\u201a", "&#44;", "&comma;", ",")
_LOOKALIKES = str.maketrans("aeopcyxi", "\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0456")
_FULL_WIDTH = str.maketrans({chr(c): chr(c + 0xFEE0) for c in range(ord("a"), ord("z") + 1)})
_BOLD = str.maketrans({chr(c): chr(c - ord("a") + 0x1D41A) for c in range(ord("a"), ord("z") + 1)})


def sentence(rng: random.Random, words: Sequence[str]) -> str:
    return " ".join(words).capitalize() + rng.choice((".", "!", "?"))


def _some(rng: random.Random, count: int, *, without: str = "") -> list[str]:
    return rng.sample([word for word in WORDS if word != without], count)


def _case(response: str, right: bool, label: str, *checks: dict[str, Any]) -> Case:
    thought = "" if len(response) % 3 else "<think>orange, lemon</think>"
    response = f"<answer>{response}</answer>" if len(response) % 5 == 0 else response
    return Case("instructions", thought + response, list(checks), right, label)


def _disguised(rng: random.Random, word: str) -> tuple[str, str]:
    """Return (a word that still reads the same, the disguise)."""
    cut = rng.randint(1, len(word) - 1)
    return rng.choice(
        (
            (word[:cut] + rng.choice(INVISIBLE) + word[cut:], "signs nobody sees"),
            (f"{word[:cut]}**{word[cut:]}**", "emphasis inside"),
            (f"{rng.choice(('*', '**', '`', '_', '~~'))}{word}", "as it stands"),
            (f"_{word}_", "emphasis around"),
            (f"{word[:cut]}<!-- -->{word[cut:]}", "a comment inside"),
            (f"{word[:cut]}<span class='x'>{word[cut:]}</span>", "a tag inside"),
            (f"{word[:cut]}&#{ord(word[cut])};{word[cut + 1 :]}", "an entity inside"),
            (word.translate(_LOOKALIKES), "letters that look the same"),
            (word.translate(_FULL_WIDTH), "full-width letters"),
            (word.translate(_BOLD), "mathematical letters"),
            ("\u0336".join(word), "struck through"),
            (word.upper(), "in capitals"),
        )
    )


def words(rng: random.Random) -> Iterator[Case]:
    """Yield required or forbidden words, disguised; and words that only contain them."""
    while True:
        word = rng.choice(WORDS)
        others = _some(rng, 8, without=word)
        spelled, how = _disguised(rng, word)
        near = rng.choice((word + "s", "un" + word, word[:-1], word[::-1], word + "ish"))
        for token, there in ((spelled, True), (near, False)):
            text = sentence(rng, others[:4]) + f" The {token} and the {others[5]}."
            label = f"a word: {how if there else 'another one like it'}"
            yield _case(text, there, label, {"check": "contains_words", "words": [word]})
            yield _case(text, not there, label, {"check": "avoids_words", "words": [word]})
            frequency = {"check": "word_frequency", "word": word, "relation": "exactly", "count": 1}
            yield _case(text, there, label, frequency)


def commas(rng: random.Random) -> Iterator[Case]:
    """Yield commas of every script and spelling; and similar signs."""
    while True:
        before, after = " ".join(_some(rng, 4)), " ".join(_some(rng, 4))
        comma = rng.choice(_COMMAS)
        near = rng.choice((";", ".", "'", "\u2019", ":", "\u00b7", " -", "`", "\u00b8"))
        yield _case(f"{before}{comma} {after}", False, f"a comma: {comma!a}", {"check": "no_commas"})
        yield _case(f"{before}{near} {after}", True, f"no comma: {near!a}", {"check": "no_commas"})


def unseen(rng: random.Random) -> Iterator[Case]:
    """Yield responses without visible text, for any instruction."""
    while True:
        nothing = rng.choice(
            (
                "".join(rng.choices(INVISIBLE + " \n\u2800\u3000\u00a0", k=rng.randint(1, 40))),
                f"<think>{sentence(rng, _some(rng, 5))}",
                f"{sentence(rng, _some(rng, 5))}</think>{rng.choice(INVISIBLE)}",
                f"<!-- {sentence(rng, _some(rng, 5))} -->",
                "<b></b>" + "&#8203;" * rng.randint(1, 5),
            )
        )
        instruction = rng.choice(
            (
                {"check": "no_commas"},
                {"check": "avoids_words", "words": [rng.choice(WORDS)]},
                {"check": "num_words", "relation": "at_most", "count": 50},
                {"check": "num_characters", "relation": "at_least", "count": 1},
                {"check": "num_lines", "relation": "at_most", "count": 3},
                {"check": "num_sentences", "relation": "at_most", "count": 3},
            )
        )
        yield Case("instructions", nothing, [instruction], False, f"nothing to see: {instruction['check']}")


def lengths(rng: random.Random) -> Iterator[Case]:
    """Words, characters, sentences and lines counted as a reader counts them, with padding between."""
    while True:
        count = rng.randint(3, 12)
        chosen = _some(rng, count)
        padding = rng.choice(
            ("", rng.choice(INVISIBLE), rng.choice(INVISIBLE) * 9, f" {rng.choice(INVISIBLE)} ")
        )
        text = (padding + rng.choice((" ", "  ", "\n"))).join(chosen)
        exactly: dict[str, Any] = {"check": "num_words", "relation": "exactly", "count": count}
        yield _case(text, True, "words", exactly)
        yield _case(text, False, "words, one more", {**exactly, "count": count + 1})
        chained = rng.choice("-'\u2011\u2019_").join(chosen)
        yield _case(chained, False, "words chained", {**exactly, "relation": "at_most", "count": count - 1})
        seen = len(" ".join(chosen))
        letters = {"check": "num_characters", "relation": "exactly", "count": seen}
        marks = "".join(c + rng.choice(("", "\u0323")) for c in " ".join(chosen))
        yield _case(padding.strip().join(marks), True, "characters", letters)
        yield _case(
            text + padding * 30 + " " * 40, False, "characters, padded", {**letters, "count": seen + 20}
        )
        sentences = [sentence(rng, _some(rng, 3)) for _ in range(count)]
        if rng.random() < 0.5:
            sentences = [f'"{s}"' if rng.random() < 0.3 else f"**{s}**" for s in sentences]
        instruction = {"check": "num_sentences", "relation": "exactly", "count": count}
        yield _case(" ".join(sentences), True, "sentences", instruction)
        yield _case(
            " ".join(sentences) + " ... ! .",
            False,
            "sentences, one more",
            {**instruction, "count": count + 1},
        )
        lines = f"\n{rng.choice(INVISIBLE + ' ')}\n".join(chosen)
        yield _case(lines, True, "lines", {"check": "num_lines", "relation": "exactly", "count": count})
        han = "".join(
            rng.choices("\u4eca\u65e5\u5929\u6c14\u5f88\u597d\u6211\u4eec\u53bb\u516c\u56ed", k=count)
        )
        yield _case(han, True, "words of single signs", exactly)


def json_texts(rng: random.Random) -> Iterator[Case]:
    """Yield JSON, bare and in a block; and texts that some parsers accept."""
    instruction = {"check": "json_only"}
    while True:
        value = {
            word: rng.choice((rng.randint(0, 99), rng.random(), None, [True, "a, b"]))
            for word in _some(rng, 3)
        }
        text = json.dumps(value, indent=rng.choice((None, 2)))
        block = rng.choice(("{}", "```json\n{}\n```", "```\n{}```", "\n{}\n"))
        yield _case(block.replace("{}", text), True, "JSON", instruction)
        key = rng.choice(list(value))
        wrong = rng.choice(
            (
                text.replace(json.dumps(value[key]), rng.choice(("NaN", "Infinity", "-Infinity", "nan")), 1),
                text.replace('"', "'"), text.replace('"', "\u201c"), text[:-1] + ",}", text[:-1],
                f"Here: {text}", text + text, f"```json\n{text}", f"{text}\n```", json.dumps(key),
            )
        )  # fmt: skip
        if wrong != text:
            yield _case(block.replace("{}", wrong), False, "no JSON", instruction)


def empty_marks(rng: random.Random) -> Iterator[Case]:
    """Yield titles, highlights, placeholders, bullets and postscripts with and without content."""
    while True:
        word, text = rng.choice(WORDS), sentence(rng, _some(rng, 4))
        nothing = rng.choice(("", " ", rng.choice(INVISIBLE), ".", "\u00a0", "-", "&nbsp;"))
        for inside, right in ((rng.choice((word, "mark", "s 1")), True), (nothing, False)):
            label = "with something" if right else "with nothing"
            yield _case(f"<<{inside}>>\n{text}", right, f"title {label}", {"check": "has_title"})
            one: dict[str, Any] = {"relation": "at_least", "count": 1}
            yield _case(
                f"Dear [{inside}]: {text}",
                right,
                f"placeholder {label}",
                {"check": "num_placeholders", **one},
            )
            yield _case(
                f"So *{inside}* {text}", right, f"highlight {label}", {"check": "num_highlights", **one}
            )
            yield _case(
                f"{text}\n\n**P.S.** {inside}",
                right,
                f"postscript {label}",
                {"check": "has_postscript", "marker": "P.S."},
            )
            if right or not nothing.strip(" \u00a0" + INVISIBLE):
                yield _case(f"{text}\n* {inside}", right, f"bullet {label}", {"check": "num_bullets", **one})


GENERATORS: dict[str, Generator] = {
    "instructions: words": words, "instructions: commas": commas, "instructions: nothing to see": unseen,
    "instructions: lengths": lengths, "instructions: JSON": json_texts,
    "instructions: empty marks": empty_marks,
}  # fmt: skip
