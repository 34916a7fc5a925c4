"""Generated rows: sums, tool conversations, wrong answers, and new models for them."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest
from safetensors.torch import load_file

from mrl.agents.render import Observation, TurnRenderer
from mrl.agents.tool_calls import ToolCall, parse_tool_calls
from mrl.config.sections.model import ModelSection, NewModelSection
from mrl.models.families import family_of, require_trainable
from mrl.prepare import arithmetic_rows, calculator_rows, new_model, problem_rows, tokenizer
from mrl.prepare.corruptions import corrupted
from mrl.tokenizer_folder import load_tokenizer
from mrl.training.hf.hf_folder import check_folder, read_config


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Write 100 sums: 16 for validation, 8 demonstrations, 76 for training."""
    return arithmetic_rows.write_arithmetic(tmp_path / "one", largest=9, num_validation=16, num_sft=8)


def test_pairs_are_of_sums_to_train_on(small: Path) -> None:
    pairs = rows(small / "pairs.jsonl")
    assert [row["prompt"] for row in pairs] == [row["prompt"] for row in rows(small / "train.jsonl")]
    for row in pairs + rows(small / "pairs_validation.jsonl"):
        assert eval(row["prompt"].rstrip("=")) == int(row["chosen"])
        differing = [a != b for a, b in zip(row["chosen"], row["rejected"], strict=True)]
        assert sum(differing) == 1


def test_more_pairs_than_sums_are_further_wrong_answers(small: Path, tmp_path: Path) -> None:
    larger = arithmetic_rows.write_arithmetic(
        tmp_path / "more", largest=9, num_validation=16, num_sft=8, num_pairs=200
    )
    pairs = rows(larger / "pairs.jsonl")
    assert pairs[:76] == rows(small / "pairs.jsonl")
    assert sorted(Counter(row["prompt"] for row in pairs).values()) == [2] * 28 + [3] * 48
    assert len({(row["prompt"], row["rejected"]) for row in pairs}) > 150
    for name in ("train.jsonl", "validation.jsonl", "sft.jsonl", "pairs_validation.jsonl"):
        assert (larger / name).read_bytes() == (small / name).read_bytes()


def test_problems_have_the_answers_of_their_numbers(tmp_path: Path) -> None:
    folder = problem_rows.write_problems(tmp_path / "one", num_train=400, num_validation=100)
    train, validation = rows(folder / "train.jsonl"), rows(folder / "validation.jsonl")
    problems = [*train, *(row for row in validation if row["domain"] == "problems")]
    questions = [row["prompt"][0]["content"] for row in problems]
    assert len(problems) == len(set(questions)) == 500
    sign = {"sum": "+", "difference": "-", "product": "*"}
    stories = Counter[str]()
    for question, row in zip(questions, problems, strict=True):
        numbers = [*re.findall(r"\d+", question)]
        if row["tag"] == "product" and "buys" in question:
            numbers.reverse()
        assert int(row["answer"]) == eval(sign[row["tag"]].join(numbers)) >= 0
        stories[row["tag"]] += not question.startswith("What is")
    assert len(stories) == 3 and 200 < stories.total() < 300
    again = problem_rows.write_problems(tmp_path / "two", num_train=400, num_validation=100)
    assert rows(again / "validation.jsonl") == validation


def test_capitals_are_checked_by_the_instruction_verifier(tmp_path: Path) -> None:
    folder = problem_rows.write_problems(tmp_path, num_train=1, num_validation=1)
    capitals = [row for row in rows(folder / "validation.jsonl") if row["domain"] == "capitals"]
    assert len({row["prompt"][0]["content"] for row in capitals}) == len(capitals) == 4 * 78
    answers = {row["prompt"][0]["content"]: row["answer"] for row in capitals}
    words = {
        "What is the capital of Argentina?": "Buenos Aires",
        "Kabul is the capital of which country?": "Afghanistan",
    }
    for question, word in words.items():
        assert answers[question] == [{"check": "contains_words", "words": [word]}]


def test_chat_questions_are_asked_once_and_name_no_place(tmp_path: Path) -> None:
    chat = rows(problem_rows.write_problems(tmp_path, num_train=1, num_validation=1) / "chat.jsonl")
    questions = [row["prompt"][0]["content"] for row in chat]
    assert len(set(questions)) == len(questions) > 150
    places = set(re.findall(r"\w+", problem_rows.CAPITALS))
    assert not [text for text in questions if places & set(re.findall(r"\w+", text)) or "capital" in text]


SCHEMA = {"calculator": {"type": "object", "properties": {"expression": {"type": "string"}}}}


