"""`mrl rewards show` says why a response has its reward."""

import json
from pathlib import Path

import pytest

from mrl.cli import main

QUICKSTART = str(Path(__file__).parents[2] / "configs/quickstart.yaml")


def said(folder: Path, capsys: pytest.CaptureFixture[str], row: str, *words: str) -> list[str]:
    rows = folder / "rows.jsonl"
    answers = ("4", "x+1")
    rows.write_text("\n".join(json.dumps({"prompt": f"{a} is?", "answer": a}) for a in answers))
    settings = [f"data.train={rows}", "data.validation=null", f"model.path={folder}/none"]
    settings += ["reward.maths.extraction=[boxed,answer]", "reward.maths.symbolic=true"]
    code = main(["rewards", "show", QUICKSTART, *settings, "--row", row, *words])
    assert code == 0
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


def test_the_place_the_reading_and_the_verdict_are_told(tmp_path, capsys) -> None:
    response = tmp_path / "response.txt"
    response.write_text("<think>so \\boxed{4}</think>**Answer:** 5")
    lines = said(tmp_path, capsys, "1", "--response", str(response), "--explain")
    assert lines[0] == f"row {tmp_path}/rows.jsonl:1, domain default"
    assert lines[4:8] == ["verifier maths", "place: 'answer'", "read: '5'", "compared with: '4'"]
    assert lines[8] == "0 (scored): '5', not '4'" and lines[-1] == "reward 0 (scored): '5', not '4'"

    lines = said(tmp_path, capsys, "rows.jsonl:2", "--response", "\\boxed{1+x}", "--explain")
    assert lines[8].startswith("1 (scored)")
    assert said(tmp_path, capsys, "2", "--response", "<think>4")[0] == "reward 0 (scored): no final answer"
    assert said(tmp_path, capsys, "1")[0].startswith("reward 1 (scored)")


def test_a_row_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2+2", "answer": "4"}\n')
    settings = [f"data.train={rows}", "data.validation=null"]
    assert main(["rewards", "show", QUICKSTART, *settings, "--row", "3"]) == 2
    assert "no row '3'" in capsys.readouterr().err
