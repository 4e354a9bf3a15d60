"""Requests against a whole cluster whose processes are killed at random: exact answers, or a typed error.

    python -m benchmarks.kill_storm --requests 1000 --every 5 --seed 1
    python -m benchmarks.kill_storm --routers 2 --requests 1000 --every 3 --waits
    python -m benchmarks.kill_storm --engine vllm --kills 10 [-- --set worker.engine_python=PYTHON]

Two clusters of two prefill and two decode workers serve the same requests of the bundled model. The first cluster is
undisturbed; in the second, the worker of a random request gets SIGKILL every few seconds, and its supervisor restarts
it. The exit status is 1 if an answer differs, if an unfinished one has no typed error or a wrong beginning, or if the
cluster does not become idle.

With --routers N there are N routers, and every second SIGKILL is one to a router. Half of the requests come from the
SDK, and a quarter each from a gRPC stub and from HTTP clients of a gateway in its own process. Each client sends greedy
and sampled requests, some with three answers, a grammar, logprobs, or a tool. Only those of the stub may get an error.
With --waits the next kill waits until the killed process serves again, however slow the machine is. With --engine toy
the workers start quickly, take TOY_STEP_S for each step, and compute no grammar. Their tokens are known, so there is no
undisturbed run. --seconds ends the storm earlier.

With --engine vllm the workers run vLLM in float32, not compiled. Its logits may depend on the batch, so there is no
undisturbed run: transformers in float64 judges every token, as in the tests (tests/oracle.py), and may find less than
1 % near-ties. Such workers start slowly: the next kill waits until the killed worker is ready again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, final

from benchmarks.harness import table_head, table_row, unrest
from benchmarks.kill_storm_calls import (
    SIMPLE,
    WORKERS,
    By,
    Judge,
    Kind,
    Result,
    Senders,
    StormAnswer,
    StormRequest,
    judge,
    of_toy,
    requests,
    same_as,
    same_as_float64,
)
from pdserve import AsyncClient, Client, PdserveError, Retries
from pdserve.core.errors import ConfigError
from pdserve.core.protocol import FirstToken, TokensArrived
from pdserve.engine import toy
from pdserve.launch.running import Running
from pdserve.launch.settings import bundled_model
from pdserve.progress import ProgressLine
from router.recording.replay import RecordingError, read
from router.state.interface import RequestArrived
from tests.oracle import MAX_TIES, Oracle, Verdict

FLAGS: Final = (
    *("--prefill", "2", "--decode", "2"),
    # A cluster without half of its workers is slow; no request is rejected for that.
    *("--set", "router.slo_ttft_s=120", "--set", "router.slo_tpot_s=20"),
)
TOY_STEP_S: Final = 0.1
OF_ENGINE: Final = {
    # Deterministic mode: answers do not depend on the batch, so two runs can be compared.
    "own": ("--set", "worker.deterministic=on"),
    "toy": ("--model", "toy", "--set", f"worker.toy_step_s={TOY_STEP_S}"),
    "vllm": ("--engine", "vllm", "--set", "worker.dtype=float32", "--set", "worker.cuda_graphs=false"),
}
FOR_TOY: Final = tuple(kind for kind in Kind if kind not in (Kind.GRAMMAR, Kind.TOOLS))
CLIENTS: Final = (By.SDK, By.HTTP, By.SDK, By.PLAIN)
START_S: Final = 600.0  # four workers that load vLLM at once
REST_S: Final = 60.0
POLL_S: Final = 0.2
ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1"}

OnEnd = Callable[[StormAnswer], None]


async def serve(
    target: str,
    http_url: str,
    asked: Sequence[StormRequest],
    at_once: int,
    on_end: OnEnd,
    running: set[str],
    is_over: Callable[[], bool] = lambda: False,
) -> list[StormAnswer | None]:
    """Sends each request once. None for those that were not sent before `is_over`.

    `running` holds the ids of the requests that have no whole answer yet.
    """
    gate = asyncio.Semaphore(at_once)

    async def one(senders: Senders, number: int, request: StormRequest) -> StormAnswer | None:
        request_id = f"storm-{number}"
        async with gate:
            if is_over():
                return None
            running.add(request_id)
            answer = await senders.send(request, request_id)
            running.discard(request_id)
        on_end(answer)
        return answer

    async with Senders.connected(target, http_url) as senders:
        return await asyncio.gather(*(one(senders, number, request) for number, request in enumerate(asked)))


@contextlib.contextmanager
def gateway(cluster: Running, *, is_needed: bool) -> Iterator[str]:
    """The URL of the cluster's gateway, or of one in a process of its own: several routers have none."""
    if cluster.http_url or not is_needed:
        yield cluster.http_url
        return
    command = [sys.executable, "-m", "pdserve.gateway", "--router", cluster.target, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://{process.stdout.readline().split()[-1]}/v1"
    finally:
        process.terminate()
        process.wait(REST_S)


@final
class Killer:
    """SIGKILL to a worker of a request in `running`, every few seconds: to kill an idle worker would prove little. If
    there are `routers`, every second one is to one of them.

    If `waits`, the worker that was killed last must be ready again before the next kill.
    """

    def __init__(
        self,
        cluster: Running,
        every_s: float,
        seed: int,
        at_most: int | None,
        running: set[str],
        *,
        waits: bool = False,
        routers: Sequence[str] = (),
    ) -> None:
        self._routers = routers
        self._cluster, self._every_s, self._draw = cluster, every_s, random.Random(seed)
        self._at_most, self._running, self._waits = at_most, running, waits
        self.kills: Counter[str] = Counter()
        self._dead: set[int] = set()

    @property
    def is_done(self) -> bool:
        return self._at_most is not None and self.kills.total() >= self._at_most

    async def run(self) -> None:
        async with AsyncClient(self._cluster.target, retries=Retries(limit=0)) as client:
            while not self.is_done:
                await asyncio.sleep(self._every_s)
                is_for_router = bool(self._routers) and self.kills.total() % 2 == 0
                name = self._living_router() if is_for_router else await self._worker_of_a_request(client)
                if name is None:
                    continue
                pid = self._cluster.pid(name)
                os.kill(pid, signal.SIGKILL)
                self._dead.add(pid)
                self.kills[name] += 1
                while self._waits and not await self._is_ready(client, name):
                    await asyncio.sleep(POLL_S)

    def _living_router(self) -> str | None:
        living = [name for name in self._routers if self._cluster.pid(name) not in self._dead]
        return self._draw.choice(living) if living else None

    async def _is_ready(self, client: AsyncClient, name: str) -> bool:
        if self._cluster.pids()[name] in self._dead or name in self._routers:
            return self._cluster.pids()[name] not in self._dead
        try:
            seen = await client.topology()
        except PdserveError:  # its router has just been killed
            return False
        return any(one.worker_id == name and one.is_connected for one in seen.workers)

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


def in_peace(
    asked: Sequence[StormRequest], flags: Sequence[str], at_once: int, on_end: OnEnd
) -> list[StormAnswer | None]:
    with (
        Running.start(*flags, env=ENVIRONMENT, timeout_s=START_S) as cluster,
        gateway(cluster, is_needed=has_http(asked)) as url,
    ):
        return asyncio.run(serve(cluster.target, url, asked, at_once, on_end, set()))


def has_http(asked: Sequence[StormRequest]) -> bool:
    return any(one.by is By.HTTP for one in asked)


def in_storm(
    asked: Sequence[StormRequest],
    wrong_of: Judge,
    flags: Sequence[str],
    *,
    every_s: float,
    seed: int,
    at_once: int,
    kills: int | None = None,
    waits: bool = False,
    routers: Sequence[str] = (),
    longest_s: float = math.inf,
    on_end: Callable[[StormAnswer, int], None] = lambda answer, kills: None,
) -> Result:
    """At most `kills` processes are killed, else one per `every_s`. If `waits`, each must be ready again before the
    next kill, and no request is sent after the last one. None is sent after `longest_s`. `on_end` also receives the
    number of kills so far."""

    async def storm(cluster: Running, url: str) -> tuple[list[StormAnswer | None], Counter[str], float]:
        running: set[str] = set()
        killer = Killer(cluster, every_s, seed, kills, running, waits=waits, routers=routers)
        killing = asyncio.create_task(killer.run())
        began_s = time.monotonic()
        try:
            is_over = lambda: (waits and killer.is_done) or time.monotonic() - began_s > longest_s  # noqa: E731
            ended = lambda answer: on_end(answer, killer.kills.total())  # noqa: E731
            stormy = await serve(cluster.target, url, asked, at_once, ended, running, is_over)
        finally:
            has_stopped = not killing.cancel()
        if has_stopped:
            killing.result()  # the reason why it stopped killing
        return stormy, killer.kills, time.monotonic() - began_s

    with tempfile.TemporaryDirectory() as folder:
        recorded = ("--record", f"{folder}/run.jsonl") if routers else ()
        with Running.start(*flags, *recorded, env=ENVIRONMENT, timeout_s=START_S) as cluster:
            with gateway(cluster, is_needed=has_http(asked)) as url:
                stormy, killed, seconds = asyncio.run(storm(cluster, url))
            with Client(cluster.target, retries=Retries(limit=8)) as client:  # a router may just have been killed
                left = unrest(client, len(WORKERS), START_S if waits else REST_S)
        result = judge(asked, stormy, wrong_of)
        result.computed = [work for path in sorted(Path(folder).iterdir()) for work in resumed_work(path)]
    result.seconds, result.kills = seconds, killed
    if left:
        result.wrong.append(left)
    return result


def resumed_work(recording: Path) -> Iterator[tuple[int, int]]:
    """Of each resumed answer in the recording of a router: its tokens with those of its prompt, and how many of them
    were computed again until its next token."""
    waiting: dict[str, int] = {}
    with recording.open() as lines, contextlib.suppress(RecordingError):  # the last line of a killed router may be cut
        next(lines, "")  # the settings
        for step in read(lines):
            event = step.event
            if isinstance(event, RequestArrived):
                waiting.pop(event.request_id, None)
                if event.output_ids and event.finish is None:
                    waiting[event.request_id] = event.num_prompt_tokens + len(event.output_ids)
            for request_id, cached_tokens in _first_tokens(event):
                if request_id in waiting:
                    num_tokens = waiting.pop(request_id)
                    yield num_tokens, num_tokens - cached_tokens


def _first_tokens(event: object) -> Iterable[tuple[str, int]]:
    """(request id, cached tokens) of the attempts whose first token the event has."""
    if isinstance(event, FirstToken):
        return [(event.key.request_id, event.cached_tokens)]
    if isinstance(event, TokensArrived):
        return [(row.key.request_id, row.cached_tokens) for row in event.rows if row.prefill_s]
    return ()


# --- command ------------------------------------------------------------------------------------------------------


def show(result: Result) -> None:
    kills = ", ".join(f"{name} {count}" for name, count in sorted(result.kills.items()))
    print(f"{result.requests} requests in {result.seconds:.0f} s, {result.kills.total()} processes killed ({kills})")
    placements = ", ".join(f"{count} after {number}" for number, count in sorted(result.attempts.items()))
    print(f"placements of finished requests: {placements}; the slowest request took {result.slowest_s:.1f} s")
    if result.computed:
        tokens, computed = zip(*result.computed, strict=True)
        print(
            f"{len(tokens)} resumed answers in the routers' recordings: {sum(computed)} of {sum(tokens)} tokens were "
            f"computed again, {statistics.median(computed):.0f} in the median, {max(computed)} at most"
        )
    print(table_head(("requests of", "exact", "of them resumed", "failed", "wrong")))
    for key in sorted({key for key, _ in result.ends}, key=lambda one: (isinstance(one, Kind), one.value)):
        cells = [result.ends[key, end] for end in ("exact", "resumed", "failed", "wrong")]
        print(table_row((key.value, *cells)))
    for error, count in result.errors.most_common():
        print(f"{count} x {error}")
    print(f"{len(result.wrong)} violations")
    for line in result.wrong[:20]:
        print("WRONG:", line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=OF_ENGINE, default="own", help="of the workers (own)")
    parser.add_argument("--requests", type=int, default=1000, help="at most (1000)")
    parser.add_argument("--kills", type=int, metavar="N", help="at most; with --engine vllm the storm ends then (10)")
    parser.add_argument("--every", type=float, default=5.0, metavar="S", help="seconds before each kill (5)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--longest", type=int, default=400, help="tokens of the longest prompt")
    parser.add_argument("--routers", type=int, default=0, metavar="N", help="kill routers too, of which there are N")
    parser.add_argument("--seconds", type=float, default=math.inf, help="send no request after this time")
    parser.add_argument("--waits", action="store_true", help="kill nothing until the last killed process serves again")
    parser.add_argument("up", nargs="*", help="further flags of `pdserve up`, after --")
    args = parser.parse_args()
    if args.requests < 1 or args.every <= 0 or args.at_once < 1 or (args.kills or 1) < 1 or args.routers < 0:
        given = (args.requests, args.every, args.at_once, args.kills, args.routers)
        raise ConfigError("requests, every, at-once, kills, routers", given, "above 0")
    if args.routers and args.engine == "vllm":
        raise ConfigError("routers", args.routers, "none with --engine vllm")
    is_toy, model = args.engine == "toy", bundled_model()
    vocabulary = toy.VOCAB_SIZE - 1 if is_toy else int(json.loads((model / "config.json").read_text())["vocab_size"])
    asked = requests(
        args.requests,
        args.seed,
        longest=args.longest,
        max_tokens=args.max_tokens,
        vocabulary=vocabulary,
        by=CLIENTS if args.routers else (By.PLAIN,),
        kinds=SIMPLE if not args.routers else FOR_TOY if is_toy else tuple(Kind),
    )
    if is_toy:  # it may end an answer early
        asked = [replace(one, options={**one.options, "ignore_eos": False}) for one in asked]
    flags = (*FLAGS, *OF_ENGINE[args.engine], *args.up)
    if args.routers:
        flags += ("--routers", str(args.routers)) if args.routers > 1 else ("--http", "0", "--http-process")
    routers = ["router"] if args.routers == 1 else [f"router-{number}" for number in range(args.routers)]
    with ProgressLine("in peace", total=args.requests) as progress:
        done = num_resumed = 0

        def on_end(answer: StormAnswer, kills: int = 0) -> None:
            nonlocal done, num_resumed
            done, num_resumed = done + 1, num_resumed + answer.is_resumed
            progress.update(done, f"{done} requests, {kills} kills, {num_resumed} resumed")

        storm = {"routers": routers, "every_s": args.every, "seed": args.seed, "at_once": args.at_once}
        storm["longest_s"] = args.seconds
        if args.engine == "vllm":
            verdict, kills = Verdict(), args.kills or 10
            judged = same_as_float64(asked, Oracle(model), verdict)
            progress.begin("in the storm", args.requests)
            result = in_storm(asked, judged, flags, kills=kills, waits=True, on_end=on_end, **storm)
            if len(verdict.ties) >= max(1, MAX_TIES * verdict.num_positions):
                result.wrong.append(f"{len(verdict.ties)} near-ties in {verdict.num_positions} tokens")
            if result.kills.total() < kills:
                result.wrong.append(
                    f"the requests ended after {result.kills.total()} of {kills} kills: raise --requests"
                )
            print(f"{verdict.num_positions} tokens judged in float64, {len(verdict.ties)} of them near-ties")
        else:
            calm = [of_toy(one) for one in asked] if is_toy else in_peace(asked, flags, args.at_once, on_end)
            done = 0
            progress.begin("in the storm", args.requests)
            result = in_storm(asked, same_as(calm), flags, kills=args.kills, waits=args.waits, on_end=on_end, **storm)
            if not result.kills.total():
                result.wrong.append("the requests ended before the first kill: raise --requests")
    show(result)
    return int(bool(result.wrong))


if __name__ == "__main__":
    sys.exit(main())
