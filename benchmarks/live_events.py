"""Measures how soon the live page shows an event: rejections, drained workers, preemptions and killed workers.

    python -m benchmarks.live_events [--rounds 5]

A real cluster and its page in headless Chromium. A time runs from the cause, as this process knows it, until the page
lists the event: from the first rejected call of a burst, from the operator's call, from the last token that a client
received before the gap in its stream that a preemption causes, and from SIGKILL. Needs the extra `ui-test` and
Chromium.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import queue
import signal
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from playwright.sync_api import Page, sync_playwright

from pdserve import Client, Slo
from pdserve.client.retry import Retries
from pdserve.core.errors import Overloaded, PdserveError
from pdserve.launch.running import Running
from tests.support.ui_browser import find_chromium, launch

FLAGS: Final = ("--model", "toy", "--prefill", "2", "--decode", "2", "--http", "0")
# Two sequences of 150 tokens do not fit into 14 blocks of 16, so the younger one is preempted after about 0.3 s.
_VALUES: Final = (
    "worker.toy_step_s=0.002",
    "worker.kv_blocks=14",
    "worker.max_batch=2",
    "router.max_queue=4",
    "router.policy=least-loaded",
)
SETTINGS: Final = tuple(flag for value in _VALUES for flag in ("--set", value))
TOKENS: Final = 150
PATIENT: Final = Slo(ttft_s=60.0, tpot_s=9.0)
BURST: Final = 24
LIMIT_S: Final = 1.0
WAIT_MS: Final = 30_000
GAP_S: Final = 0.05  # between two tokens of a preempted request; 25 steps


class Causes:
    """Each method causes an event, waits until the page lists it, and returns how long that took."""

    def __init__(self, cluster: Running, client: Client, page: Page) -> None:
        self._cluster, self._client, self._page = cluster, client, page

    def rejected(self) -> float:
        listed = self._listed("rejected")
        ended: queue.SimpleQueue[tuple[float, bool]] = queue.SimpleQueue()

        def ask(number: int) -> None:
            is_rejected = self._ask(number)
            ended.put((time.monotonic(), is_rejected))

        with ThreadPoolExecutor(BURST) as asking:
            for number in range(BURST):
                asking.submit(ask, number)
            for _ in range(BURST):
                at_s, is_rejected = ended.get()
                if is_rejected:
                    return listed(at_s)
        raise RuntimeError("no request of a burst was rejected")

    def drained(self) -> float:
        listed, resumed = self._listed("drained"), self._listed("resumed")
        began_s = time.monotonic()
        self._client.drain("p1")
        taken_s = listed(began_s)
        self._client.undrain("p1")
        resumed(began_s)
        return taken_s

    def preempted(self) -> float:
        listed = self._listed("preempted")
        began_s = time.monotonic()
        with ThreadPoolExecutor(8) as asking:
            streams = [asking.submit(self._preempted_s, number) for number in range(8)]
            listed_s = began_s + listed(began_s)
            return listed_s - min(one.result() for one in streams)

    def killed(self) -> float:
        listed, joined = self._listed("lost"), self._listed("joined")
        pid = self._cluster.pid("d1")
        began_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        taken_s = listed(began_s)
        joined(began_s)
        return taken_s

    def _preempted_s(self, number: int) -> float:
        """When the request's first gap began; infinite if it was not preempted."""
        stream = self._client.stream(f"{number}", max_tokens=TOKENS, ignore_eos=True, slo=PATIENT)
        try:
            times_s = [time.monotonic() for _ in stream]
        except Overloaded:
            return math.inf
        gaps = (first for first, second in itertools.pairwise(times_s) if second - first >= GAP_S)
        return next(gaps, math.inf) if stream.completion.timings.preemptions else math.inf

    def _ask(self, number: int) -> bool:
        """Whether it was rejected."""
        try:
            self._client.generate(f"{number}", max_tokens=TOKENS, ignore_eos=True, slo=PATIENT)
        except Overloaded:
            return True
        except PdserveError:  # of a killed worker
            pass
        return False

    def _listed(self, kind: str) -> Callable[[float], float]:
        """Marks the listed events. The result waits for a new one of a kind, and returns the time since its
        argument."""
        self._page.locator(".event").evaluate_all("all => all.forEach((one) => { one.dataset.seen = ''; })")
        new = self._page.locator(f".event[data-kind={kind}]:not([data-seen])").first

        def wait(began_s: float) -> float:
            new.wait_for(state="attached", timeout=WAIT_MS)
            return time.monotonic() - began_s

        return wait


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chromium", default=find_chromium(), help="path of the browser")
    flags = parser.parse_args()
    if flags.chromium is None:
        parser.error("Chromium is not installed; give its path with --chromium")
    with (
        Running.start(*FLAGS, *SETTINGS) as cluster,
        Client(cluster.target, retries=Retries(limit=0)) as client,
        sync_playwright() as playwright,
    ):
        page = launch(playwright, flags.chromium).new_page(viewport={"width": 1360, "height": 1010})
        page.goto(cluster.http_url.removesuffix("/v1") + "/ui")
        page.locator("[data-worker=d1]").wait_for()
        causes = Causes(cluster, client, page)
        print("event       median s   most s   within 1 s")
        page.select_option("#event-filter", "requests")
        for cause in (causes.rejected, causes.drained, causes.preempted, causes.killed):
            if cause == causes.drained:
                page.select_option("#event-filter", "workers")
            times_s = [cause() for _ in range(flags.rounds)]
            in_time = sum(one <= LIMIT_S for one in times_s)
            print(
                f"{cause.__name__:10} {statistics.median(times_s):9.3f} {max(times_s):8.3f} "
                f"{in_time:7d} of {len(times_s)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
