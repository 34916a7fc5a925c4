"""`mrl data` shows rows of train, validation and SFT data, and refuses what a run would refuse."""

import json
from pathlib import Path

import pytest

from mrl.cli import main

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Return the quickstart's arguments with three small files; the model does not exist yet."""
    for name, rows in (
        ("train", [{"prompt": f"{n}+1=", "answer": n + 1, "domain": "sums"} for n in (1, 2, 2)]),
        ("validation", [{"prompt": "12+1=", "answer": 13}]),
        ("sft", [{"prompt": "1+1=", "response": "2"}]),
    ):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [str(CONFIGS / name) for name in ("quickstart.yaml", "quickstart_model.yaml")]
    settings = {"data.train": "train", "data.validation": "validation", "tune.data.train": "sft"}
    set_here = [f"{name}={tmp_path}/{file}.jsonl" for name, file in settings.items()]
    return [*files, *set_here, f"model.path={tmp_path}/model"]


def test_rows_lengths_and_what_is_left_out(tmp_path, words, capsys) -> None:
    assert main(["data", *words, "--rows", "1"]) == 0
    output = capsys.readouterr().out
    assert "rows: 2, validation_rows: 1, duplicates: 1" in output.splitlines()[0]
    train, validation, sft = output.split("\n\n")[1:]
    assert train.splitlines()[:4] == [
        f"train {tmp_path}/train.jsonl: 3 rows, 2 kept",
        "  domains: sums 2",
        "  left out by data.dedupe: 1 of domain sums",
        f"    {tmp_path}/train.jsonl:3: same prompt as {tmp_path}/train.jsonl:2",
    ]
    assert "  prompt: 1+1=\n  special tokens: none\n  ground truth: 2" in train and "2+1=" not in train
    assert "row " in validation and "  prompt: 12+1=" in validation
    assert sft.endswith("  prompt: 1+1=\n  response: 2<end>\n  special tokens: <end> x1\n")
    assert not (tmp_path / "model").exists(), "nothing is made"


def test_both_responses_of_a_pair_are_shown(tmp_path, words, capsys) -> None:
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "1"}
    (tmp_path / "sft.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["data", *words, "tune.objective.name=dpo"]) == 0
    assert "  prompt: 1+1=\n  response: 2<end>\n  rejected: 1<end>\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "row"), [("train", '{"prompt": "1+1'), ("validation", "{}"), ("sft", '{"prompt": "1"}')]
)
def test_a_broken_row_is_named(tmp_path, words, capsys, name, row) -> None:
    with (tmp_path / f"{name}.jsonl").open("a") as file:
        file.write(row)
    assert main(["data", *words]) == 2
    place = f"{tmp_path}/{name}.jsonl:{4 if name == 'train' else 2}"
    captured = capsys.readouterr()
    assert place in captured.err and captured.out == ""
