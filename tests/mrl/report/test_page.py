"""The page reports what is missing and reads bad folders as far as possible."""

import json
import re
from pathlib import Path

import pytest

from mrl.cli import main
from mrl.errors import DataError
from mrl.observe.metric_names import METRICS
from mrl.observe.run_folder import RunFolder
from mrl.report import log_rows as report_rows
from mrl.report.log_rows import ReadSummary, read_log_rows
from mrl.report.page import render_page, write_report
from mrl.report.page_figures import SECTIONS, figures
from mrl.report.run_data import read_run
from mrl.report.text import run_text
from tests.support.run_folders import metrics_row, sample_row, write_run


def notes_of(folder: Path) -> str:
    return "\n".join(read_run(folder, max_bytes=10**6)["notes"])


def test_a_row_cut_in_the_middle_is_named_and_the_others_are_there(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics=map(metrics_row, range(4)), samples=[sample_row(1, 1)])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "rew\n[1]\n\xff\n' + b"[" * 100_000)
    assert read_run(folder, max_bytes=10**6)["curves"]["step"] == [0, 1, 2, 3]
    assert "metrics.jsonl: 4 of 8 lines are not rows (cut or damaged), first line 5." in notes_of(folder)


def test_a_row_longer_than_any_of_ours_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_rows, "LONGEST", 100)
    (tmp_path / "m.jsonl").write_text('{"a": 1}\n' + json.dumps({"a": "x" * 1000}) + '\n{"a": 2}\n')
    reading = ReadSummary("m.jsonl")
    assert list(read_log_rows(tmp_path / "m.jsonl", reading)) == [{"a": 1}, {"a": 2}]
    assert (reading.lines, reading.unread, reading.first_unread) == (3, 1, 2)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    only_metrics = write_run(tmp_path / "a", metrics=[metrics_row(1)], config=None)
    for name in ("samples.jsonl", "config.yaml", "versions.json", "hardware.json", "summary.json"):
        assert f"{name} does not exist." in notes_of(only_metrics)
    only_samples = write_run(tmp_path / "b", samples=[sample_row(1, 1)], config="a: [")
    assert "metrics.jsonl does not exist." in notes_of(only_samples)
    assert "config.yaml cannot be read." in notes_of(only_samples)
    render_page([read_run(folder, max_bytes=10**6) for folder in (only_metrics, only_samples)])


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is this a run folder"):
        read_run(tmp_path, max_bytes=10**6)
    assert main(["report", str(tmp_path / "nowhere")]) == 2


def test_names_of_an_older_version_are_shown_apart(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics=[metrics_row(1, **{"reshard/seconds": 1.0})])
    data = data_of(render_page([read_run(folder, max_bytes=10**6)]))
    assert data["figures"][-1]["section"] == "Other metrics"
    assert data["figures"][-1]["names"] == ["reshard/seconds"]


def data_of(page_text: str) -> dict:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page_text, re.S)
    assert match is not None
    return json.loads(match[1])


def test_no_text_of_a_run_ends_the_data_and_no_number_breaks_it(tmp_path: Path) -> None:
    bad = "</script><script>alert(1)</script><!-- \u2028 \ud800"
    samples = [sample_row(1, 1, response=bad, reward=float("nan")), sample_row(1, 2)]
    folder = write_run(
        tmp_path / "run<b>", metrics=[metrics_row(1, **{"policy/loss": float("nan")})], samples=samples
    )
    with (folder / "samples.jsonl").open("a") as file:
        file.write('{"step": 1, "sample_id": "3.0", "reward": 1e999}\n')
    text = render_page([read_run(folder, max_bytes=10**6)])
    assert bad in [row.get("response") for row in data_of(text)["runs"][0]["samples"]["rows"]]
    head, _, body = text.partition('<script type="application/json"')
    assert "run&lt;b&gt;" in head and "<b>" not in head and "alert" not in head
    assert body.partition("</script>")[0].count("alert(1)") == 1
    write_report([folder], tmp_path / "out.html", megabytes=1)


def test_a_page_asks_no_network_and_allows_its_own_scripts_alone(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics=[metrics_row(1)])
    head = render_page([read_run(folder, max_bytes=10**6)]).partition("<style>")[0]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', head)
    assert policy is not None
    assert re.fullmatch(
        r"default-src 'none'; script-src 'sha256-\S+' 'sha256-\S+'; style-src 'unsafe-inline'; "
        r"img-src data: blob:",
        policy[1],
    )
    assert "src=" not in head.replace("default-src", "") and "<link" not in head


def test_the_command_writes_the_page_and_prints_curves(tmp_path, capsys) -> None:
    folder = write_run(
        tmp_path / "run", metrics=[metrics_row(n, **{"val/accuracy": n / 10}) for n in range(3)]
    )
    assert main(["report", str(folder), "--text"]) == 0
    assert not (folder / "report.html").exists() and "step    2  val/reward 0.200" in capsys.readouterr().out
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").stat().st_size > 10**6
    assert "wrote" in capsys.readouterr().out
    assert main(["report", str(folder), "--steps", "7-"]) == 0
    assert main(["report", str(folder), "--steps", "a-b"]) == 2
    assert main(["report", str(folder), "--out", str(tmp_path / "no/where.html")]) == 2


