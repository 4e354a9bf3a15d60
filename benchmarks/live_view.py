"""Measures the cost of an open live view: throughput, CPU time of router and gateway, and the router's memory.

    python -m benchmarks.live_view [--rate 60] [--seconds 10] [--rounds 10] [--viewers 8]
        [--callers 16] [--json]

Turns without viewers and with some alternate, in this order and in the reverse, with equal Poisson arrivals of gRPC
requests (16 tokens each) to toy workers, which compute in microseconds. Then such turns alternate with `--callers`
callers that send without a pause, which measures throughput. A viewer reads the gateway's event stream, as the page
does; `benchmarks.live_page` and `benchmarks.ui_frame_rate` measure a browser. Ratios are of pairs of adjacent turns.
Client, servers and viewers share this machine's cores. The router makes every viewer's frames separately, so the cost
of one is that of all, divided by their number; several are used because the cost of one is below the noise.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import threading
import time
import urllib.request
from dataclasses import asdict, dataclass

import psutil  # type: ignore[import-untyped]

from benchmarks.http import Seen, cpu_s, turn
from pdserve import AsyncClient
from pdserve.core.json_text import to_json
from pdserve.launch.running import Running
from router.service.cluster import MAX_VIEWERS

TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewTurn:
    is_watched: bool
    requests: int
    failed: int
    router_s: float  # CPU
    gateway_s: float  # CPU
    router_bytes: int  # resident memory at the end
    frames: int


class Viewer:
    """Reads the event stream on a thread of its own."""

    def __init__(self, url: str) -> None:
        self.frames = 0
        self._answer = urllib.request.urlopen(f"{url}/ui/events")
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for line in self._answer:
                self.frames += line.startswith(b"data: ")
        except (OSError, ValueError, AttributeError):
            pass  # closed while reading

    def close(self) -> None:
        self._answer.close()


async def measure(flags: argparse.Namespace, cluster: Running) -> tuple[list[ViewTurn], list[tuple[bool, float]]]:
    """The turns of the open loop, and of the closed loop: whether with viewers, and answers per second."""
    router, gateway = (psutil.Process(cluster.pid(name)) for name in ("router", "gateway"))
    url = cluster.http_url.removesuffix("/v1")
    turns: list[ViewTurn] = []
    async with AsyncClient(cluster.target) as sdk:

        async def ask(prompt: str, tokens: int) -> tuple[float, int]:
            # Equal prompts in the second turn of a pair would be in the prefix cache.
            done = await sdk.generate(f"{len(turns)} {prompt}", max_tokens=tokens, ignore_eos=True)
            return done.timings.ttft_s, 1

        await turn(ask, flags.rate, 3.0, TOKENS, 0, Seen())
        order = [is_watched for number in range(flags.rounds) for is_watched in _pair(number)]
        for number, is_watched in enumerate(order):
            viewers = await _viewers(url, flags.viewers if is_watched else 0)
            seen, before = Seen(), (cpu_s(router), cpu_s(gateway))
            count = await turn(ask, flags.rate, flags.seconds, TOKENS, number // 2, seen)
            turns.append(
                ViewTurn(
                    is_watched=is_watched,
                    requests=count,
                    failed=seen.failed,
                    router_s=cpu_s(router) - before[0],
                    gateway_s=cpu_s(gateway) - before[1],
                    router_bytes=router.memory_info().rss,
                    frames=sum(one.frames for one in viewers),
                )
            )
            for one in viewers:
                one.close()
        rates = []
        for number, is_watched in enumerate(order):
            viewers = await _viewers(url, flags.viewers if is_watched else 0)
            rates.append((is_watched, await _answers_per_s(sdk, flags.callers, flags.seconds, number)))
            for one in viewers:
                one.close()
    return turns, rates


def _pair(number: int) -> tuple[bool, bool]:
    return (False, True) if number % 2 == 0 else (True, False)


async def _viewers(url: str, count: int) -> list[Viewer]:
    return [await asyncio.to_thread(Viewer, url) for _ in range(count)]


async def _answers_per_s(sdk: AsyncClient, callers: int, seconds: float, turn_number: int) -> float:
    begin_s, answers = time.perf_counter(), 0

    async def call(caller: int) -> None:
        nonlocal answers
        while time.perf_counter() - begin_s < seconds:
            await sdk.generate(f"{turn_number} {caller} {answers}", max_tokens=TOKENS, ignore_eos=True)
            answers += 1

    await asyncio.gather(*(call(caller) for caller in range(callers)))
    return answers / (time.perf_counter() - begin_s)


def throughput_ratios(rates: list[tuple[bool, float]], viewers: int) -> list[float]:
    """Throughput with one viewer, over that without one, of each pair of turns."""
    found = []
    for first, second in zip(rates[::2], rates[1::2], strict=True):
        (_, plain), (_, watched) = sorted((first, second))
        found.append(1.0 + (watched / plain - 1.0) / viewers)
    return found


def ratios(turns: list[ViewTurn], viewers: int) -> list[float]:
    """CPU of the router per request with one viewer, over that without one, of each pair of turns."""
    found = []
    for first, second in zip(turns[::2], turns[1::2], strict=True):
        plain, watched = (second, first) if first.is_watched else (first, second)
        ratio = (watched.router_s / watched.requests) / (plain.router_s / plain.requests)
        found.append(1.0 + (ratio - 1.0) / viewers)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=60.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a turn")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of turns")
    parser.add_argument("--viewers", type=int, default=MAX_VIEWERS, help="viewers in a turn with some")
    parser.add_argument("--callers", type=int, default=16, help="callers that send without a pause")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    with Running.start("--model", "toy", "--http", "0") as cluster:
        turns, rates = asyncio.run(measure(flags, cluster))
    print("viewers  requests  failed  router CPU ms/request  gateway CPU s  router MiB  frames")
    for one in turns:
        print(
            f"{flags.viewers if one.is_watched else 0:7d} {one.requests:9d} {one.failed:7d} "
            f"{one.router_s / one.requests * 1e3:22.3f} {one.gateway_s:14.2f} {one.router_bytes / 2**20:11.1f} "
            f"{one.frames:7d}"
        )
    found = ratios(turns, flags.viewers)
    print(
        f"CPU of the router with one viewer: {statistics.median(found):.3f} of that without one "
        f"(pairs: {min(found):.3f} to {max(found):.3f})"
    )
    found = throughput_ratios(rates, flags.viewers)
    print(
        f"Throughput with one viewer: {statistics.median(found):.3f} of that without one "
        f"(pairs: {min(found):.3f} to {max(found):.3f}); {statistics.median(rate for _, rate in rates):.0f} answers/s"
    )
    if flags.json:
        print(to_json([asdict(one) for one in turns]))


if __name__ == "__main__":
    main()
