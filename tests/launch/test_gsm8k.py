"""The GSM8K recipe as the README gives it: all rows, tokenizer made from them, three steps, validation, a visible format reward."""

from pathlib import Path

import pytest

from mrl.observe.metrics_log import read
from tests.data_sets import FOLDER, WHOLE
from tests.launch.command import run

pytestmark = pytest.mark.integration


def test_three_steps_on_all_rows(tmp_path: Path) -> None:
    output = run(
        "train",
        "configs/gsm8k.yaml",
        f"data.train={FOLDER}/gsm8k/train.jsonl",
        f"data.validation={FOLDER}/gsm8k/test.jsonl",
        f"run.folder={tmp_path}",
        f"model.path={tmp_path}/model",
        "loop.steps=3",
        "rollout.enforce_eager=true",
        log=tmp_path / "log",
        seconds=360,
    )
    assert f"rows: {7473 if WHOLE else 64}," in output, output[-2000:]
    rows = read(tmp_path / "gsm8k/metrics.jsonl")
    assert [r["step"] for r in rows] == [0, 1, 2, 3]
    assert all("reward/format" in r and "reward/maths" in r for r in rows[1:])
    assert rows[3]["val/prompts"] == 64 and 0 <= rows[3]["val/accuracy"] <= 1
    assert all(r["optim/grad_norm"] >= 0 and r["policy/rollout_logprob_diff_max"] < 1e-3 for r in rows[1:])
