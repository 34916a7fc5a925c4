"""`mrl make preferences`: pairs with different rewards, from correct responses or a model's samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrl.cli import main
from mrl.data.tune_shapes import read_pair
from mrl.rewards.maths.maths_rules import MathsRules
from mrl.rewards.maths.maths_verifier import verify_exactly
from tests.launch.command import run
from tests.launch.tiny_runs import words
from tests.mrl.data.conftest import make_tokenizer

QUICKSTART = str(Path(__file__).parents[2] / "configs/quickstart.yaml")
NAMES = {"off by one", "another digit", "another row", "cut off", "all answers", "with a doubt"}


def rows_of(file: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        assert len(read_pair(row, place="here").responses) == 2, "mrl tune reads it"
    return rows


def sums(folder: Path) -> list[str]:
    make_tokenizer().save_pretrained(str(folder / "model"))
    rows = [json.dumps({"prompt": f"{a}+{a + 3}=", "answer": str(2 * a + 3)}) for a in range(1, 61)]
    for name, part in (("train", rows[:50]), ("validation", rows[50:])):
        (folder / f"{name}.jsonl").write_text("\n".join(part))
    settings = [f"data.{name}={folder}/{name}.jsonl" for name in ("train", "validation")]
    settings += ["reward={kind: maths, maths: {extraction: [boxed], symbolic: false}}"]
    return [QUICKSTART, f"model.path={folder}/model", "data.max_prompt_tokens=64", *settings]


def test_worse_responses_are_made_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each row gets one pair; the seed decides which, and the rewards check that it is worse."""
    args = sums(tmp_path)
    for name in ("first", "second"):
        assert main(["make", "preferences", *args, "--out", str(tmp_path / name)]) == 0
    output = capsys.readouterr().out
    rows, held_out = (rows_of(tmp_path / "first" / f) for f in ("pairs.jsonl", "pairs_validation.jsonl"))
    assert len(rows) == 50 and len(held_out) == 10 and "pairs.jsonl: 50 pairs (" in output
    assert (tmp_path / "first/pairs.jsonl").read_text() == (tmp_path / "second/pairs.jsonl").read_text()
    assert {row["tag"] for row in rows} <= NAMES and len({row["tag"] for row in rows}) >= 4
    rules = MathsRules(extraction=("boxed",), symbolic=False)
    for row in rows:
        left, right = row["prompt"].rstrip("=").split("+")
        answer = str(int(left) + int(right))
        verdicts = [verify_exactly(row[side], answer, rules) for side in ("chosen", "rejected")]
        values = [verdict and verdict.value for verdict in verdicts]
        assert values == [1.0, 0.0] and row["margin"] == 1.0


def test_what_gives_no_pair_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["make", "preferences", *sums(tmp_path), "--out", str(tmp_path / "pairs")]
    assert main([*args, "--samples", "1"]) == 2
    assert "one response is not a pair" in capsys.readouterr().err
    (tmp_path / "same.py").write_text("def score(request):\n    return 1.0\n")
    assert main([*args, f"reward={{kind: plugin, path: '{tmp_path}/same.py:score'}}"]) == 2
    assert "no two responses to one row have different rewards" in capsys.readouterr().err
    assert not (tmp_path / "pairs").exists()


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_the_best_and_the_worst_of_a_models_own_samples(task: Path, tmp_path: Path) -> None:
    args = words(task, tmp_path, "run", "--samples", "8", "--rows", "6", "--out", str(tmp_path / "pairs"))
    output = run("make", "preferences", *args, log=tmp_path / "log", seconds=240)
    rows = rows_of(tmp_path / "pairs/pairs.jsonl")
    assert 0 < len(rows) <= 6 and f"{len(rows)} pairs ({len(rows)} sampled)" in output
    for row in rows:
        assert row["margin"] > 0 and row["chosen"] != row["rejected"] and row["tag"] == "sampled"