def test_a_run_without_metrics_has_a_line_in_the_terminal(tmp_path: Path) -> None:
    assert "no rows" in run_text(write_run(tmp_path / "run", samples=[sample_row(1, 1)]))


def test_every_metric_of_the_list_has_a_section_of_the_page() -> None:
    firsts = {name.replace("<optim|critic>", "optim").partition("/")[0] for name in METRICS if "/" in name}
    assert firsts == {first for parts in SECTIONS.values() for first in parts}
    (figure,) = figures(["tune/loss"])[1:]
    assert figure["section"] == "Tuning"


def test_what_mrl_tune_wrote_is_shown_by_the_name_of_its_run(tmp_path, capsys) -> None:
    rows = [
        {"step": s, "tune/loss": 3 / s, "tune/grad_norm": 1.0, "time/seconds": 2.0 * s} for s in range(1, 9)
    ]
    rows[3] |= {"preference/pair_loss": 0.7, "val/loss": 0.5, "val/rows": 9, "tune/grad_norm": float("nan")}
    write_run(tmp_path / "runs/first/tune", metrics=rows)
    assert main(["report", str(tmp_path / "runs/first"), "--out", str(tmp_path / "page.html")]) == 0
    output = capsys.readouterr().out
    assert "tune/loss" in output and "step    4  val/loss 0.500" in output and "reward/mean" not in output
    assert "tune/grad_norm: no finite number in 1 rows, first at step 4" in output
    data = read_run(tmp_path / "runs/first/tune", max_bytes=10)
    assert data["name"] == "first/tune"
    assert main(["diagnose", str(tmp_path / "runs/first")]) == 2
    assert "was written by `mrl tune`" in capsys.readouterr().err
    write_run(tmp_path / "runs/second", metrics=[metrics_row(1)])
    write_run(tmp_path / "runs/second/tune", metrics=rows)
    assert main(["report", str(tmp_path / "runs/second"), "--text"]) == 0
    assert "reward/mean" in capsys.readouterr().out, "the run itself goes before its supervised start"


def test_the_overview_says_how_far_the_run_came_and_what_it_is(tmp_path: Path) -> None:
    rows = [metrics_row(step, **{"val/reward": [0.2, 0.9, 0.5, 0.4][step - 1]}) for step in range(1, 5)]
    config = "model: {path: some/model}\nloop: {steps: 10}\n"
    folder = write_run(tmp_path / "run", metrics=rows, config=config)
    (folder / "hardware.json").write_text('{"trainer_devices": {"H200.x": 8}, "driver": {"cores": 2}}')
    (folder / "versions.json").write_text('{"torch": "2", "mrl": "0.1.0"}')
    overview = read_run(folder, max_bytes=10)["overview"]
    assert (overview["step"], overview["steps"]) == (4, 10)
    assert overview["seconds"] == pytest.approx(8, rel=1e-4)
    assert overview["seconds_left"] == pytest.approx(12, rel=1e-4)
    assert overview["best"] == {"metric": "val/reward", "value": 0.9, "step": 2}
    assert (overview["model"], overview["hardware"]) == ("some/model", "8 x H200.x")
    assert overview["version"] == "0.1.0"


@pytest.mark.parametrize(
    ("ended", "steps", "status"),
    [
        (None, 4, "stopped"),
        (None, 10, "done"),
        ("done", 10, "done"),
        ("SIGTERM", 4, "stopped"),
        ("done", 3, "stopped"),
        ("failed", 4, "failed"),
        ("WorkerLost: rank 1", 4, "failed"),
    ],
)
def test_the_status_comes_from_the_summary_and_the_lock(
    ended: str | None, steps: int, status: str, tmp_path: Path
) -> None:
    rows = map(metrics_row, range(1, (4 if status != "done" else 10) + 1))
    folder = write_run(tmp_path / "run", metrics=rows, config="loop: {steps: 10}\n")
    if ended:
        (folder / "summary.json").write_text(json.dumps({"ended": ended, "steps": steps}))
    assert read_run(folder, max_bytes=10)["overview"]["status"] == status
    running = RunFolder(folder)
    assert read_run(folder, max_bytes=10)["overview"]["status"] == "running"
    running.close()
    assert read_run(folder, max_bytes=10)["overview"]["status"] == status


def test_odd_facts_of_a_run_are_no_error(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics=[metrics_row(1)], config="loop: {steps: many}\n")
    (folder / "summary.json").write_text(json.dumps({"ended": [1], "steps": "9" * 5000}))
    (folder / "hardware.json").write_text('{"trainer_devices": 3}')
    overview = read_run(folder, max_bytes=10)["overview"]
    assert (overview["status"], overview["steps"], overview["seconds_left"]) == ("stopped", None, 0)


def test_settings_that_differ_from_their_defaults_are_known(tmp_path: Path) -> None:
    config = "run: {name: x, seed: 0}\nloop: {steps: 7, samples_per_prompt: 8}\nodd: {a: 1}\n"
    run = read_run(write_run(tmp_path / "run", metrics=[metrics_row(1)], config=config), max_bytes=10)
    assert run["differing"] == {"run.name": "", "loop.steps": "100", "odd.a": ""}
    assert run["config"]["loop.samples_per_prompt"] == "8"
