"""Frames per second and memory of the live page in headless Chromium, without a GPU.

    python -m benchmarks.ui_frame_rate [--live 256] [--seconds 10] [--width 1360] [--height 1010]

The feed holds about as many live requests as asked. The history of five minutes is filled first, so that memory is
measured at its bound: JavaScript heap after a garbage collection, before and after the measured seconds. On a machine
that others use, `cpu_ms_per_frame` tells more than the frames per second: it is the CPU time of all of Chromium's
processes per drawn frame, so 30 frames per second need 30 times as much of one core.
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any, Final

from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.ui_browser import find_chromium, launch, wait_until
from tests.support.ui_frames import START_S, FrameSource, Load
from tests.support.ui_server import UiServer, endless

PERIOD_S: Final = 0.25
COUNT: Final = """seconds => new Promise(resolve => {
  const begin = performance.now(), drawn = window.pdserve.stats.draws;
  let screen = 0;
  const count = () => {
    screen += 1;
    const passed = (performance.now() - begin) / 1000;
    if (passed < seconds) return requestAnimationFrame(count);
    resolve({ drawn_per_s: (window.pdserve.stats.draws - drawn) / passed, screen_per_s: screen / passed,
      draw_ms: window.pdserve.stats.drawMs, slow_ms: window.pdserve.stats.slowMs,
      requests: window.pdserve.store.requests.size });
  };
  requestAnimationFrame(count);
})"""


def _load(live: int) -> Load:
    # The model's requests run for about six seconds, and no target limits them.
    return Load(
        rate_rps=live / 6.5,
        prefill=4,
        decode=8,
        output_tokens=(100, 200),
        slo_ttft_s=0.5,
        slo_tpot_s=0.05,
        admits=False,
    )


def heap_mib(page: Page) -> float:
    """The page's JavaScript heap after a garbage collection."""
    session: Any = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    used = float(session.send("Runtime.getHeapUsage")["usedSize"] / 2**20)
    session.detach()
    return used


def _cpu_s(browser: Browser) -> float:
    """CPU time that the browser's processes have used so far."""
    session: Any = browser.new_browser_cdp_session()
    return float(sum(process["cpuTime"] for process in session.send("SystemInfo.getProcessInfo")["processInfo"]))


def measure(live: int, history_s: float, seconds: float, width: int, height: int, chromium: str) -> dict[str, Any]:
    frames = endless(FrameSource(_load(live)), PERIOD_S)
    total = int((history_s + seconds) / PERIOD_S) + 40
    made = [json.loads(json.dumps(frame)) for frame in itertools.islice(frames, total)]
    burst = int(history_s / PERIOD_S)
    server = UiServer(lambda: iter(made), burst=burst, period_s=PERIOD_S)
    try:
        with sync_playwright() as playwright:
            browser = launch(playwright, chromium)
            page = browser.new_page(viewport={"width": width, "height": height})
            page.goto(f"{server.url}/ui")
            wait_until(page, f"window.pdserve.store.range()?.[1] > {START_S + history_s + 2 * PERIOD_S}", timeout_s=120)
            before = heap_mib(page)
            cpu_s = _cpu_s(browser)
            found = dict(page.evaluate(COUNT, seconds))
            cpu_s = _cpu_s(browser) - cpu_s
            found["cpu_ms_per_frame"] = 1000 * cpu_s / (found["drawn_per_s"] * seconds)
            found |= {"live": made[burst]["running"], "heap_before_mib": before, "heap_after_mib": heap_mib(page)}
            browser.close()
    finally:
        server.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--history", type=float, default=320.0, help="seconds before them")
    parser.add_argument("--width", type=int, default=1360)
    parser.add_argument("--height", type=int, default=1010)
    parser.add_argument("--chromium", default=find_chromium(), help="path of the browser")
    args = parser.parse_args()
    if args.chromium is None:
        parser.error("Chromium is not installed; give its path with --chromium")
    print(json.dumps(measure(args.live, args.history, args.seconds, args.width, args.height, args.chromium), indent=2))


if __name__ == "__main__":
    main()
