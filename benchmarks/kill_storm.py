"""Requests against a whole cluster whose workers are killed at random: exact tokens, or a typed error.

    python -m benchmarks.kill_storm --requests 1000 --every 5 --seed 1

Two clusters of two prefill and two decode workers serve the same requests of the bundled model, half of them greedy and
half sampled with a seed. The first cluster is undisturbed; in the second, the worker of a random request gets SIGKILL
every few seconds, and its supervisor restarts it. The exit status is 1 if a finished answer differs by one token, if an
unfinished one has no typed error or streamed a wrong token, or if the cluster does not become idle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.harness import table_head, table_row, unrest
from pdserve import AsyncClient, Client, PdserveError, Retries
from pdserve.core.errors import ConfigError
from pdserve.launch.running import Running

WORKERS: Final = ("p0", "p1", "d0", "d1")
FLAGS: Final = (
    *("--prefill", "2", "--decode", "2"),
    # Deterministic mode: answers do not depend on the batch, so two runs can be compared.
    *("--set", "worker.deterministic=on"),
    # A cluster without half of its workers is slow; no request is rejected for that.
    *("--set", "router.slo_ttft_s=120", "--set", "router.slo_tpot_s=20"),
)
WORKER: Final = r"\b[pd][01]\b"
REST_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StormRequest:
    prompt: list[int]
    options: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class StormAnswer:
    """The answer that a client received."""

    tokens: list[int] = field(default_factory=list)
    attempts: int = 0  # placements of a finished request
    error: BaseException | None = None
    took_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Result:
    requests: int
    seconds: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)  # of finished requests
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def finished(self) -> int:
        return self.attempts.total()


def requests(count: int, seed: int, *, longest: int, max_tokens: int, vocabulary: int) -> list[StormRequest]:
    """Prompts that share no block, of 2 to `longest` tokens; every second one sampled."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        prompt = [draw.randrange(1, vocabulary) for _ in range(draw.randint(2, longest))]
        options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        if number % 2:
            options |= {"temperature": 0.8, "top_p": 0.95, "seed": number}
        made.append(StormRequest(prompt=prompt, options=options))
    return made


async def serve(
    target: str, asked: Sequence[StormRequest], at_once: int, on_end: Callable[[StormAnswer], None], running: set[str]
) -> list[StormAnswer]:
    """Sends each request once: the client's own retries would hide what the cluster does.

    `running` holds the ids of the requests that have no whole answer yet.
    """
    gate = asyncio.Semaphore(at_once)

    async def one(client: AsyncClient, number: int, request: StormRequest) -> StormAnswer:
        answer, request_id = StormAnswer(), f"storm-{number}"
        async with gate:
            running.add(request_id)
            began_s = time.monotonic()
            try:
                stream = client.stream(request.prompt, request_id=request_id, **request.options)
                async for piece in stream:
                    answer.tokens.extend(piece.token_ids)
                answer.attempts = stream.completion.timings.attempts
            except Exception as error:  # judged later: only a PdserveError is a correct end
                answer.error = error
            running.discard(request_id)
            answer.took_s = time.monotonic() - began_s
        on_end(answer)
        return answer

    async with AsyncClient(target, retries=Retries(limit=0)) as client:
        return await asyncio.gather(*(one(client, number, request) for number, request in enumerate(asked)))


class Killer:
    """SIGKILL to a worker of a request in `running`, every few seconds: to kill an idle worker would prove little."""

    def __init__(self, cluster: Running, every_s: float, seed: int, at_most: int | None, running: set[str]) -> None:
        self._cluster, self._every_s, self._draw = cluster, every_s, random.Random(seed)
        self._at_most, self._running = at_most, running
        self.kills: Counter[str] = Counter()
        self._dead: set[int] = set()

    async def run(self) -> None:
        async with AsyncClient(self._cluster.target, retries=Retries(limit=0)) as client:
            while self._at_most is None or self.kills.total() < self._at_most:
                await asyncio.sleep(self._every_s)
                name = await self._worker_of_a_request(client)
                if name is None:
                    continue
                pid = self._cluster.pid(name)
                os.kill(pid, signal.SIGKILL)
                self._dead.add(pid)
                self.kills[name] += 1

    async def _worker_of_a_request(self, client: AsyncClient) -> str | None:
        """None where each request waits, or runs on a worker that is dead already."""
        for request_id in self._draw.sample(sorted(self._running), len(self._running)):
            try:
                found = await client.explain(request_id)
            except PdserveError:  # the router has not received it yet
                continue
            if found.chosen is None or request_id not in self._running:
                continue
            chosen = found.chosen
            name = chosen.prefill_worker if found.stage == "prefilling" else chosen.decode_worker
            if name in WORKERS and self._cluster.pid(name) not in self._dead:
                return name
        return None


