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
    """Of two runs; the second one's configuration differs."""
    folder = tmp_path_factory.mktemp("report")
    samples = [sample_row(step, step, index) for step in range(1, 151) for index in (0, 1)]
    samples.append(sample_row(151, 900, response=ATTACK, prompt=ATTACK, reason=ATTACK, tokens=TOKENS))
    runs = [
        write_run(folder / "one", metrics=map(metrics_row, range(1, 80)), samples=samples),
        write_run(folder / "two", metrics=map(metrics_row, range(1, 9)), config="run: {name: other}\na: 1\n"),
    ]
    write_report(runs, folder / "report.html", megabytes=4)
    return folder / "report.html"


@pytest.fixture(scope="module")
def opened(report: Path) -> Iterator[tuple[Page, list[str]]]:
    """The page, and what went wrong in it: errors, console messages, requests of anything but the file."""
    with opened_page(report.as_uri(), lambda url: url == report.as_uri()) as found:
        yield found


def test_it_draws_curves_and_a_step_without_an_error(opened: tuple[Page, list[str]]) -> None:
    page, wrong = opened
    wait_for(page, "document.querySelectorAll('.figure .scatterlayer path.js-line').length >= 4")
    page.wait_for_selector(".plot .barlayer path")
    page.select_option("label:has-text('Curves over') select", "hours")
    wait_for(page, "document.querySelector('.figure .xtitle').textContent.startsWith('hours')")
    page.fill("#find-figure", "sync/")
    assert set(page.locator(".figure:visible h3").all_inner_texts()) >= {"sync/seconds [s]"}
    assert not any("reward" in title for title in page.locator(".figure:visible h3").all_inner_texts())
    page.fill("#find-figure", "")
    assert wrong == []


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
