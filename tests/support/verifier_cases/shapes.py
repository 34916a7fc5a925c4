"""Responses in almost the required shape, and texts that repeat themselves in hidden ways."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from tests.support.verifier_cases.case import Case, Generator
from tests.support.verifier_cases.instructions import INVISIBLE, WORDS, sentence

_FORMS = ("\\boxed{{{}}}", "#### {}", "Answer: {}")
_SIGNS = {
    "Han": "\u4eca\u65e5\u5929\u6c14\u5f88\u597d\u6211\u4eec\u53bb\u516c\u56ed\u770b\u82b1\u559d\u8336\u8bfb"
    "\u4e66\u5199\u5b57\u5403\u996d\u8def\u4e0a\u6709\u4eba\u5531\u6b4c",
    "kana": "\u3042\u3044\u3046\u3048\u304a\u304b\u304d\u304f\u3051\u3053\u3055\u3057\u3059\u305b\u305d\u305f"
    "\u3061\u3064\u3066\u3068\u306a\u306b\u306c\u306d",
    "Thai": "\u0e01\u0e02\u0e04\u0e07\u0e08\u0e09\u0e0a\u0e0b\u0e14\u0e15\u0e16\u0e17\u0e19\u0e1a\u0e1b\u0e1c"
    "\u0e1e\u0e1f\u0e21\u0e22\u0e23\u0e25",
}


def one_answer(rng: random.Random) -> Iterator[Case]:
    """Yield one final answer after marks of all kinds, and two of different kinds."""
    while True:
        number, wrong = rng.sample(range(1000), 2)
        forms = [rng.choice(_FORMS) for _ in range(rng.randint(1, 3))]
        equal = "\n".join(
            form.format(rng.choice((f"{number}", f"{number}.0", f"\\boxed{{{number}}}"))) for form in forms
        )
        yield _format(rng, equal, True, "one answer")
        kinds = rng.sample(_FORMS, 2)
        yield _format(
            rng, f"{kinds[0].format(number)}\n{kinds[1].format(wrong)}", False, "answers of two kinds"
        )
        nothing = rng.choice(
            ("## Answer:", "\\boxed{}", "\\boxed{your answer}", f"{number}", "Answer: see above")
        )
        yield _format(rng, nothing, False, "no answer")


def _format(rng: random.Random, body: str, right: bool, label: str) -> Case:
    thought = sentence(rng, rng.sample(WORDS, 4)) + rng.choice(("", " \\boxed{5000}"))
    response = f"<think>{thought}</think>\n<answer>{body}</answer>"
    return Case("format", response, None, right, label, {"final_answer": True})


def tags(rng: random.Random) -> Iterator[Case]:
    """Yield tags in order with content; and empty, out of order, twice or missing."""
    while True:
        thought, answer = (sentence(rng, rng.sample(WORDS, 4)) for _ in range(2))
        unseen = "".join(rng.choices(INVISIBLE + " \n", k=rng.randint(0, 6)))
        good = f"{unseen}<think>{unseen}{thought}</think>{unseen}<answer>{answer}{unseen}</answer>"
        yield Case("format", good, None, True, "tags in order")
        wrong = rng.choice(
            (
                good.replace(thought, ""), good.replace(answer, rng.choice(("", "<!-- -->", "&nbsp;"))),
                f"<answer>{answer}</answer><think>{thought}</think>", good + good,
                good.replace("</think>", ""), good.replace("<answer>", ""),
                f"<think>{thought}<answer>{answer}</answer></think>", f"{thought} {answer}",
            )
        )  # fmt: skip
        yield Case("format", wrong, None, False, "tags out of shape")


def repetition(rng: random.Random) -> Iterator[Case]:
    """Yield long texts with rules and lists; and repeated words, signs and characters."""
    while True:
        script = rng.choice(list(_SIGNS))
        yield Case("repetition", _goes_on(rng), None, True, "words that go on")
        yield Case(
            "repetition", "".join(rng.choices(_SIGNS[script], k=400)), None, True, f"{script} that goes on"
        )
        phrase = rng.sample(WORDS, rng.randint(1, 15))
        yield Case("repetition", _again(rng, phrase), None, False, "a phrase again and again")
        signs = "".join(rng.choices(_SIGNS[script], k=rng.randint(1, 12)))
        yield Case("repetition", signs * rng.randint(80, 120), None, False, f"{script} again and again")
        run = rng.choice("ah!?-=.*\u2764") * rng.randint(200, 800)
        yield Case("repetition", run, None, False, "a character again and again")
        sounds = "".join(rng.choices("aeiouh", k=rng.randint(2, 6)))
        yield Case("repetition", sounds * rng.randint(80, 200), None, False, "a syllable again and again")


def _goes_on(rng: random.Random) -> str:
    lines = [sentence(rng, rng.choices(WORDS, k=rng.randint(6, 20))) for _ in range(rng.randint(5, 30))]
    lines.insert(2, rng.choice("-=*") * rng.randint(3, 79))
    return "\n".join(f"* {line}" if rng.random() < 0.2 else line for line in lines)


def _again(rng: random.Random, phrase: Sequence[str]) -> str:
    """Repeat the phrase, each time with other invisible signs or capitals."""

    def disguised(word: str) -> str:
        cut = rng.randint(0, len(word))
        spelled = (word, word.upper(), f"**{word}**", word[:cut] + rng.choice(INVISIBLE) + word[cut:])
        return rng.choice(spelled)

    return " ".join(disguised(word) for _ in range(rng.randint(40, 80)) for word in phrase)


GENERATORS: dict[str, Generator] = {
    "format: one final answer": one_answer,
    "format: tags": tags,
    "repetition": repetition,
}
