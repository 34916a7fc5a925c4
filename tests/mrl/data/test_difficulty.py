"""Training rows chosen by solve rates: counted and named; unmeasured rows stay; bad files are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrl.config.load import load
from mrl.config.sections.data import DataSection, DifficultySection
from mrl.data.difficulty import rate_line, read_rates
from mrl.data.identity import prompt_id
from mrl.data.load_rows import load_data
from mrl.errors import ConfigError, DataError
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.samples import Prompt

MATHS = RewardSection(kind="maths")
SCORES = ([0.0] * 15 + [0.9], [1.0, 0.0, 1.5, 0.0], [1.0] * 16, [])
"""Scores of prompts: too hard, in range, too easy, unknown."""


@pytest.fixture
def section(write_rows: Any, tmp_path: Path) -> DataSection:
    """Return data with five rows, four of them measured; a validation row has the first one's prompt."""
    train = write_rows([{"prompt": f"{n}+{n}=", "answer": 2 * n} for n in range(5)], "train.jsonl")
    held_out = write_rows([{"prompt": "0+0=", "answer": 0}], "held_out.jsonl")
    difficulty = DifficultySection(file=str(tmp_path / "rates.jsonl"))
    return DataSection(train=train, validation=held_out, difficulty=difficulty)


def measured(section: DataSection, tokenizer: Any) -> tuple[Path, list[Prompt]]:
    """Write the file with SCORES; return it and the prompts."""
    prompts = list(load_data(section.model_copy(update={"difficulty": None}), MATHS, tokenizer).train[0].rows)
    assert section.difficulty is not None
    path = Path(section.difficulty.file)
    path.write_text("".join(map(rate_line, prompts, SCORES)))
    return path, prompts


def test_rows_outside_are_left_out_and_named_and_validation_stays(section, plain_tokenizer) -> None:
    path, prompts = measured(section, plain_tokenizer)
    data = load_data(section, MATHS, plain_tokenizer)
    (source,) = data.train
    assert [prompt.text for prompt in source.rows] == ["1+1=", "3+3=", "4+4="] and source.share == 3.0
    assert (data.report.rows, data.report.too_hard, data.report.too_easy) == (3, 1, 1)
    assert data.report.validation_rows == 1 and "too_hard: 1, too_easy: 1" in data.report.text()
    assert f"{path}: 1 of 5 training prompts are not in it and are kept" in data.report.notes
    (left_out,) = source.left_out.rows()
    assert (left_out.rule, left_out.count) == ("difficulty", 2)
    assert left_out.examples == [
        f"{prompts[0].row}: 0 of 16 samples solve it",
        f"{prompts[2].row}: 16 of 16 samples solve it",
    ]


def test_the_band_of_a_run_may_be_another_than_that_of_the_measurement(
    section: DataSection, plain_tokenizer: Any
) -> None:
    path, _ = measured(section, plain_tokenizer)
    narrow = DifficultySection(file=str(path), min=0.0, max=0.4)
    data = load_data(section.model_copy(update={"difficulty": narrow}), MATHS, plain_tokenizer)
    assert (data.report.too_hard, data.report.too_easy) == (0, 2)


def test_a_prompt_is_known_wherever_its_row_lies_and_not_with_another_answer(
    section: DataSection, plain_tokenizer: Any, write_rows: Any
) -> None:
    measured(section, plain_tokenizer)
    moved = [{"prompt": "2+2=", "answer": 4}, {"prompt": "0+0=", "answer": 1}]
    again = section.model_copy(update={"train": write_rows(moved, "moved.jsonl")})
    data = load_data(again, MATHS, plain_tokenizer)
    assert [prompt.text for prompt in data.train[0].rows] == ["0+0="]


def test_a_later_line_counts_and_a_last_line_without_its_end_does_not(section, plain_tokenizer) -> None:
    path, prompts = measured(section, plain_tokenizer)
    with path.open("a") as file:
        file.write(rate_line(prompts[0], [1.0, 1.0, 0.0]) + '{"id": "0011", "sam')
    rates = read_rates(path)
    assert len(rates) == len(SCORES) and rates[prompt_id(prompts[0])] == (3, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has none of the 5 training"),
        ("[1]\n", r"rates.jsonl:1: a prompt's line must have id, samples, solved, not \[1\]"),
        ('{"id": "x", "samples": 4}\n', "must have id, samples, solved"),
        ('{"id": "x", "samples": 4, "solved": 5}\n', "5 solved of 4 samples"),
        ('{"id": "x", "samples": 4, "solved": 1}\n', "has none of the 5 training"),
        ("\x00\n", "not valid JSON"),
        ('{"id": ' + "[" * 100_000 + "\n", "not valid JSON"),
    ],
)
def test_other_files_are_refused_in_a_sentence(text, message, section, plain_tokenizer, tmp_path) -> None:
    (tmp_path / "rates.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        load_data(section, MATHS, plain_tokenizer)


def test_a_file_that_is_not_there_is_named(section: DataSection, plain_tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"rates\.jsonl cannot be read .*write it with `mrl eval --train"):
        load_data(section, MATHS, plain_tokenizer)


def test_a_band_without_rates_is_refused() -> None:
    recipe = Path(__file__).parents[3] / "configs/quickstart.yaml"
    with pytest.raises(ConfigError, match="no row would be left"):
        load([recipe], ["data.difficulty={file: rates.jsonl, min: 0.9, max: 0.2}"])
