"""`mrl eval` before its engine starts."""

import json
from pathlib import Path

import pytest

from mrl.config.load import load
from mrl.errors import DataError
from mrl.launch.commands.evaluate import evaluate
from tests.mrl.data.conftest import make_tokenizer

GSM8K = Path(__file__).parents[2] / "configs" / "gsm8k.yaml"


def test_rows_that_are_left_out_are_counted_where_people_see_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tokenizer().save_pretrained(str(tmp_path / "model"))
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"question": "1+1?", "answer": "#### 2", "page": 3}) + "\n"
    )
    words = [
        f"model.path={tmp_path}/model",
        f"data.validation={tmp_path}/rows.jsonl",
        "data.max_prompt_tokens=2",
    ]
    with pytest.raises(DataError, match="has no rows left"):
        evaluate(load([GSM8K], words))
    said = capsys.readouterr().err
    assert "data: rows: 0, validation_rows: 0, " in said and "overlong: 1" in said
    assert "read by reward functions alone: page" in said
