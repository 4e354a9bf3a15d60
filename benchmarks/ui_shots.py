"""Takes the screenshots of the live page for the docs, in headless Chromium, over the frame generator of the tests.

    python -m benchmarks.ui_shots [--out docs/images] [--only NAME ...]

Needs the extra `ui-test` and Chromium (`--chromium`). Each scene is deterministic except for the moment of the shot.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.ui_browser import find_chromium, launch, wait_for_draws, wait_until
from tests.support.ui_frames import FrameSource, Load
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


SCENES: Final = {
    "live-busy": Scene(load=_busy()),
    "live-light": Scene(load=_busy(), theme="light"),
    "live-overload": Scene(load=_busy(rate_rps=lambda at_s: 8.0 if at_s < 90 else 34.0)),
    "live-lost-worker": Scene(load=_busy(lost={"d1": 145.0}, drained={"p1": 120.0})),
    "live-request": Scene(load=_busy(), act=_open_request, width=1280, height=760),
    "live-worker": Scene(load=_busy(), act=_open_worker, width=1280, height=760),
    "live-idle": Scene(load=_busy(rate_rps=0.0), history_s=5.0, height=620),
    "live-phone": Scene(load=_busy(), width=360, height=800),
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
            shoot(browser, SCENES[name], path)
            print(f"{path}: {path.stat().st_size / 1024:.0f} KB")
        browser.close()


if __name__ == "__main__":
    main()
