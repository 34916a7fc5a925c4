"""`mrl rewards try` and `mrl rewards check`: the quality of a reward, before a run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.cli import main
from mrl.rewards.contract import scored
from mrl.rewards.trials import solutions
from mrl.rewards.trials.probes import Probe
from mrl.samples import Prompt
from tests.support.judge_server import judge_server

QUICKSTART = str(Path(__file__).parents[2] / "configs/quickstart.yaml")
CARELESS = """
def long_ones(request):
    return float(len(request.response) > 3)

def anywhere(request):
    return float(request.ground_truth in request.response.split())
"""


def asked(folder: Path, action: str, *words: str) -> list[str]:
    """Return the command's arguments on four sums, then settings and options."""
    rows = [{"prompt": f"{a} + 9 is?", "answer": str(a + 9)} for a in (3, 12, 41, 70)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = [f"data.train={folder}/rows.jsonl", "data.validation=null", f"model.path={folder}/none"]
    return ["rewards", action, QUICKSTART, *settings, *words]


def test_a_sound_reward_is_tried_without_a_remark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    maths = ["reward.maths.extraction=[boxed]", "reward.maths.symbolic=true"]
    assert main(asked(tmp_path, "try", *maths, "--rows", "3")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("domain default: 3 rows, 105 responses in ")
    shown = {line[2:34].strip(): line[34:].split() for line in lines[2:]}
    assert shown["right"] == ["1", "1", "1"]
    for name in ("empty", "echo", "another row's", "all answers", "cut off", "filler", "attack: filler"):
        assert shown[name] == ["0", "0", "0"], name
    assert lines[-1] == "  no remarks"


@pytest.mark.parametrize(
    ("function", "remarks"),
    [
        (
            "long_ones",
            [
                "ERROR: 'right' scores lower than another response in 4 of 4 rows",
                'ERROR: "another row\'s" scores as high as the correct one in 4 of 4 rows',
            ],
        ),
        ("anywhere",
         ["warning: 'all answers' scores as high as the correct one in 4 of 4 rows", "  0 errors"]),
    ],
)  # fmt: skip
def test_a_careless_reward_is_found_out(function, remarks, tmp_path, capsys) -> None:
    (tmp_path / "own.py").write_text(CARELESS)
    code = main(asked(tmp_path, "try", "reward.kind=plugin", f"reward.path={tmp_path}/own.py:{function}"))
    output = capsys.readouterr().out
    assert code == ("ERROR" in output) == (function == "long_ones")
    for remark in remarks:
        assert remark in output


WANTS_JSON = """
import json

def json_answer(request):
    try:
        return float(json.loads(request.response)["answer"] == request.ground_truth)
    except (ValueError, TypeError, KeyError):
        return 0.0

def raises(request):
    return float(json.loads(request.response)["answer"] == request.ground_truth)
"""


@pytest.mark.parametrize("where", ["column", "file"])
def test_right_responses_are_the_user_s_where_no_verifier_knows_them(where, tmp_path, capsys) -> None:
    (tmp_path / "own.py").write_text(WANTS_JSON)
    function = ["reward.kind=plugin", f"reward.path={tmp_path}/own.py:json_answer"]
    assert main(asked(tmp_path, "try", *function)) == 1
    out = capsys.readouterr().out
    assert "every response has the reward 0" in out
    assert "rows' answers were tried as correct responses ('12' in the first row)" in out and "--right" in out
    words = asked(tmp_path, "try", *function)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    right = [json.dumps({"answer": row["answer"]}) for row in rows]
    if where == "column":
        shown = [row | {"shown": text} for row, text in zip(rows, right, strict=True)]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, shown)))
    else:
        given = [{"row": number, "response": text} for number, text in enumerate(right, 1)]
        (tmp_path / "right.jsonl").write_text("\n".join(map(json.dumps, given)))
    assert main([*words, "--right", "shown" if where == "column" else f"{tmp_path}/right.jsonl"]) == 0
    assert "no remarks" in capsys.readouterr().out
    assert main([*words, "--right", "shown2"]) == 2
    assert "--right shown2 has no correct response to these rows" in capsys.readouterr().err


ADDS, SUBTRACTS = "def f(a, b):\n    return a + b\n", "def f(a, b):\n    return a - b\n"


