"""Finds where the tokens of an answer are delayed, so that they reach the client in one burst.

    python -m benchmarks.bursts [--requests 160] [--tokens 20] [--at-once 1] [--async] [-- FLAGS OF pdserve up]

It streams answers one after the other and records the time of each token in three places: at the decode worker (which
reports how long it decoded), at the router (from its recording), and at the client. All three processes must share one
host, and so one clock. An answer is a burst if it reached the client in less than SHARE of its decode time. It was
delayed before the router if it already reached the router in a burst, otherwise after the router. Measure on a quiet
machine: on a busy one, any process may be delayed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.openloop import percentile
from pdserve import AsyncClient, Client
from pdserve.core.protocol import FirstToken, TokensArrived
from pdserve.launch.running import Running
from router.recording import replay

SHARE: Final = 0.3
PROMPTS: Final = (
    "def fib(n):",
    "class Finder:\n    def __init__(self, path):\n",
    "import os\n\nfor name in os.listdir():\n",
)


@dataclass(slots=True, kw_only=True)
class BurstAnswer:
    """When each token was where; seconds of one clock."""

    asked_s: float = 0.0
    client_s: list[float] = field(default_factory=list)
    router_s: list[float] = field(default_factory=list)
    decode_s: float = 0.0  # first to last token that the decode worker sampled, by its own clock

    @property
    def is_burst(self) -> bool:
        return _span_s(self.client_s) < SHARE * self.decode_s

    @property
    def held_up(self) -> str:
        """Where a burst arose."""
        return "before the router" if _span_s(self.router_s) < SHARE * self.decode_s else "behind the router"


def _span_s(times: Sequence[float]) -> float:
    return times[-1] - times[0] if times else 0.0


def read_recording(lines: Iterable[str], answers: dict[str, BurstAnswer]) -> None:
    """Adds the router's times, and how long each was decoded."""
    for step in replay.read(lines):
        event = step.event
        if isinstance(event, FirstToken) and event.request_id in answers:
            answers[event.request_id].router_s.append(step.now_s)
        elif isinstance(event, TokensArrived):
            for row in event.rows:
                if (answer := answers.get(row.request_id)) is not None:
                    answer.router_s += [step.now_s] * len(row.tokens)
                    answer.decode_s = max(answer.decode_s, row.decode_s)


def ask_in_turn(target: str, count: int, tokens: int) -> dict[str, BurstAnswer]:
    answers: dict[str, BurstAnswer] = defaultdict(BurstAnswer)
    with Client(target) as client:
        for number in range(count):
            name = f"burst-{number}"
            answers[name].asked_s = time.monotonic()
            stream = client.stream(prompt(number), max_tokens=tokens, ignore_eos=True, request_id=name)
            for piece in stream:
                answers[name].client_s += [time.monotonic()] * len(piece.token_ids)
    return answers


async def ask_at_once(target: str, count: int, tokens: int, at_once: int) -> dict[str, BurstAnswer]:
    answers: dict[str, BurstAnswer] = defaultdict(BurstAnswer)
    left = iter(range(count))

    async def one(client: AsyncClient) -> None:
        for number in left:
            name = f"burst-{number}"
            answers[name].asked_s = time.monotonic()
            stream = client.stream(prompt(number), max_tokens=tokens, ignore_eos=True, request_id=name)
            async for piece in stream:
                answers[name].client_s += [time.monotonic()] * len(piece.token_ids)

    async with AsyncClient(target) as client:
        await asyncio.gather(*(one(client) for _ in range(at_once)))
    return answers


def prompt(number: int) -> str:
    return f"# {number}\n{PROMPTS[number % len(PROMPTS)]}"


def report(answers: Sequence[BurstAnswer]) -> dict[str, object]:
    bursts = [one for one in answers if one.is_burst]
    behind = [
        client_s - router_s
        for one in answers
        for router_s, client_s in zip(one.router_s, one.client_s, strict=False)  # a stream may have been cut
    ]
    return {
        "answers": len(answers),
        "bursts": len(bursts),
        "held_up": dict(Counter(one.held_up for one in bursts)),
        "first_piece_p50_s": percentile([one.client_s[0] - one.asked_s for one in answers], 0.5),
        "first_piece_of_bursts_p50_s": percentile([one.client_s[0] - one.asked_s for one in bursts], 0.5),
        "decode_p50_s": percentile([one.decode_s for one in answers], 0.5),
        "router_to_client_p50_s": percentile(behind, 0.5),
        "router_to_client_p99_s": percentile(behind, 0.99),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=1, help="answers at a time; more than one needs --async")
    parser.add_argument("--async", action="store_true", dest="is_async", help="the asyncio client")
    parser.add_argument("up", nargs="*", metavar="FLAG", help="of pdserve up, after --")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "recording.jsonl"
        wide = ("--set", "router.slo_ttft_s=60", "--set", "router.slo_tpot_s=10")  # nothing is rejected
        with Running.start(*wide, "--set", f"router.record={recording}", *flags.up) as cluster:
            if flags.is_async or flags.at_once > 1:
                answers = asyncio.run(ask_at_once(cluster.target, flags.requests, flags.tokens, flags.at_once))
            else:
                answers = ask_in_turn(cluster.target, flags.requests, flags.tokens)
        with recording.open(encoding="utf-8") as lines:
            replay.read_settings(lines.readline())
            read_recording(lines, answers)
    print(json.dumps(report(list(answers.values())), indent=1))


if __name__ == "__main__":
    main()
