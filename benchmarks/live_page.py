"""Memory of page and servers, and frames per second, while the live page of a busy cluster is open in Chromium.

    python -m benchmarks.live_page [--rate 60] [--seconds 120] [--width 1360] [--height 1010] [--chromium PATH]

gRPC requests with Poisson arrivals (16 tokens each) go to toy workers, which compute in microseconds. The page keeps
five minutes of history (`benchmarks.ui_frame_rate` measures it at that bound). All share this machine's cores. Every
row is one part of the time: frames that the page drew per second, its JavaScript heap after a garbage collection, and
the resident memory of router and gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import psutil  # type: ignore[import-untyped]
from playwright.sync_api import Page, sync_playwright

from benchmarks.http import Seen, turn
from benchmarks.live_view import TOKENS
from benchmarks.ui_frame_rate import heap_mib
from pdserve import AsyncClient
from pdserve.launch.running import Running
from simulator.report.tables import table
from tests.support.ui_browser import find_chromium, launch, wait_for_draws

PARTS: Final = 12
MIB: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSample:
    at_s: float
    drawn_per_s: float
    heap_mib: float
    router_mib: float
    gateway_mib: float


def samples(cluster: Running, flags: argparse.Namespace) -> Iterator[PageSample]:
    processes = [psutil.Process(cluster.pid(name)) for name in ("router", "gateway")]
    with sync_playwright() as playwright:
        browser = launch(playwright, flags.chromium)
        page = browser.new_page(viewport={"width": flags.width, "height": flags.height})
        page.goto(f"{cluster.http_url.removesuffix('/v1')}/ui")
        wait_for_draws(page, 10)
        begin_s = time.perf_counter()
        for part in range(PARTS):
            since_s, drawn = time.perf_counter(), _drawn(page)
            page.wait_for_timeout(1e3 * max(begin_s + (part + 1) * flags.seconds / PARTS - since_s, 0.0))
            now_s = time.perf_counter()
            drawn_per_s = (_drawn(page) - drawn) / (now_s - since_s)
            router_mib, gateway_mib = (one.memory_info().rss / MIB for one in processes)
            yield PageSample(
                at_s=now_s - begin_s,
                drawn_per_s=drawn_per_s,
                heap_mib=heap_mib(page),
                router_mib=router_mib,
                gateway_mib=gateway_mib,
            )
        browser.close()


def _drawn(page: Page) -> int:
    return int(page.evaluate("window.pdserve.stats.draws"))


async def measure(cluster: Running, flags: argparse.Namespace) -> tuple[list[PageSample], int, Seen]:
    async with AsyncClient(cluster.target) as sdk:

        async def ask(prompt: str, tokens: int) -> tuple[float, int]:
            done = await sdk.generate(prompt, max_tokens=tokens, ignore_eos=True)
            return done.timings.ttft_s, 1

        seen = Seen()
        watching = asyncio.create_task(asyncio.to_thread(lambda: list(samples(cluster, flags))))
        count, number = 0, 0
        while not watching.done():
            count += await turn(ask, flags.rate, flags.seconds / PARTS, TOKENS, number, seen)
            number += 1
        return await watching, count, seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=60.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--width", type=int, default=1360)
    parser.add_argument("--height", type=int, default=1010)
    parser.add_argument("--chromium", default=find_chromium(), help="path of the browser")
    flags = parser.parse_args()
    if flags.chromium is None:
        parser.error("Chromium is not installed; give its path with --chromium")
    with Running.start("--model", "toy", "--http", "0") as cluster:
        found, count, seen = asyncio.run(measure(cluster, flags))
    head = ("SECONDS", "FRAMES/S", "HEAP MiB", "ROUTER MiB", "GATEWAY MiB")
    rows = [
        (
            f"{one.at_s:.0f}",
            *(f"{value:.1f}" for value in (one.drawn_per_s, one.heap_mib, one.router_mib, one.gateway_mib)),
        )
        for one in found
    ]
    print(table([head, *rows]))
    print(f"{count} requests, {seen.failed} of them failed")


if __name__ == "__main__":
    main()