def judge(asked: Sequence[StormRequest], calm: Sequence[StormAnswer], stormy: Sequence[StormAnswer]) -> Result:
    result = Result(requests=len(asked))
    for number, (expected, seen) in enumerate(zip(calm, stormy, strict=True)):
        if expected.error is not None:
            result.wrong.append(f"request {number} failed in peace: {expected.error!r}")
        elif seen.error is None:
            result.attempts[seen.attempts] += 1
            if seen.tokens != expected.tokens:
                result.wrong.append(f"request {number}: {seen.tokens}, in peace {expected.tokens}")
        else:
            result.errors[f"{type(seen.error).__name__}: {re.sub(WORKER, 'a worker', str(seen.error))}"] += 1
            if not isinstance(seen.error, PdserveError):
                result.wrong.append(f"request {number} ended untyped: {seen.error!r}")
            if seen.tokens != expected.tokens[: len(seen.tokens)]:
                result.wrong.append(f"request {number} streamed wrong tokens before its error: {seen.tokens}")
    return result


ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1"}


def in_peace(
    asked: Sequence[StormRequest], flags: Sequence[str], at_once: int, on_end: Callable[[StormAnswer], None]
) -> list[StormAnswer]:
    with Running.start(*flags, env=ENVIRONMENT) as cluster:
        return asyncio.run(serve(cluster.target, asked, at_once, on_end, set()))


def in_storm(
    asked: Sequence[StormRequest],
    calm: Sequence[StormAnswer],
    flags: Sequence[str],
    *,
    every_s: float,
    seed: int,
    at_once: int,
    kills: int | None = None,
    on_end: Callable[[StormAnswer], None] = lambda answer: None,
) -> Result:
    """`calm` is what the same requests get undisturbed; at most `kills` workers are killed, else one per `every_s`."""

    async def storm(cluster: Running) -> tuple[list[StormAnswer], Counter[str], float]:
        running: set[str] = set()
        killer = Killer(cluster, every_s, seed, kills, running)
        killing = asyncio.create_task(killer.run())
        began_s = time.monotonic()
        try:
            answers = await serve(cluster.target, asked, at_once, on_end, running)
        finally:
            ended = killing.cancel()
        if not ended:
            killing.result()  # the reason why it stopped killing
        return answers, killer.kills, time.monotonic() - began_s

    with Running.start(*flags, env=ENVIRONMENT) as cluster:
        stormy, killed, seconds = asyncio.run(storm(cluster))
        with Client(cluster.target) as client:
            left = unrest(client, len(WORKERS), REST_S)
    result = judge(asked, calm, stormy)
    result.seconds, result.kills = seconds, killed
    if left:
        result.wrong.append(left)
    return result


def show(result: Result) -> None:
    kills = ", ".join(f"{name} {count}" for name, count in sorted(result.kills.items()))
    print(f"{result.requests} requests in {result.seconds:.0f} s, {result.kills.total()} workers killed ({kills})")
    print(table_head(("end", "requests")))
    for attempts, count in sorted(result.attempts.items()):
        print(table_row((f"finished, exact, {attempts} placement{'s' * (attempts > 1)}", count)))
    for row in (*result.errors.most_common(), ("wrong", len(result.wrong))):
        print(table_row(row))
    for line in result.wrong[:20]:
        print("WRONG:", line)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.kill_storm", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--every", type=float, default=5.0, metavar="S", help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--longest", type=int, default=400, help="tokens of the longest prompt")
    parser.add_argument("up", nargs="*", help="further flags of `pdserve up`, after --")
    args = parser.parse_args()
    if args.requests < 1 or args.every <= 0 or args.at_once < 1:
        raise ConfigError("requests, every, at-once", (args.requests, args.every, args.at_once), "above 0")
    asked = requests(
        args.requests, args.seed, longest=args.longest, max_tokens=args.max_tokens, vocabulary=_vocabulary()
    )
    done = 0

    def on_end(answer: StormAnswer) -> None:
        nonlocal done
        done += 1
        if done % 20 == 0:
            print(f"\r{done} of {2 * len(asked)}: in peace, then not", end="", file=sys.stderr, flush=True)

    flags = (*FLAGS, *args.up)
    calm = in_peace(asked, flags, args.at_once, on_end)
    storm = {"every_s": args.every, "seed": args.seed, "at_once": args.at_once}
    result = in_storm(asked, calm, flags, on_end=on_end, **storm)
    print(file=sys.stderr)
    show(result)
    return int(bool(result.wrong))


def _vocabulary() -> int:
    from pdserve.launch.settings import bundled_model

    return int(json.loads((bundled_model() / "config.json").read_text())["vocab_size"])


if __name__ == "__main__":
    sys.exit(main())
