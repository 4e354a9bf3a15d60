"""The live page in headless Chromium: `make ui-test`. Skipped where playwright or Chromium is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdserve.gateway.ui.page import recording_page
from tests.support.ui_frames import Frame, FrameSource
from tests.support.ui_server import UiServer

PERIOD_S = 0.25
DEADLINE_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # Not for the session: while it runs, no other test of the process can start an event loop.
    # Imported here, because every run of the tests reads this file, also without the extra `ui-test`.
    from playwright.sync_api import sync_playwright

    from tests.support.ui_browser import find_chromium, launch

    path = find_chromium()
    if path is None:
        pytest.skip("Chromium is not installed")
    with sync_playwright() as running:
        opened = launch(running, path)
        yield opened
        opened.close()


class OpenPage:
    """Opens pages, and proves at the end that none reported an error or a violation of its policy."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._contexts: list[Any] = []
        self.problems: list[str] = []

    def __call__(self, url: str, *, width: int = 1280, height: int = 900, **options: Any) -> Any:
        context = self._browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(DEADLINE_MS)
        self._contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", self._hear)
        page.goto(url)
        return page

    def _hear(self, message: Any) -> None:
        # Chromium reports each answer with an error status; the tests cause those on purpose.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.problems.append(message.text)

    def close(self) -> None:
        for context in self._contexts:
            context.close()
        assert self.problems == []


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    opener = OpenPage(browser)
    yield opener
    opener.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., UiServer]]:
    """Starts a server that sends all frames at once and then nothing, so that the page's content is exact."""
    servers: list[UiServer] = []

    def start(frames: list[Frame], source: FrameSource | None = None) -> UiServer:
        server = UiServer(lambda: iter(frames), burst=len(frames), period_s=PERIOD_S)
        if source:
            server.explanations = source.explanations
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def recording(tmp_path: Any) -> Callable[..., str]:
    """Writes a recording as a file, and returns its address."""

    def write(frames: list[Frame], source: FrameSource) -> str:
        path = tmp_path / "recording.html"
        path.write_bytes(recording_page(frames, "A recording", source.explanations))
        return str(path.as_uri())

    return write
