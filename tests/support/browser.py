"""A page in a headless Chromium, and what went wrong in it."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator

from playwright.sync_api import Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SECONDS = 120
"""Limit of every wait, on a machine under any load."""


@contextlib.contextmanager
def opened_page(address: str, is_own: Callable[[str], bool]) -> Iterator[tuple[Page, list[str]]]:
    """Yield the page, and its errors, console messages and requests to foreign addresses."""
    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=SECONDS * 1000
        )
        page, wrong = browser.new_page(viewport={"width": 1300, "height": 900}), []
        page.set_default_timeout(SECONDS * 1000)
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: wrong.extend([] if is_own(request.url) else [request.url]))
        page.goto(address)
        yield page, wrong
        browser.close()


def wait_for(page: Page, condition: str) -> None:
    """Wait until an expression is true; playwright's own waiting needs eval, which our policy forbids."""
    deadline = time.monotonic() + SECONDS
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"never true: {condition}"
        page.wait_for_timeout(100)
