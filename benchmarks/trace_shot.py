"""Takes the picture of a request's trace for docs/telemetry.md: a live cluster, Arize Phoenix, and headless Chromium.

    python -m benchmarks.trace_shot [--out docs/images/trace.png]

Needs `make clients CLIENTS=phoenix`, the extra `ui-test`, and Chromium (`--chromium`).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import sync_playwright

from benchmarks.clients.programs import python_of
from pdserve import Client
from pdserve.core.results import Phase
from pdserve.launch.running import Running
from pdserve.telemetry import names
from tests.support.phoenix import Phoenix, running_phoenix
from tests.support.ui_browser import find_chromium, launch

PROMPT: Final = "class Finder:\n" + "    def find(self, path):\n        return path\n" * 40
REQUESTS: Final = 12
WAIT_S: Final = 60.0


def remote_request(phoenix: Phoenix) -> dict[str, Any]:
    """The span of the request with the longest TTFT of those that were prefilled and decoded by different workers."""
    with (
        Running.start("--prefill", "1", "--decode", "1", "--otlp", phoenix.otlp) as cluster,
        Client(cluster.target) as client,
        ThreadPoolExecutor(4) as asking,
    ):
        for number in range(REQUESTS):
            asking.submit(client.generate, f"# {number}\n{PROMPT}", max_tokens=48, ignore_eos=True)
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:  # until they are stored
        spans = phoenix.spans()
        # On a busy machine, the router may learn of a decode step only at its end, and then shows none.
        decoded = {one["parent_id"] for one in spans if one["name"] == names.PHASE_SPANS[Phase.DECODE]}
        found = [one for one in spans if one["attributes"].get(names.PATH) == "remote"]
        found = [one for one in found if one["context"]["span_id"] in decoded]
        if found:
            return max(found, key=lambda one: float(one["attributes"][names.TTFT_S]))
        time.sleep(0.5)
    raise RuntimeError("no request was placed on two workers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images/trace.png"))
    parser.add_argument("--chromium", default=find_chromium(), help="path of the browser")
    flags = parser.parse_args()
    python = python_of("phoenix")
    if flags.chromium is None or python is None:
        parser.error("Chromium, or the environment of Phoenix (`make clients CLIENTS=phoenix`), is not installed")
    with (
        tempfile.TemporaryDirectory() as folder,
        running_phoenix(python, Path(folder)) as phoenix,
        sync_playwright() as playwright,
    ):
        request = remote_request(phoenix)
        browser = launch(playwright, flags.chromium)
        page = browser.new_page(viewport={"width": 1500, "height": 900}, color_scheme="dark")
        page.goto(phoenix.trace_page(request["context"]["trace_id"]))
        page.click("[aria-label='Collapse side navigation']")
        page.get_by_text("pdserve.deliver").last.wait_for(state="attached")
        page.get_by_text("Attributes", exact=True).first.click()
        page.get_by_text("gen_ai").first.wait_for()
        page.wait_for_timeout(1000.0)  # for the animation of the panel
        page.screenshot(path=flags.out)
        browser.close()
    print(f"{flags.out}: {flags.out.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
