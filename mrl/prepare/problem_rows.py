"""Write arithmetic in words for a pretrained chat model, and questions of another domain.

Rows of train and validation: half ask `What is 63 - 15?`, half tell a story; each has one sum, difference or
product. Their domain is `problems`, their tag the operation. validation also has rows of another domain,
`capitals`, which is never trained on: four questions about each of 78 capital cities. They show what a run
costs elsewhere. chat has questions of everyday knowledge (mrl/prepare/chat_rows.py), on which the start can
be the teacher, so that it costs less. All files are a pure function of the seed.

    {"prompt": [{"role": "user", "content": "What is 63 - 15? Answer with the number only."}],
     "answer": "48", "domain": "problems", "tag": "difference"}
    {"prompt": [{"role": "user", "content": "What is the capital of France?"}],
     "answer": [{"check": "contains_words", "words": ["Paris"]}], "domain": "capitals", "tag": "capital"}
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mrl.prepare.arithmetic_rows import write_rows
from mrl.prepare.chat_rows import chat_rows

NAMES = "Anna Ben Carla David Emma Felix Grace Henry Iris Jack Kate Leo Maya Noah Olivia Paul"
THINGS = (
    "apples books cards coins cookies eggs flowers marbles oranges pencils shells stamps stickers stones toys"
)
CAPITAL_QUESTIONS = (
    ("What is the capital of {country}?", "capital"),
    ("Which city is the capital of {country}?", "capital"),
    ("Name the capital city of {country}.", "capital"),
    ("{capital} is the capital of which country?", "country"),
)
"""Questions, and what the answer has to contain."""
STORIES = {
    "sum": (
        "{name} has {a} {things}. {other} gives {name} {b} more. How many {things} does {name} have now?",
        "There are {a} {things} on the table and {b} on the floor. How many {things} are there in all?",
        "{name} collected {a} {things} on Monday and {b} on Tuesday. How many {things} did {name} collect?",
    ),
    "difference": (
        "{name} had {a} {things} and gave {b} of them to {other}. How many {things} does {name} have left?",
        "There were {a} {things} in the shop. {b} of them were sold. How many {things} are left?",
        "{name} has {a} {things}. {other} has {b}. How many more {things} does {name} have than {other}?",
    ),
    "product": (
        "{name} has {a} boxes with {b} {things} in each. How many {things} does {name} have?",
        "There are {a} children. Each child gets {b} {things}. How many {things} are needed?",
        "{name} buys {b} {things} every day. How many {things} does {name} buy in {a} days?",
    ),
}
SIGNS = {"sum": "+", "difference": "-", "product": "*"}
REQUEST = "Answer with the number only."
CAPITALS = """Afghanistan Kabul, Algeria Algiers, Argentina Buenos Aires, Armenia Yerevan, Australia
Canberra, Austria Vienna, Bangladesh Dhaka, Belgium Brussels, Bolivia Sucre, Brazil Brasilia, Bulgaria
Sofia, Canada Ottawa, Chile Santiago, China Beijing, Colombia Bogota, Croatia Zagreb, Cuba Havana, Cyprus
Nicosia, Denmark Copenhagen, Ecuador Quito, Egypt Cairo, Estonia Tallinn, Ethiopia Addis Ababa, Finland
Helsinki, France Paris, Germany Berlin, Ghana Accra, Greece Athens, Hungary Budapest, Iceland Reykjavik,
India New Delhi, Indonesia Jakarta, Iran Tehran, Iraq Baghdad, Ireland Dublin, Israel Jerusalem, Italy Rome,
Jamaica Kingston, Japan Tokyo, Jordan Amman, Kenya Nairobi, Latvia Riga, Lebanon Beirut, Libya Tripoli,
Lithuania Vilnius, Malaysia Kuala Lumpur, Malta Valletta, Mongolia Ulaanbaatar, Morocco Rabat, Nepal
Kathmandu, Netherlands Amsterdam, Nigeria Abuja, Norway Oslo, Pakistan Islamabad, Peru Lima, Poland Warsaw,
Portugal Lisbon, Romania Bucharest, Russia Moscow, Senegal Dakar, Serbia Belgrade, Slovakia Bratislava,
Slovenia Ljubljana, Somalia Mogadishu, Spain Madrid, Sweden Stockholm, Switzerland Bern, Syria Damascus,
Thailand Bangkok, Tunisia Tunis, Turkey Ankara, Uganda Kampala, Ukraine Kyiv, Uruguay Montevideo, Venezuela
Caracas, Vietnam Hanoi, Zambia Lusaka, Zimbabwe Harare"""


def write_problems(
    folder: str | Path, *, num_train: int = 2000, num_validation: int = 256, seed: int = 0
) -> Path:
    """Write train.jsonl, validation.jsonl and chat.jsonl; return the folder. No problem is in two files, or
    twice in one.

    validation has `num_validation` problems and all capitals, mixed by the seed.
    """
    rng = random.Random(seed)
    problems = _distinct(rng)
    validation = [next(problems) for _ in range(num_validation)] + _capitals()
    rng.shuffle(validation)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "validation.jsonl", validation)
    write_rows(folder / "train.jsonl", (next(problems) for _ in range(num_train)))
    write_rows(folder / "chat.jsonl", chat_rows())
    return folder


def _distinct(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield problems without end, none of them twice."""
    seen = set[str]()
    while True:
        question, answer, tag = _problem(rng)
        if question not in seen:
            seen.add(question)
            message = {"role": "user", "content": f"{question} {REQUEST}"}
            yield {"prompt": [message], "answer": str(answer), "domain": "problems", "tag": tag}


def _problem(rng: random.Random) -> tuple[str, int, str]:
    """Return a question, its answer and its operation."""
    tag = rng.choice(list(SIGNS))
    numbers = [rng.randint(2, 10 if tag == "product" else 30) for _ in range(2)]
    a, b = sorted(numbers, reverse=True) if tag == "difference" else numbers
    answer = {"sum": a + b, "difference": a - b, "product": a * b}[tag]
    if rng.random() < 0.5:
        return f"What is {a} {SIGNS[tag]} {b}?", answer, tag
    name, other = rng.sample(NAMES.split(), 2)
    story = rng.choice(STORIES[tag])
    return story.format(a=a, b=b, name=name, other=other, things=rng.choice(THINGS.split())), answer, tag


def _capitals() -> list[dict[str, Any]]:
    rows = []
    for entry in CAPITALS.replace("\n", " ").split(", "):
        names: dict[str, str] = dict(zip(("country", "capital"), entry.split(" ", 1), strict=True))
        for question, answer in CAPITAL_QUESTIONS:
            rows.append(
                {
                    "prompt": [{"role": "user", "content": question.format(**names)}],
                    "answer": [{"check": "contains_words", "words": [names[answer]]}],
                    "domain": "capitals",
                    "tag": answer,
                }
            )
    return rows
