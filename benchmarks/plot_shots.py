"""Writes the charts of the docs with the commands themselves, and takes a picture of each in headless Chromium.

    python -m benchmarks.plot_shots [--out docs/images] [--only NAME ...]

Needs the extra `ui-test` and Chromium (`--chromium`). `simulate` and `plan` give equal charts for equal commits.
`bench` and `explain` measure a cluster of the toy model in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
from pathlib import Path
from typing import Final

from playwright.sync_api import Browser, sync_playwright

from pdserve.cli.main import main as pdserve
from pdserve.client.sync import Client
from pdserve.testing.cluster import Cluster
from tests.support.ui_browser import find_chromium, launch

SIMULATE: Final = (
    "simulate",
    "--duration",
    "60",
    "--rates",
    "1,1.5,2,2.5",
    "--policy",
    "goodput,round-robin,colocated",
)
PLAN: Final = (
    *("plan", "--gpus", "4", "--profile", "a100-80g.opt-13b.fp16", "--lengths", "1000,100"),
    *("--slo-ttft", "0.4", "--slo-tpot", "0.035"),
)
BENCH: Final = (
    *("bench", "--rate", "5,10,20,30", "--requests", "100", "--input-tokens", "64:512", "--output-tokens", "8:32"),
    *("--ttft", "0.25", "--tpot", "0.03"),
)
NAMES: Final = ("simulate", "plan", "bench", "explain")


def draw(name: str, path: Path) -> None:
    """The chart of a command as an SVG file."""
    if name in ("simulate", "plan"):
        run(*(SIMULATE if name == "simulate" else PLAN), "--plot", str(path))
        return
    with Cluster(prefill=2, decode=2, worker={"toy_step_s": 0.01}) as cluster:
        if name == "bench":
            run(*BENCH, "--target", cluster.address, "--plot", str(path))
            return
        with Client(cluster.address) as client:
            for number in range(8):  # until the router has learned the cost of steps
                found = client.generate("a prompt " * 40, max_tokens=12, request_id=f"request-{number}")
        run("explain", found.request_id, "--target", cluster.address, "--plot", str(path))


def run(*words: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        status = pdserve(words)
    if status != 0:
        raise SystemExit(f"pdserve {' '.join(words)}: status {status}")


def shoot(browser: Browser, svg: Path, png: Path) -> None:
    page = browser.new_page()
    page.set_content(svg.read_text(encoding="utf-8"))
    page.locator("svg").first.screenshot(path=png)
    page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--only", nargs="*", choices=NAMES, default=list(NAMES))
    parser.add_argument("--chromium", default=find_chromium(), help="path of the browser")
    args = parser.parse_args()
    if args.chromium is None:
        parser.error("Chromium is not installed; give its path with --chromium")
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:  # before Playwright, whose event loop runs on this thread
            draw(name, Path(folder) / f"{name}.svg")
        with sync_playwright() as playwright:
            browser = launch(playwright, args.chromium)
            for name in args.only:
                path = args.out / f"plot-{name}.png"
                shoot(browser, Path(folder) / f"{name}.svg", path)
                print(f"{path}: {path.stat().st_size / 1024:.0f} KB")
            browser.close()


if __name__ == "__main__":
    main()
