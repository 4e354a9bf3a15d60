"""Running answers move from a drained worker, and from one that ends, with the tokens of an undisturbed cluster.

Prompts are long and steps are small, so it is faster to send the KV of an answer than to compute it again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from pdserve import AsyncClient, Completion
from tests.cluster.cluster import Cluster, free_ports, scrape
from tests.cluster.families import BUNDLED
from tests.cluster.faults import decode_worker_of
from tests.cluster.test_options import ITEMS, PROMPT
from tests.oracle import Oracle

pytestmark = pytest.mark.timeout(400)

MAX_TOKENS = 300
TOKENS_BEFORE = 12  # of each answer, before the drain
MOST_TURNS = 5  # on a busy machine, the worker may end its answers before this process drains it
GREEDY = 2  # the place in `asked` of the answer that the oracle judges
STOP_AT = 400  # characters before the stop string
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"names": {"type": "array", "items": {"type": "string"}}}},
    },
}
Asked = list[tuple[Any, dict[str, Any]]]
Disturb = Callable[[AsyncClient, list[str], str], Awaitable[None]]
SENT = "; its KV is sent; "  # in the explanation of a placement


def prompt_of(number: int) -> str:
    """No two of them share a prefix that a worker could have in its cache."""
    return "".join(f"# Case {number}.{line}: the settings of the program.\n" for line in range(24)) + PROMPT


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_ports(1)


@pytest.fixture(scope="module")
def cluster(metrics_port: int) -> Iterator[Cluster]:
    """Deterministic mode: answers do not depend on the batch on any processor, so they can be compared."""
    exact = ("--set", "worker.deterministic=on", "--set", "worker.dtype=float32")
    exact += ("--set", f"router.metrics_port={metrics_port}")
    exact += ("--set", "worker.max_batch_tokens=16")
    with Cluster("--model", str(BUNDLED), "--prefill", "0", "--decode", "2", *exact) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def asked(cluster: Cluster) -> Asked:
    """Grammars, logprobs, several answers, a stop string, penalties, tools; greedy and seeded. The bundled model's own
    text repeats itself, so decode workers draft."""
    free = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    penalized = {**free, "temperature": 0.7, "seed": 5, "repetition_penalty": 1.1}
    text = cluster.client.generate(prompt_of(4), **penalized).text
    return [
        (prompt_of(0), {"json_schema": ITEMS, "temperature": 0.0, "max_tokens": MAX_TOKENS}),
        (prompt_of(1), {"json_schema": ITEMS, "temperature": 1.0, "seed": 7, "max_tokens": MAX_TOKENS}),
        (prompt_of(2), {**free, "temperature": 0.0, "logprobs": 2}),
        (prompt_of(3), {**free, "temperature": 0.8, "top_p": 0.95, "seed": 11, "n": 3}),
        (prompt_of(4), {**penalized, "stop": [text[STOP_AT : STOP_AT + 12]]}),
        ([{"role": "user", "content": prompt_of(5)}], {**free, "temperature": 0.0, "tools": [TOOL]}),
    ]


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, asked: Asked) -> list[Completion]:
    async def run() -> list[Completion]:
        async with AsyncClient(cluster.target) as client:
            return await asyncio.gather(*(client.generate(prompt, **options) for prompt, options in asked))

    return asyncio.run(run())


def test_answers_move_from_a_drained_worker(
    cluster: Cluster, asked: Asked, undisturbed: list[Completion], metrics_port: int
) -> None:
    ids = cluster.client.tokenize(prompt_of(GREEDY))
    Oracle(BUNDLED).assert_exact([ids], [list(undisturbed[GREEDY].token_ids)])
    moved, sent = move_all(cluster, asked, undisturbed, cluster.client.drain, cluster.client.undrain)
    deadline_s = time.monotonic() + 60.0
    for metric, least in (("pdserve_migrations_total", moved), ("pdserve_migrations_with_kv_total", sent)):
        while scrape(metrics_port, metric) < least:  # the router sets its counters once a second
            assert time.monotonic() < deadline_s, f"{metric} does not count"
            time.sleep(0.1)


@pytest.mark.slow  # the router moves answers as in the test above
def test_answers_move_from_a_worker_that_ends(cluster: Cluster, asked: Asked, undisturbed: list[Completion]) -> None:
    """After SIGTERM it drains itself, and ends when its answers have moved. The launcher starts another one."""

    def terminate(worker_id: str) -> None:
        os.kill(cluster.pid_of(worker_id), signal.SIGTERM)

    move_all(cluster, asked, undisturbed, terminate, lambda worker_id: None)


@pytest.mark.slow  # tests/unit/worker/test_sending.py loses the workers in the middle of a transfer
@pytest.mark.parametrize("lost", ["source", "target"])
def test_a_killed_worker_costs_no_token(
    cluster: Cluster, asked: Asked, undisturbed: list[Completion], lost: str
) -> None:
    """As soon as the KV of an answer is sent, either end is killed. Without the other decode worker, answers continue
    on the drained one, whose drain is then undone."""

    async def kill(client: AsyncClient, names: list[str], worker_id: str) -> None:
        async with asyncio.timeout(60):
            while (target := await first_target(client, names)) is None:
                await asyncio.sleep(0.001)
        await asyncio.to_thread(cluster.kill, worker_id if lost == "source" else target)
        if lost == "target":
            await asyncio.to_thread(cluster.client.undrain, worker_id)

    run = while_draining(cluster, asked, cluster.client.drain, MOST_TURNS + (lost == "source"), kill)
    _, done, _ = asyncio.run(asyncio.wait_for(run, 240))
    for one, whole in zip(done, undisturbed, strict=True):
        assert_same(one, whole)
    cluster.wait_until_idle(within_s=120)


async def first_target(client: AsyncClient, names: list[str]) -> str | None:
    """Where the KV of an answer is sent; None if none is sent yet."""
    for name in names:
        placed = await client.explain(name)
        if SENT in placed.reason and placed.chosen is not None:
            return placed.chosen.decode_worker
    return None


def move_all(
    cluster: Cluster,
    asked: Asked,
    undisturbed: list[Completion],
    drain: Callable[[str], object],
    undrain: Callable[[str], object],
) -> tuple[int, int]:
    """The number of answers that moved, and of those that were sent, at least 1 each."""
    num_moved = num_sent = 0
    for turn in range(MOST_TURNS):
        worker_id, done, reasons = asyncio.run(asyncio.wait_for(while_draining(cluster, asked, drain, turn), 120))
        for one, whole in zip(done, undisturbed, strict=True):
            assert_same(one, whole)
        undrain(worker_id)
        cluster.wait_until_idle(within_s=60)
        for one, reason in zip(done, reasons, strict=True):
            if not one.timings.migrations:
                continue
            assert one.timings.decode_worker != worker_id
            assert reason.startswith(f"moved from {worker_id}, which is drain"), reason
            assert (one.timings.prefill_worker == worker_id) == (SENT in reason), reason
            num_moved += 1
            num_sent += SENT in reason
        if num_sent:
            return num_moved, num_sent
    raise AssertionError(f"of {num_moved} answers that moved, none was sent, in {MOST_TURNS} turns")


async def nothing(client: AsyncClient, names: list[str], worker_id: str) -> None:
    """Disturbs nothing more."""


async def while_draining(
    cluster: Cluster, asked: Asked, drain: Callable[[str], object], turn: int, disturb: Disturb = nothing
) -> tuple[str, list[Completion], list[str]]:
    """The drained worker, the answers, and the explanations of their last placements."""
    names = [f"moves-{turn}-{i}" for i in range(len(asked))]
    num_seen = [0] * len(asked)

    async def follow(client: AsyncClient, i: int) -> Completion:
        prompt, options = asked[i]
        stream = client.stream(prompt, request_id=names[i], **options)
        async for piece in stream:
            num_seen[i] += len(piece.token_ids)
        return stream.completion

    async with AsyncClient(cluster.target) as client:
        streams = [asyncio.create_task(follow(client, i)) for i in range(len(asked))]
        while not all(count >= TOKENS_BEFORE or one.done() for count, one in zip(num_seen, streams, strict=True)):
            await asyncio.sleep(0.005)
        worker_id = await decode_worker_of(client, names[GREEDY])
        await asyncio.to_thread(drain, worker_id)
        await disturb(client, names, worker_id)
        done = await asyncio.gather(*streams)
        return worker_id, done, [(await client.explain(name)).reason for name in names]


def assert_same(one: Completion, whole: Completion) -> None:
    assert [(choice.token_ids, choice.text, choice.finish_reason) for choice in one.choices] == [
        (choice.token_ids, choice.text, choice.finish_reason) for choice in whole.choices
    ]
    assert (one.stop, one.usage.completion_tokens) == (whole.stop, whole.usage.completion_tokens)
    assert [score.logprob for score in one.logprobs] == pytest.approx(
        [score.logprob for score in whole.logprobs], abs=1e-4
    )
