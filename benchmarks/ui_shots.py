"""Takes the screenshots of the live page and of `pdserve top` for the docs, in headless Chromium, over the frame
generator of the tests.

    python -m benchmarks.ui_shots [--out docs/images] [--only NAME ...]

Needs the extra `ui-test` and Chromium (`--chromium`). Each scene is deterministic except for the moment of the shot.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Browser, Page, sync_playwright

from pdserve.client.results import Explanation
from pdserve.core.live import LiveFrame, LogLine
from pdserve.top.app import TopApp
from tests.support.ui_browser import find_chromium, launch, wait_for_draws, wait_until
from tests.support.ui_frames import FrameSource, Load, frame_from_json
from tests.support.ui_server import UiServer, endless

PERIOD_S: Final = 0.25


def _nothing(page: Page) -> None:
    pass


def _open_request(page: Page) -> None:
    page.locator("#waterfall").focus()
    for key in ("End", *["ArrowLeft"] * 30, "Enter"):
        page.keyboard.press(key)
    page.wait_for_selector("tr.chosen")


def _open_worker(page: Page) -> None:
    page.locator("[data-worker=d1]").click()
    page.locator("#detail .log li").last.scroll_into_view_if_needed()


@dataclass(frozen=True, kw_only=True)
class Scene:
    load: Load
    history_s: float = 150.0
    theme: str = "dark"
    width: int = 1200
    height: int = 860
    act: Callable[[Page], None] = _nothing


def _busy(**changes: Any) -> Load:
    return Load(**{"seed": 4, "rate_rps": lambda at_s: 9.0 if at_s % 60 < 45 else 15.0, **changes})


LOG: Final = [
    {"at_unix_s": 1.8e9 + at_s, "level": level, "text": text}
    for at_s, level, text in (
        (0.0, "INFO", "pdserve.worker.host: worker is ready worker_id=d1 role=decode address=127.0.0.1:40201"),
        (0.4, "INFO", "pdserve.worker.session: router attached router_id=router-0@127.0.0.1:40201 session=1"),
        (61.0, "WARNING", "pdserve.worker.session: a router reads too slowly; its stream ends messages=131072"),
        (61.5, "INFO", "pdserve.worker.session: router attached router_id=router-0@127.0.0.1:40201 session=2"),
    )
]
SCENES: Final = {
    "live-busy": Scene(load=_busy()),
    "live-light": Scene(load=_busy(), theme="light"),
    "live-overload": Scene(load=_busy(rate_rps=lambda at_s: 8.0 if at_s < 90 else 34.0)),
    "live-lost-worker": Scene(load=_busy(lost={"d1": 145.0}, drained={"p1": 120.0})),
    "live-request": Scene(load=_busy(), act=_open_request, width=1280, height=760),
    "live-worker": Scene(load=_busy(), act=_open_worker, width=1280, height=760),
    "live-idle": Scene(load=_busy(rate_rps=0.0), history_s=5.0, height=620),
    "live-phone": Scene(load=_busy(), width=360, height=800),
    "top": Scene(load=_busy(lost={"d1": 145.0}, drained={"p1": 120.0})),
    "live-many": Scene(
        load=_busy(rate_rps=35.0, prefill=4, decode=8, output_tokens=(100, 400)), history_s=60.0, height=640
    ),
}


def shoot(browser: Browser, scene: Scene, path: Path) -> None:
    source = FrameSource(scene.load)
    frames = endless(source, PERIOD_S)
    # The history is made first, so that the page receives it at once.
    history = list(itertools.islice(frames, int(scene.history_s / PERIOD_S)))
    server = UiServer(lambda: itertools.chain(history, frames), burst=len(history), period_s=PERIOD_S)
    server.explanations = source.explanations
    server.logs = {"d1": LOG}
    context = browser.new_context(viewport={"width": scene.width, "height": scene.height}, color_scheme=scene.theme)
    page = context.new_page()
    page.goto(f"{server.url}/ui")
    wait_until(page, f"window.pdserve.store.range()?.[1] > {history[-1]['at_s'] + 2 * PERIOD_S}")
    wait_for_draws(page, 20)
    scene.act(page)
    wait_for_draws(page, 20)
    page.screenshot(path=path)
    context.close()
    server.close()


class _TopSource:
    """A stream of a router that has just reached the end of `frames`."""

    name, is_live = "localhost:50051", True

    def __init__(self, frames: list[LiveFrame]) -> None:
        self.frames_shown = 0
        self._frames = frames

    async def frames(self) -> AsyncIterator[LiveFrame]:
        for one in self._frames:
            yield one
            self.frames_shown += 1
        await asyncio.Event().wait()

    async def explain(self, request_id: str) -> Explanation:
        raise NotImplementedError

    async def worker_log(self, worker_id: str) -> Sequence[LogLine]:
        raise NotImplementedError

    async def drain(self, worker_id: str, *, is_drained: bool) -> None:
        raise NotImplementedError


def shoot_top(browser: Browser, scene: Scene, path: Path) -> None:
    """In 80 columns and 24 lines."""
    frames = itertools.islice(endless(FrameSource(scene.load), PERIOD_S), int(scene.history_s / PERIOD_S))
    source = _TopSource([frame_from_json(one) for one in frames])
    app = TopApp(source)

    async def draw() -> str:
        async with app.run_test(size=(80, 24)) as pilot:
            while source.frames_shown < len(source._frames):
                await pilot.pause(0.05)
            await pilot.pause(1.0)  # for the layout
            return app.export_screenshot(title="pdserve top")

    # On a thread without an event loop, because Playwright runs one on this one.
    with ThreadPoolExecutor(1) as thread:
        svg = thread.submit(asyncio.run, draw()).result()
    page = browser.new_page()
    page.set_content(svg)
    page.locator("svg").screenshot(path=path, omit_background=True)
    page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--only", nargs="*", choices=SCENES, default=list(SCENES))
    parser.add_argument("--chromium", default=find_chromium(), help="path of the browser")
    args = parser.parse_args()
    if args.chromium is None:
        parser.error("Chromium is not installed; give its path with --chromium")
    args.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = launch(playwright, args.chromium)
        for name in args.only:
            path = args.out / f"{name}.png"
            shot = shoot_top if name == "top" else shoot
            shot(browser, SCENES[name], path)
            print(f"{path}: {path.stat().st_size / 1024:.0f} KB")
        browser.close()


if __name__ == "__main__":
    main()
