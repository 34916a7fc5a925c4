"""The page of a run that is being written, in a real browser: it draws, and what is appended appears."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page

from mrl.watch.app import make_app
from mrl.watch.serve import listen, server
from tests.support.browser import CHROMIUM, opened_page, wait_for
from tests.support.run_folders import metrics_row, sample_row, write_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
ATTACK = "<img src=x onerror=\"document.title='run'\"></script><script>document.title='run'</script>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run without metrics so far, in a folder with another one."""
    runs = tmp_path_factory.mktemp("runs")
    write_run(runs / "other", metrics=map(metrics_row, (1, 2)), config="run: {name: other}\n")
    samples = [sample_row(step, step, index) for step in range(1, 151) for index in (0, 1)]
    return write_run(runs / "run", samples=samples)


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """That of a server in a thread, without the token."""
    with listen("127.0.0.1", 0) as listening:
        serving = server(make_app([folder, folder.parent], token="a-token", cookie="mrl_watch"))
        thread = threading.Thread(target=serving.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        serving.should_exit = True
        thread.join(timeout=120)


@pytest.fixture(scope="module")
def opened(address: str) -> Iterator[tuple[Page, list[str]]]:
    """The page, and what went wrong in it: errors, console messages, requests of anything but the server."""
    with opened_page(f"{address}?token=a-token", lambda url: url.startswith(address)) as found:
        yield found


def append(folder: Path, name: str, *rows: dict) -> None:
    with (folder / f"{name}.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_what_a_writer_appends_is_drawn_and_listed(opened: tuple[Page, list[str]], folder: Path) -> None:
    page, wrong = opened
    assert "token" not in page.url and page.title() == "run"
    assert "metrics.jsonl is not there." in page.locator("#notes").inner_text()
    wait_for(page, "document.querySelector('#sample-count').textContent.startsWith('300 of 300')")
    append(folder, "metrics", *(metrics_row(step) for step in range(1, 6)))
    wait_for(page, "document.querySelectorAll('.figure .scatterlayer path.js-line').length >= 2")
    wait_for(page, "document.querySelector('#step-place').max === '4'")
    points = "document.querySelector('.figure .plot').data[0].x.length"
    wait_for(page, f"{points} === 5")
    append(folder, "metrics", metrics_row(6, **{"val/reward": 0.5}))
    append(folder, "samples", sample_row(151, 900, response=ATTACK, prompt=ATTACK, reason=ATTACK))
    wait_for(page, f"{points} === 6")
    wait_for(
        page,
        "[...document.querySelectorAll('h3')].some((each) => each.textContent.startsWith('val/reward'))",
    )
    wait_for(page, "document.querySelector('#sample-count').textContent.startsWith('301 of 301')")
    assert "metrics.jsonl is not there." not in page.locator("#notes").inner_text()
    assert page.locator("#state").inner_text() == "up to date" and wrong == []


def test_the_server_filters_and_markup_is_text(opened: tuple[Page, list[str]]) -> None:
    page, wrong = opened
    rows = page.locator("#sample-list tr.choosable")
    counted = "document.querySelector('#sample-count').textContent"
    page.get_by_role("button", name="more", exact=True).click()
    wait_for(page, "document.querySelectorAll('#sample-list tr.choosable').length === 200")
    for name, value in (("step-from", "10"), ("step-to", "19"), ("reward-from", "1")):
        page.fill(f"[data-range={name}]", value)
    page.select_option("label:has-text('domain') select", "maths")
    wait_for(page, f"{counted}.startsWith('5 of 301')")
    page.fill("#find-sample", "QUESTION 13")
    wait_for(page, f"{counted}.includes('looked for')")
    wait_for(page, "document.querySelectorAll('#sample-list tr.choosable').length === 1")
    rows.first.click()
    page.wait_for_selector("#chosen .sample >> nth=1")
    for name in ("step-from", "step-to", "reward-from"):
        page.fill(f"[data-range={name}]", "")
    page.select_option("label:has-text('domain') select", "")
    page.fill("#find-sample", "onerror")
    wait_for(page, "document.querySelector('#sample-list td.cut')?.textContent.includes('onerror')")
    rows.first.click()
    wait_for(page, "document.querySelector('#chosen').textContent.includes('onerror')")
    assert ATTACK in page.locator("#chosen").inner_text() and page.title() == "run"
    assert wrong == []


def test_runs_are_listed_and_stand_side_by_side(opened: tuple[Page, list[str]]) -> None:
    page, wrong = opened
    assert page.locator("#runs p.chosen a").first.inner_text() == "run"
    page.get_by_role("link", name="compare").click()
    page.wait_for_url("**/?run=run&run=other")
    assert page.locator("#runs p.chosen").count() == 2
    assert "other: samples.jsonl is not there." in page.locator("#notes").inner_text()
    table = page.locator("h2#Configuration ~ div table").first
    assert table.locator("tr:visible td:first-child").all_inner_texts() == ["run.name"]
    assert page.locator("#sample-count").count() == 1 and wrong == []
