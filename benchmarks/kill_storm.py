"""Requests against a whole cluster whose workers are killed at random: exact tokens, or a typed error.

    python -m benchmarks.kill_storm --requests 1000 --every 5 --seed 1
    python -m benchmarks.kill_storm --engine vllm --kills 10 [-- --set worker.engine_python=PYTHON]

Two clusters of two prefill and two decode workers serve the same requests of the bundled model, half of them greedy and
half sampled with a seed. The first cluster is undisturbed; in the second, the worker of a random request gets SIGKILL
every few seconds, and its supervisor restarts it. The exit status is 1 if a finished answer differs by one token, if an
unfinished one has no typed error or streamed a wrong token, or if the cluster does not become idle.

With --routers N there are N routers, and every second SIGKILL is one to a router. Requests come from four kinds of
clients in turn: two of the SDK, which resume, one of the SDK with neither retries nor resumes, and, if N is 1, one of a
gateway in its own process over HTTP (otherwise a third of the SDK). Some ask for three answers, for JSON, or for
logprobs. Only the calls that are not resumed may then end with an error.

    python -m benchmarks.kill_storm --routers 1 --requests 400 --every 3

With --engine vllm the workers run vLLM in float32, not compiled. Its logits may depend on the batch, so there is no
undisturbed run: transformers in float64 judges every token, as in the tests (tests/oracle.py), and may find less than
1 % near-ties. Such workers start slowly: the next kill waits until the killed worker is ready again.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import httpx2 as httpx

from benchmarks.harness import table_head, table_row, unrest
from pdserve import AsyncClient, Client, PdserveError, Retries
from pdserve.core.errors import ConfigError, InternalError
from pdserve.core.types import Sampling
from pdserve.launch.running import Running
from pdserve.launch.settings import bundled_model
from tests.oracle import MAX_TIES, Oracle, Verdict

WORKERS: Final = ("p0", "p1", "d0", "d1")
FLAGS: Final = (
    *("--prefill", "2", "--decode", "2"),
    # A cluster without half of its workers is slow; no request is rejected for that.
    *("--set", "router.slo_ttft_s=120", "--set", "router.slo_tpot_s=20"),
)
OF_ENGINE: Final = {
    # Deterministic mode: answers do not depend on the batch, so two runs can be compared.
    "own": ("--set", "worker.deterministic=on"),
    "vllm": ("--engine", "vllm", "--set", "worker.dtype=float32", "--set", "worker.cuda_graphs=false"),
}
WORKER: Final = r"\b[pd][01]\b"
START_S: Final = 600.0  # four workers that load vLLM at once
REST_S: Final = 60.0
POLL_S: Final = 0.2
HTTP_TRIES: Final = 20


class By(Enum):
    """The kind of client of a request."""

    SDK = "sdk"
    PLAIN = "plain"  # without retries and resumes: these would hide what the cluster does
    HTTP = "http"


RETRIES: Final = {By.SDK: Retries(limit=8), By.PLAIN: Retries(limit=0, resume_s=0.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StormRequest:
    prompt: list[int]
    options: dict[str, Any]
    by: By = By.PLAIN


@dataclass(slots=True, kw_only=True)
class StormAnswer:
    """The answer that a client received."""

    tokens: list[int] = field(default_factory=list)
    others: dict[int, list[int]] = field(default_factory=dict)  # tokens of the further answers, by their index
    is_resumed: bool = False
    attempts: int = 0  # placements of a finished request
    error: BaseException | None = None
    took_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Result:
    requests: int = 0  # that were sent
    seconds: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)  # of finished requests
    resumed: int = 0  # that the SDK has resumed
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def finished(self) -> int:
        return self.attempts.total()


MIXED: Final[Sequence[dict[str, Any]]] = ({}, {"n": 3}, {"json_schema": {"type": "array"}}, {"logprobs": 1})


def requests(
    count: int,
    seed: int,
    *,
    longest: int,
    max_tokens: int,
    vocabulary: int,
    by: Sequence[By] = (By.PLAIN,),
) -> list[StormRequest]:
    """Prompts that share no block, of 2 to `longest` tokens; every second one sampled. Those of `by` in turn; if there
    are several, some sampled ones have the options of MIXED."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        prompt = [draw.randrange(1, vocabulary) for _ in range(draw.randint(2, longest))]
        options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        if number % 2:
            options |= {"temperature": 0.8, "top_p": 0.95, "seed": number}
            options |= MIXED[number // 2 % len(MIXED)] if len(by) > 1 else {}
        made.append(StormRequest(prompt=prompt, options=options, by=by[number // 2 % len(by)]))
    return made


async def serve(
    target: str,
    asked: Sequence[StormRequest],
    at_once: int,
    on_end: Callable[[StormAnswer], None],
    running: set[str],
    is_over: Callable[[], bool] = lambda: False,
    http_url: str = "",
) -> list[StormAnswer | None]:
    """Sends each request once. None for those that were not sent before `is_over`.

    `running` holds the ids of the requests that have no whole answer yet.
    """
    gate = asyncio.Semaphore(at_once)

    async def one(
        clients: Mapping[By, AsyncClient], http: httpx.AsyncClient, number: int, request: StormRequest
    ) -> StormAnswer | None:
        answer, request_id = StormAnswer(), f"storm-{number}"
        async with gate:
            if is_over():
                return None
            running.add(request_id)
            began_s = time.monotonic()
            try:
                if request.by is By.HTTP:
                    await over_http(http, http_url, request, answer)
                else:
                    await over_grpc(clients[request.by], request, request_id, answer)
            except Exception as error:  # judged later: only a PdserveError is a correct end
                answer.error = error
            running.discard(request_id)
            answer.took_s = time.monotonic() - began_s
        on_end(answer)
        return answer

    async with (
        AsyncClient(target, retries=RETRIES[By.SDK]) as sdk,
        AsyncClient(target, retries=RETRIES[By.PLAIN]) as plain,
        httpx.AsyncClient(timeout=600.0, limits=httpx.Limits(max_connections=None)) as http,
    ):
        clients = {By.SDK: sdk, By.PLAIN: plain}
        return await asyncio.gather(*(one(clients, http, number, request) for number, request in enumerate(asked)))


def take(answer: StormAnswer, index: int, token_ids: Iterable[int]) -> None:
    (answer.tokens if index == 0 else answer.others.setdefault(index, [])).extend(token_ids)


async def over_grpc(client: AsyncClient, request: StormRequest, request_id: str, answer: StormAnswer) -> None:
    stream = client.stream(request.prompt, request_id=request_id, **request.options)
    async for piece in stream:
        take(answer, piece.index, piece.token_ids)
    answer.attempts = stream.completion.timings.attempts
    answer.is_resumed = stream.is_resumed


async def over_http(http: httpx.AsyncClient, url: str, request: StormRequest, answer: StormAnswer) -> None:
    """Raises InternalError with the error of the answer. As OpenAI's client, it repeats a call that got 503."""
    options = dict(request.options)
    if "json_schema" in options:
        form = {"name": "x", "schema": options.pop("json_schema")}
        options["response_format"] = {"type": "json_schema", "json_schema": form}
    body = {"prompt": request.prompt, "stream": True, "return_token_ids": True, **options}
    for attempt in range(HTTP_TRIES):
        async with http.stream("POST", f"{url}/completions", json=body) as found:
            if found.status_code == 503 and attempt + 1 < HTTP_TRIES:
                await asyncio.sleep(1.0)
                continue
            if found.status_code != 200:
                raise InternalError(f"status {found.status_code}: {(await found.aread()).decode()}")
            async for line in found.aiter_lines():
                if line in ("", "data: [DONE]"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise InternalError(f"event: {chunk['error']['message']}")
                for choice in chunk["choices"]:
                    take(answer, choice["index"], choice.get("token_ids") or ())
            answer.attempts = 1
            return


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
        if self._cluster.pids()[name] in self._dead:
            return False
        seen = await client.topology()
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


#: What is wrong with an answer's tokens, by its number; empty if nothing is.
Judge = Callable[[int, StormAnswer], str]


def same_as(calm: Sequence[StormAnswer | None]) -> Judge:
    """The tokens of a run in peace, or the first of them before an error."""

    def wrong_of(number: int, seen: StormAnswer) -> str:
        expected = calm[number]
        assert expected is not None
        if expected.error is not None:
            return f"failed in peace: {expected.error!r}"
        for index in sorted({0, *expected.others, *seen.others}):
            calm_ids = expected.tokens if index == 0 else expected.others.get(index, [])
            ids = seen.tokens if index == 0 else seen.others.get(index, [])
            if ids != (calm_ids if seen.error is None else calm_ids[: len(ids)]):
                return f"{ids}, in peace {calm_ids}"
        return ""

    return wrong_of


def same_as_float64(asked: Sequence[StormRequest], oracle: Oracle, verdict: Verdict) -> Judge:
    """The choices of the oracle. `verdict` collects the near-ties of all answers."""

    def wrong_of(number: int, seen: StormAnswer) -> str:
        request = asked[number]
        if seen.error is None and len(seen.tokens) != request.options["max_tokens"]:
            return f"{len(seen.tokens)} tokens of {request.options['max_tokens']}"
        if not seen.tokens:
            return ""
        sampling = Sampling(**request.options) if request.options["temperature"] else None
        found = oracle.judge([request.prompt], [seen.tokens], sampling=sampling)
        verdict.num_positions += found.num_positions
        verdict.ties += found.ties
        return f"{len(found.wrong)} tokens are not those of float64: {found.wrong[:3]}" if found.wrong else ""

    return wrong_of


def judge(
    stormy: Sequence[StormAnswer | None], wrong_of: Judge, may_fail: Callable[[int], bool] = lambda number: True
) -> Result:
    result = Result()
    for number, seen in enumerate(stormy):
        if seen is None:
            continue
        result.requests += 1
        result.resumed += seen.is_resumed
        if seen.error is None:
            result.attempts[seen.attempts] += 1
        else:
            result.errors[f"{type(seen.error).__name__}: {re.sub(WORKER, 'a worker', str(seen.error))}"] += 1
            if not isinstance(seen.error, PdserveError):
                result.wrong.append(f"request {number} ended untyped: {seen.error!r}")
            elif not may_fail(number):
                result.wrong.append(f"request {number} failed although it is resumed: {seen.error!r}")
        if wrong := wrong_of(number, seen):
            before = "" if seen.error is None else " before its error"
            result.wrong.append(f"request {number}{before}: {wrong}")
    return result


ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1"}


def in_peace(
    asked: Sequence[StormRequest], flags: Sequence[str], at_once: int, on_end: Callable[[StormAnswer], None]
) -> list[StormAnswer | None]:
    with Running.start(*flags, env=ENVIRONMENT) as cluster:
        return asyncio.run(serve(cluster.target, asked, at_once, on_end, set(), http_url=cluster.http_url))


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
    on_end: Callable[[StormAnswer], None] = lambda answer: None,
) -> Result:
    """At most `kills` workers are killed, else one per `every_s`. If `waits`, each must be ready again before the next
    kill, and no request is sent after the last one."""

    async def storm(cluster: Running) -> tuple[list[StormAnswer | None], Counter[str], float]:
        running: set[str] = set()
        killer = Killer(cluster, every_s, seed, kills, running, waits=waits, routers=routers)
        killing = asyncio.create_task(killer.run())
        began_s = time.monotonic()
        try:
            is_over = lambda: waits and killer.is_done  # noqa: E731
            stormy = await serve(cluster.target, asked, at_once, on_end, running, is_over, http_url=cluster.http_url)
        finally:
            ended = killing.cancel()
        if not ended:
            killing.result()  # the reason why it stopped killing
        return stormy, killer.kills, time.monotonic() - began_s

    with Running.start(*flags, env=ENVIRONMENT, timeout_s=START_S) as cluster:
        stormy, killed, seconds = asyncio.run(storm(cluster))
        with Client(cluster.target) as client:
            left = unrest(client, len(WORKERS), START_S if waits else REST_S)
    result = judge(stormy, wrong_of, lambda number: not routers or asked[number].by is By.PLAIN)
    result.seconds, result.kills = seconds, killed
    if left:
        result.wrong.append(left)
    return result


def show(result: Result) -> None:
    kills = ", ".join(f"{name} {count}" for name, count in sorted(result.kills.items()))
    print(f"{result.requests} requests in {result.seconds:.0f} s, {result.kills.total()} processes killed ({kills})")
    print(f"{result.resumed} calls resumed by the SDK")
    print(table_head(("end", "requests")))
    for attempts, count in sorted(result.attempts.items()):
        print(table_row((f"finished, exact, {attempts} placement{'s' * (attempts > 1)}", count)))
    for row in (*result.errors.most_common(), ("wrong", len(result.wrong))):
        print(table_row(row))
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
    parser.add_argument("up", nargs="*", help="further flags of `pdserve up`, after --")
    args = parser.parse_args()
    if args.requests < 1 or args.every <= 0 or args.at_once < 1 or (args.kills or 1) < 1:
        given = (args.requests, args.every, args.at_once, args.kills)
        raise ConfigError("requests, every, at-once, kills", given, "above 0")
    model = bundled_model()
    vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
    by = (By.SDK, By.PLAIN, By.SDK, By.HTTP if args.routers == 1 else By.SDK) if args.routers else (By.PLAIN,)
    asked = requests(
        args.requests, args.seed, longest=args.longest, max_tokens=args.max_tokens, vocabulary=vocabulary, by=by
    )
    done = 0

    def on_end(answer: StormAnswer) -> None:
        nonlocal done
        done += 1
        if done % 20 == 0:
            print(f"\r{done} requests", end="", file=sys.stderr, flush=True)

    flags = (*FLAGS, *OF_ENGINE[args.engine], *args.up)
    if args.routers:
        flags += ("--routers", str(args.routers)) if args.routers > 1 else ("--http", "0", "--http-process")
    routers = ["router"] if args.routers == 1 else [f"router-{number}" for number in range(args.routers)]
    storm = {"routers": routers, "every_s": args.every, "seed": args.seed, "at_once": args.at_once, "on_end": on_end}
    if args.engine == "vllm":
        verdict, kills = Verdict(), args.kills or 10
        judged = same_as_float64(asked, Oracle(model), verdict)
        result = in_storm(asked, judged, flags, kills=kills, waits=True, **storm)
        if len(verdict.ties) >= max(1, MAX_TIES * verdict.num_positions):
            result.wrong.append(f"{len(verdict.ties)} near-ties in {verdict.num_positions} tokens")
        if result.kills.total() < kills:
            result.wrong.append(f"the requests ended after {result.kills.total()} of {kills} kills: raise --requests")
        print(f"{verdict.num_positions} tokens judged in float64, {len(verdict.ties)} of them near-ties")
    else:
        calm = in_peace(asked, flags, args.at_once, on_end)
        result = in_storm(asked, same_as(calm), flags, kills=args.kills, **storm)
    print(file=sys.stderr)
    show(result)
    return int(bool(result.wrong))


if __name__ == "__main__":
    sys.exit(main())