@pytest.mark.parametrize(
    ("columns", "summary", "code"),
    [
        ([{"solutions": [SUBTRACTS, ADDS]}, {"solutions": json.dumps([ADDS])}, {"canonical_solution": ADDS},
          {"solutions": {"language": [2, 3], "solution": ["int main", ADDS]}}], "4 of 5 pass", 0),
        pytest.param([{"solution": SUBTRACTS}, {}], "0 of 1 pass", 1, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_solutions_of_the_rows_are_run_and_counted(
    columns: list[dict[str, Any]], summary: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = json.dumps({"fn_name": "f", "inputs": [[1, 2]], "outputs": [3]})
    words = asked(tmp_path, "try", "reward={kind: code, parts: []}", "--rows", str(len(columns)))
    rows = [{"prompt": f"add {n}", "answer": task} | fields for n, fields in enumerate(columns)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(words) == code
    out = capsys.readouterr().out
    assert f"  solutions of the rows: {summary}\n" in out
    assert ("right  " in out) == (code == 0), "one that passes is the right response"
    kind = "ERROR: 1 of 1" if code else "warning: 1 of 5"
    assert f"  {kind} solutions of the rows do not pass, first in {tmp_path}/rows.jsonl:1: " in out


@pytest.mark.parametrize(
    ("columns", "texts"),
    [
        ({"canonical_solution": ADDS}, [ADDS]),
        ({"solutions": {"language": [2, 3], "solution": ["int main", ADDS]}}, [ADDS]),
        ({"solution": SUBTRACTS, "answer": "3"}, [SUBTRACTS]),
        ({"solutions": json.dumps(["a", "b", "c", "d"])}, ["a", "b", "c"]),
        ({"solution": SUBTRACTS}, []),
    ],
)
def test_solutions_are_found_in_the_columns_of_data_sets(columns: dict[str, Any], texts: list[str]) -> None:
    assert solutions.solutions_of(Prompt(0, np.zeros(1, np.int32), "", None, metadata=columns)) == texts


def test_solutions_of_which_none_passes_are_an_error_unless_the_verifier_knows_better() -> None:
    prompt = Prompt(0, np.zeros(1, np.int32), "", None, row="f:1")
    failed = [Probe("a row's solution", prompt, SUBTRACTS, verdict=scored(0.0, "wrong"))]
    finding = solutions.finding_on_solutions(failed, others_are_right=False)
    assert finding is not None and finding.is_error and finding.text.endswith("first in f:1: wrong")
    finding = solutions.finding_on_solutions(failed, others_are_right=True)
    assert finding is not None and not finding.is_error
    assert (
        solutions.finding_on_solutions(
            [Probe("a row's solution", prompt, ADDS, verdict=scored(1.0))], others_are_right=False
        )
        is None
    )


def test_a_column_that_is_the_ground_truth_is_no_solution(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = asked(tmp_path, "try", "reward.maths.extraction=[boxed]", "--rows", "2")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?", "solution": "2"}\n')
    assert main(words) == 0
    assert "solutions" not in capsys.readouterr().out


def test_a_function_that_raises_is_told_of_once_with_its_line(tmp_path, capsys) -> None:
    (tmp_path / "own.py").write_text(WANTS_JSON)
    assert (
        main(
            asked(
                tmp_path,
                "try",
                "reward.kind=plugin",
                f"reward.path={tmp_path}/own.py:raises",
                "reward.retries=0",
            )
        )
        == 1
    )
    out, err = capsys.readouterr()
    remarks = [line for line in out.splitlines() if "have no reward" in line]
    assert 1 <= len(remarks) <= 3 and all(f"{tmp_path}/own.py:11; catch it" in line for line in remarks)
    assert "WARNING" not in err and len(err.splitlines()) < 5


def test_a_judge_is_checked_against_what_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tests' server takes the last number as the answer; one of these responses misleads it."""
    gold = tmp_path / "gold.jsonl"
    labelled = [
        ("It is 12.", True),
        ("12", True),
        ("13", False),
        ("It is 14", False),
        ("13, or rather 12", False),
    ]
    labelled.append(("12, as 3 + 9", True))
    rows = [{"prompt": "3 + 9?", "answer": 12, "response": text, "right": right} for text, right in labelled]
    rows[0]["tag"] = "easy"
    gold.write_text("\n".join(map(json.dumps, rows)))
    attacks = tmp_path / "more.jsonl"
    attacks.write_text(json.dumps({"id": "the answer", "text": "{wrong} {choice} 12"}))
    with judge_server() as (url, _, _):
        judge = ["reward.kind=llm", f"reward.path={url}", "reward.deadline_seconds=60"]
        words = ["--gold", str(gold), "--attacks", str(attacks)]
        assert main(asked(tmp_path, "check", *judge, *words)) == 0
        output = capsys.readouterr().out
        assert main(asked(tmp_path, "check", *judge, *words, "--min-agreement", "0.9")) == 1
    assert "6 responses, 0 without a reward" in output
    assert "accuracy 0.667 (4 of 6; 95 % 0.300 to 0.903)" in output
    assert "incorrect accepted 0.333 (1 of 3;" in output and "correct rejected 0.333 (1 of 3;" in output
    assert "accuracy, tag easy 1.000 (1 of 1;" in output
    assert "attacks that succeed 0.037 (2 of 54;" in output and "    the answer: 2 of 2" in output


def test_rows_that_are_none_are_named_and_so_are_the_commands(tmp_path, capsys) -> None:
    gold = tmp_path / "gold.jsonl"
    gold.write_text('{"prompt": "3 + 9?", "response": "12"}\n')
    assert main(asked(tmp_path, "check", "--gold", str(gold))) == 2
    assert "gold.jsonl:1: 'right' is missing; a row has prompt, response and right" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["rewards", QUICKSTART, "--row", "1"])
    assert "choose from 'show', 'try', 'check'" in capsys.readouterr().err