def test_demonstrations_are_what_an_episode_shows_the_policy(tmp_path: Path) -> None:
    folder = calculator_rows.write_calculator(tmp_path / "rows", num_train=50, num_validation=20, num_sft=60)
    names = ("train", "validation", "sft")
    train, validation, turns = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()] for name in names
    )
    shown = {row["prompt"].split(">")[1].removesuffix("<end") for row in turns}
    questions = {row["expression"] for row in (*train, *validation)}
    assert len(questions) == 70 and len(shown) == 60 and not questions & shown
    tokenizer.write_chat([folder / "train.jsonl", folder / "sft.jsonl"], tmp_path / "model")
    spoken = load_tokenizer(str(tmp_path / "model"))
    renderer = TurnRenderer(spoken, roles=("tool",))
    calls = [row for row in turns if row["response"].startswith("{")]
    answers = {row["prompt"]: row["response"] for row in turns}
    assert 5 < len(calls) < 30
    for row in calls:
        expression = row["prompt"].split(">")[1].removesuffix("<end")
        assert parse_tool_calls(row["response"], "json", SCHEMA) == [
            ToolCall("calculator", {"expression": expression})
        ]
        prompt = spoken.apply_chat_template(
            [{"role": "user", "content": expression}], tokenize=False, add_generation_prompt=True
        )
        assert row["prompt"] == prompt
        (after,) = (text for text in answers if text.startswith(prompt + row["response"]))
        between = renderer.after(spoken.eos_token_id, [Observation(str(eval(expression)), "tool")])
        wrote = spoken.encode(prompt + row["response"] + tokenizer.END, add_special_tokens=False)
        assert spoken.encode(after, add_special_tokens=False) == [*wrote, *between.tolist()]
        assert answers[after] == str(eval(expression))


OTHERS = ["\\boxed{7}", "\\boxed{30}", "\\boxed{512}"]


def test_each_is_what_its_name_says() -> None:
    right = "3 + 9 is \\boxed{12}"
    for seed in range(50):
        variants = corrupted(right, [*OTHERS, right], random.Random(seed))
        assert set(variants) == {
            "off by one", "another digit", "cut off", "another row", "all answers", "with a doubt",
        }  # fmt: skip
        assert variants["off by one"] in ("3 + 9 is \\boxed{11}", "3 + 9 is \\boxed{13}")
        other = variants["another digit"]
        assert len(other) == len(right) and sum(a != b for a, b in zip(other, right, strict=True)) == 1
        assert not any(number[0] == "0" and len(number) > 1 for number in re.findall(r"\d+", other))
        assert right.startswith(variants["cut off"]) and variants["another row"] in OTHERS
        assert sorted(variants["all answers"].split("\n")) == sorted([*OTHERS, right])
        assert variants["with a doubt"].startswith(f"{right}\n")


def test_what_cannot_be_made_is_left_out() -> None:
    assert corrupted("x", [], random.Random(0)) == {}
    assert set(corrupted("0", ["0"], random.Random(0))) == {"off by one", "another digit"}
    assert corrupted("0", [], random.Random(1))["off by one"] == "1"
    assert set(corrupted("no", ["yes"], random.Random(0))) == {
        "cut off",
        "another row",
        "all answers",
        "with a doubt",
    }


def test_no_embedding_row_is_zero_and_the_padding_token_is_known(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+2=", "answer": "3"}\n')
    new = NewModelSection(
        hidden_size=32, num_heads=1, num_kv_heads=1, head_dim=32, expert_size=32, num_layers=1
    )
    new_model.ensure_model(
        ModelSection(path=str(tmp_path / "model"), new=new, max_length=8), [str(rows)], seed=0
    )
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "model" / name).read_text())["pad_token_id"] == 0
    embedding = load_file(tmp_path / "model/model.safetensors")["model.embed_tokens.weight"]
    assert embedding.float().norm(dim=1).min() > 0.05


@pytest.mark.parametrize("family", get_args(NewModelSection.model_fields["family"].annotation))
def test_every_family_that_can_be_asked_for_is_made_and_trains(family: str, tmp_path: Path) -> None:
    """Training implements everything in the folder, and the tensors match the family's tables."""
    new = NewModelSection.model_validate({
        "family": family, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 2, "expert_size": 32,
        "num_layers": 2,
    })  # fmt: skip
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+2=", "answer": "3"}\n')
    folder = tmp_path / "model"
    new_model.ensure_model(ModelSection(path=str(folder), new=new, max_length=64), [str(rows)], seed=0)
    hf = read_config(folder)
    require_trainable(hf)
    files, left_out = check_folder(folder, family_of(hf), hf)
    assert files and not left_out
