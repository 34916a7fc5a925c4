"""`mrl diagnose RUN`: its page, printed and written, and incomplete folders."""

import json
import shutil
from pathlib import Path

import pytest

from mrl.cli import main
from mrl.diagnosis.diagnosed_folder import choose_samples
from tests.support.recorded_rows import recorded


def folder_of(tmp_path: Path, run: str, *, config: str = "training: {optimizer: {lr: 0.006}}") -> Path:
    folder = tmp_path / run
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in recorded(run)))
    (folder / "config.yaml").write_text(config)
    samples = [
        {"step": step, "kind": kind, "sample_id": f"{step * 10 + n}.{n}", "reward": float(n), "prompt": "?"}
        for step in range(1, 61)
        for n in range(4)
        for kind in ("train", "validation")
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    return folder


def test_the_page_says_what_since_when_and_what_to_change(tmp_path, capsys) -> None:
    folder = folder_of(tmp_path, "rate_times_30")
    assert main(["diagnose", str(folder)]) == 0
    output, page = capsys.readouterr().out, (folder / "diagnosis.md").read_text()
    assert output == f"{page}\nwrote {folder}/diagnosis.md\n"
    assert page.startswith("# Diagnosis of rate_times_30") and "`policy_collapsed`, since step 10." in page
    assert "training.optimizer.lr=0.0006 (now 0.006)" in page and "`no_gradient`" in page
    assert "600.0" in page and "590.0" in page, "the lowest rewards of the last steps"


def test_a_folder_that_is_not_whole_is_read_as_far_as_it_goes(tmp_path, capsys) -> None:
    folder = folder_of(tmp_path, "stale_engines", config="a: [")
    (folder / "samples.jsonl").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "rew')
    assert main(["diagnose", str(folder)]) == 0
    output = capsys.readouterr().out
    assert "engines_apart" in output and "samples.jsonl does not exist" in output
    assert "config.yaml cannot be read" in output and "metrics.jsonl: 1 of 62" in output
    shutil.rmtree(folder)
    assert main(["diagnose", str(folder)]) == 2


def test_figures_that_are_no_numbers_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path, "healthy_cispo")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows[150:]:
        row["optim/grad_norm"] = row["policy/entropy"] = float("nan")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["diagnose", str(folder)]) == 0
    assert "NaN or infinity in 2 metrics, first in" in (output := capsys.readouterr().out)
    assert f"at step 150 ({len(rows) - 150} rows)" in output


def test_samples_are_of_different_prompts_and_of_the_time_of_the_finding() -> None:
    rows = [
        {"step": step, "sample_id": f"{prompt}.{n}", "reward": reward}
        for step, prompt, n, reward in [
            (9, 1, 0, 5.0),
            (11, 2, 0, 1.0),
            (12, 3, 0, 3.0),
            (12, 3, 1, 2.0),
            (13, 4, 0, 0.0),
        ]
    ]
    assert choose_samples([*rows, {"step": 20, "sample_id": "9.0", "reward": None}], 10, "highest") == [
        "3.0",
        "2.0",
        "4.0",
    ]
    assert choose_samples(rows, 10, "lowest") == ["4.0", "2.0", "3.1"]
