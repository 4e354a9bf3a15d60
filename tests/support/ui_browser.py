"""Headless Chromium for the live page."""

from __future__ import annotations

import shutil
from typing import Final

from playwright.sync_api import Browser, Page, Playwright

NAMES: Final = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


def launch(playwright: Playwright, path: str) -> Browser:
    # The page is our own, and containers lack what the sandbox needs.
    return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


def wait_until(page: Page, condition: str, *, timeout_s: float = 60.0) -> None:
    """Waits for a JavaScript expression. Playwright's own way evaluates a string in the page, which the page's policy
    forbids."""
    page.evaluate(
        "limit => new Promise((resolve, reject) => {"
        f"  const check = () => ({condition}) ? resolve(true)"
        "    : performance.now() > limit ? reject(new Error('not in time')) : requestAnimationFrame(check);"
        "  limit += performance.now(); check(); })",
        timeout_s * 1000,
    )


def wait_for_draws(page: Page, count: int) -> None:
    """Waits until the page has drawn `count` more frames, if it draws at all."""
    drawn = page.evaluate("window.pdserve.stats.draws")
    wait_until(page, f"window.pdserve.stats.draws >= {drawn + count}")
