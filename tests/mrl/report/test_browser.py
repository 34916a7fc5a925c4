"""The page in a real browser: it opens from disk, draws, filters, and runs no script of a sample."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page

from mrl.report.page import write_report
from tests.support.browser import CHROMIUM, opened_page, wait_for
from tests.support.run_folders import metrics_row, sample_row, write_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
ATTACK = "<img src=x onerror=\"document.title='run'\"></script><script>document.title='run'</script>"
TOKENS = {
    "text": ["one", " two", " <b>said</b>", " three"],
    "logprob": [-0.1, -4.0, 0.0, -1.0],
    "age": 0,
    "advantage": [1.0, -1.0, 0.0, 2.0],
    "policy": [1, 1, 0, 1],
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    samples = [sample_row(step, step, index) for step in range(1, 151) for index in (0, 1)]
    samples.append(sample_row(151, 900, response=ATTACK, prompt=ATTACK, reason=ATTACK, tokens=TOKENS))
    turns = [
        [{"said": f"turn {n}", "observed": ATTACK} for n in numbers] for numbers in ([1, 2], [1, 3], [4])
    ]
    first, second = {"opening": ATTACK, "turns": turns[0]}, {"turns": turns[1]}
    second["continues"] = {"conversation": 1, "turns": 1}
    last = {"opening": "user: a summary", "turns": turns[2], "branches": [first, second]}
    samples.append(sample_row(152, 901, prompt="a program", **last))
    rows = [
        metrics_row(
            step, **{"policy/loss": 3.0 * (-1) ** step, "sync/seconds": 1e-6 * step, ATTACK: 1.0 * step}
        )
        for step in range(1, 80)
    ]
    config = "run: {name: other}\nloop: {steps: 8, samples_per_prompt: 8, prompts_per_step: 4}\n"
    runs = [
        write_run(
            folder / "one",
            metrics=rows,
            samples=samples,
            config=config.replace("steps: 8", "steps: 90").replace("other", "one"),
        ),
        write_run(folder / "two", metrics=map(metrics_row, range(1, 9)), config=config),
    ]
    write_report(runs, folder / "report.html", megabytes=4)
    return folder / "report.html"


@pytest.fixture(scope="module")
def opened(report: Path) -> Iterator[tuple[Page, list[str]]]:
    """Return the page and its faults: errors, console messages, requests for anything but the file."""
    with opened_page(report.as_uri(), lambda url: url == report.as_uri()) as opened_report:
        yield opened_report


def test_it_draws_curves_and_a_step_without_an_error(opened: tuple[Page, list[str]]) -> None:
    page, wrong = opened
    wait_for(page, "document.querySelectorAll('.figure .scatterlayer path.js-line').length >= 3")
    page.wait_for_selector(".plot .barlayer path")
    page.select_option("label:has-text('Curves over') select", "hours")
    wait_for(page, "document.querySelector('.figure .xtitle').textContent.startsWith('hours')")
    page.fill("#find-figure", "sync/")
    assert set(page.locator(".figure:visible h3").all_inner_texts()) >= {"sync/seconds [s]"}
    assert not any("reward" in title for title in page.locator(".figure:visible h3").all_inner_texts())
    page.fill("#find-figure", "")
    assert wrong == []


def test_the_head_has_a_row_per_run_and_stays_small(opened: tuple[Page, list[str]]) -> None:
    page, wrong = opened
    head, one, two = (row.inner_text().split("\t") for row in page.locator("#summary tr").all())
    assert head == ["Run", "Status", "Step", "Elapsed"]
    assert [part.strip() for part in one] == [
        "one",
        "stopped its last start wrote no summary.json",
        "79 of 90",
        "3 min",
    ]
    assert [part.strip() for part in two] == ["two", "done", "8 of 8", "16 s"]
    page.locator("nav a", has_text="Step timeline").click()
    tops = "[document.querySelector('header'), document.querySelector('#Step-timeline h2')]"
    header, title = page.evaluate(f"{tops}.map((each) => each.getBoundingClientRect())")
    assert header["bottom"] <= min(80, title["top"]), "the sticky header hides no heading"
    assert wrong == []


def test_constant_curves_are_listed_and_not_drawn(opened: tuple[Page, list[str]]) -> None:
    page, _ = opened
    lists = page.locator("#Time details.constants tr").all()
    rows = [row.text_content() or "" for row in lists]
    assert any(row.startswith("time/step_seconds22") for row in rows), "the value of each run"
    drawn = page.locator(".figure h3").all_inner_texts()
    assert "policy/loss [1]" in drawn and "time/step_seconds [s]" not in drawn


def test_smoothing_keeps_the_raw_curve_pale_and_log_scale_needs_positive_values(
    opened: tuple[Page, list[str]],
) -> None:
    page, wrong = opened
    page.locator("#smoothing").fill("0.9")
    page.check("#log-scale")
    plot = "document.querySelector('.figure[data-metric*=\"{}\"] .plot')"
    loss, sync = plot.format("policy/loss"), plot.format("sync/seconds")
    for element, kind in ((loss, "linear"), (sync, "log")):
        page.evaluate(f"{element}.scrollIntoView()")
        wait_for(page, f"{element}.layout?.yaxis.type === '{kind}' && {element}.data.length >= 2")
    raw, curve = page.evaluate(
        f"{loss}.data.slice(0, 2).map((trace) => [trace.opacity ?? 1, ...trace.y.slice(0, 2)])"
    )
    assert raw == [0.25, -3, 3] and curve == [1, -3, pytest.approx((3 - 0.9 * 3) / 1.9)]
    assert page.evaluate(f"{sync}.layout.yaxis.exponentformat") == "e"
    assert page.evaluate(f"{loss}.layout.yaxis.exponentformat") == "none"
    page.locator("#smoothing").fill("0")
    page.uncheck("#log-scale")
    assert wrong == []


def test_settings_that_differ_come_first_and_the_others_are_folded(opened: tuple[Page, list[str]]) -> None:
    page, _ = opened
    groups = page.locator("#Configuration details")
    assert groups.locator("summary").all_inner_texts() == [
        "Different between the runs (2)",
        "Different from the defaults (1)",
        "Equal to the defaults (1)",
    ]
    assert [group.evaluate("group => group.open") for group in groups.all()] == [True, False, False]
    rows = [row.inner_text().split("\t") for row in groups.first.locator("tr").all()]
    assert ["loop.steps", "90", "8", "100"] in rows


def test_tokens_are_coloured_turns_are_apart_and_markup_is_text(opened: tuple[Page, list[str]]) -> None:
    page, wrong = opened
    page.reload()
    page.fill("#find-sample", "onerror")
    page.locator("#sample-list tr.choosable").first.click()
    page.select_option("label:has-text('Colour tokens by') select", "logprob")
    card = page.locator("#chosen .sample")
    assert card.locator(".turn").all_inner_texts() == ["turn 1", "the environment", "turn 2"]
    assert card.locator(".observation").inner_text() == " <b>said</b>"
    colours = [span.evaluate("e => e.style.backgroundColor") for span in card.locator("span").all()]
    assert len(set(colours)) == 4 and colours[2] == "", (
        "policy tokens by their log-prob, the environment's not at all"
    )
    page.select_option("label:has-text('Colour tokens by') select", "ratio")
    assert "wrote no ratio" in card.inner_text()
    assert ATTACK in page.locator("#chosen").inner_text() and page.title() == "one, two"
    assert wrong == []


def test_conversations_of_a_program_are_a_tree(opened: tuple[Page, list[str]]) -> None:
    page, wrong = opened
    page.reload()
    page.fill("#find-sample", "a program")
    page.locator("#sample-list tr.choosable").first.click()
    card = page.locator("#chosen .sample")
    assert card.locator(".turn").all_inner_texts() == [
        "conversation 1 of 3", "turn 1", "turn 2",
        "conversation 2 of 3, after turn 1 of conversation 1", "turn 2",
        "conversation 3 of 3", "turn 1",
    ]  # fmt: skip
    texts = card.locator(".text").all_inner_texts()
    assert texts == [
        ATTACK,
        "turn 1",
        ATTACK,
        "turn 2",
        ATTACK,
        "turn 3",
        ATTACK,
        "user: a summary",
        "turn 4",
        ATTACK,
    ]
    assert page.title() == "one, two" and wrong == []
