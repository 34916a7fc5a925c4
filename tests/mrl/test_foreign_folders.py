"""Readers of foreign folders terminate, overwrite and import nothing, and send no control sequences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.cli import main
from tests.support.run_folders import metrics_row, sample_row, write_run

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
CONFIGS = {
    "references without end": BOMB,
    "itself": "a: &a [*a]\n",
    "nested": "a: " + "[" * 10_000,
    "date": "a: 2020-99-99",
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", metrics=map(metrics_row, range(4)), samples=[sample_row(1, 1)])


@pytest.mark.parametrize("config", CONFIGS)
def test_references_of_a_configuration_end(config, run, capsys) -> None:
    (run / "config.yaml").write_text(CONFIGS[config])
    assert main(["report", str(run)]) == main(["diagnose", str(run)]) == 0
    assert "config.yaml cannot be read" in (run / "report.html").read_text()
    assert "config.yaml cannot be read" in capsys.readouterr().out


def test_a_page_takes_a_link_s_place_and_leaves_the_file_behind_it(run: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("of somebody")
    for name in ("report.html", "diagnosis.md", "report.html.partial", "diagnosis.md.partial"):
        (run / name).symlink_to(kept)
    assert main(["report", str(run)]) == main(["diagnose", str(run)]) == 0
    assert kept.read_text() == "of somebody"
    assert not (run / "report.html").is_symlink() and "<html" in (run / "report.html").read_text()[:200]


def test_samples_steer_no_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "step": 1,
        "kind": "\x1b[2J",
        "sample_id": "\x1b]0;title\x07",
        "status": "\x9b31m",
        "reward": "\x1b[1m",
    }
    turn = {"reward": "\x1b[5m", "said": "\x1b[6m", "observed": "\x1b[7m"}
    rows = [row | {"turns": [turn, 3], "prompt": "a\rb", "ended_by": "\x1b[8m"}, row | {"turns": 4}]
    (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "\x1b[9m": 1.0}) + "\n")
    assert main(["samples", str(run)]) == main(["report", str(run), "--text"]) == 0
    output = capsys.readouterr().out
    assert "\\x1b[2J" in output and all(c.isprintable() or c == "\n" for c in output)
