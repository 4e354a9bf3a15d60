"""Kills workers while they work, and checks that clients do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from pdserve import AsyncClient, Completion, NotFound, Slo
from pdserve.engine.toy import answer
from tests.cluster.cluster import Cluster
from tests.cluster.suite import toy_prompt

STREAMS = 8
TOKENS = 400
# Nearly as long as the context window, so that some are still being prefilled when the signal comes, and so many that
# decode workers do not prefill all of them.
PROMPTS = 16
PROMPT_TOKENS = 7000
PATIENT = Slo(ttft_s=60.0, tpot_s=20.0)  # nothing is rejected because it may be late
PREFILL_TURNS = 5
DECODE_TURNS = 5


def a_decode_worker_dies_in_mid_stream(cluster: Cluster, *, all_die: bool = False) -> None:
    """After a SIGKILL of one or of all decode workers, greedy and seeded streams continue with the exact next token.

    Each stream has made enough progress not to be suspected of crashing its workers (router/state/attempts.py). On a
    busy machine the worker may have generated all answers before this process asks for its end: then the next turn
    tries.
    """
    for turn in range(DECODE_TURNS):
        attempts = _kill_while_decoding(cluster, turn, all_die=all_die)
        cluster.wait_until_idle(within_s=60)
        if attempts > 1:
            return
    raise AssertionError(f"nobody was on the killed worker, {DECODE_TURNS} times")


def _kill_while_decoding(cluster: Cluster, turn: int, *, all_die: bool) -> int:
    """The largest number of attempts of a stream; each answer is checked."""
    prompts = [toy_prompt(40 + 30 * i, salt=11) for i in range(STREAMS)]
    options = [{"temperature": 0.0} if i % 2 else {"temperature": 0.9, "seed": i} for i in range(STREAMS)]
    expected = [answer(p, TOKENS, seed=None if i % 2 else i) for i, p in enumerate(prompts)]
    seen: list[list[int]] = [[] for _ in prompts]
    attempts = [0] * STREAMS
    pids = {worker: cluster.pid_of(worker) for worker in ("d0", "d1")}

    async def follow(client: AsyncClient, i: int) -> None:
        stream = client.stream(prompts[i], max_tokens=TOKENS, request_id=f"stream-{turn}-{i}", **options[i])
        async for piece in stream:
            seen[i].extend(piece.token_ids)
        attempts[i] = stream.completion.timings.attempts

    async def run() -> None:
        async with AsyncClient(cluster.target) as client:
            streams = [asyncio.create_task(follow(client, i)) for i in range(STREAMS)]
            await all_have(12, seen, streams)
            shortest = min(range(STREAMS), key=lambda i: len(seen[i]))
            victim = await decode_worker_of(client, f"stream-{turn}-{shortest}")
            for worker, pid in pids.items():
                if all_die or worker == victim:
                    os.kill(pid, signal.SIGKILL)
            await asyncio.gather(*streams)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert seen == expected
    return max(attempts)


def a_prefill_worker_dies_while_it_prefills(cluster: Cluster) -> None:
    """After a SIGKILL while it prefills, another prefill worker or the decode worker prefills its prompts.

    If all prompts were prefilled before the signal came, the test sends new ones.
    """
    for salt in range(17, 17 + PREFILL_TURNS):
        attempts = _kill_while_prefilling(cluster, salt)
        cluster.wait_until_idle(within_s=60)
        if attempts > 1:
            return
    raise AssertionError(f"no prompt was on the killed worker, {PREFILL_TURNS} times")


def _kill_while_prefilling(cluster: Cluster, salt: int) -> int:
    """The largest number of attempts of a request; each answer is checked."""
    prompts = [toy_prompt(PROMPT_TOKENS + 40 * i, salt=salt) for i in range(PROMPTS)]
    expected = [answer(p, 24, seed=i) for i, p in enumerate(prompts)]
    ids = [f"prompt-{salt}-{i}" for i in range(PROMPTS)]
    pids = {worker: cluster.pid_of(worker) for worker in ("p0", "p1")}

    async def run() -> list[Completion]:
        async with AsyncClient(cluster.target) as client:
            calls = [
                asyncio.create_task(
                    client.generate(p, max_tokens=24, temperature=0.7, seed=i, request_id=ids[i], slo=PATIENT)
                )
                for i, p in enumerate(prompts)
            ]
            victim = await _first_to_prefill(client, ids, calls)
            if victim is not None:
                os.kill(pids[victim], signal.SIGKILL)
            return await asyncio.gather(*calls)

    done = asyncio.run(asyncio.wait_for(run(), 60))
    assert [list(one.token_ids) for one in done] == expected
    return max(one.timings.attempts for one in done)


async def all_have(count: int, seen: Sequence[Sequence[int]], streams: Sequence[asyncio.Task[None]]) -> None:
    """Waits until each stream has that many tokens; raises a stream's error."""
    while not all(len(tokens) >= count for tokens in seen):
        for stream in streams:
            if stream.done():
                stream.result()
        await asyncio.sleep(0.005)


async def decode_worker_of(client: AsyncClient, request_id: str) -> str:
    """Where the router placed the request. Workers' own reports come later."""
    chosen = (await client.explain(request_id)).chosen
    assert chosen is not None, f"{request_id} is not placed"
    return chosen.decode_worker


async def _first_to_prefill(
    client: AsyncClient, ids: Sequence[str], calls: Sequence[asyncio.Task[Completion]]
) -> str | None:
    """The prefill worker of the first request that is found in prefill; None if all requests end first."""
    while not all(call.done() for call in calls):
        for request_id in ids:
            with contextlib.suppress(NotFound):  # the router has not received it yet
                found = await client.explain(request_id)
                if found.stage == "prefilling" and found.chosen is not None:
                    return found.chosen.prefill_worker
    return None


def kill_rank(cluster: Cluster, worker_id: str) -> None:
    [pid] = ranks_of(cluster, worker_id)
    os.kill(pid, signal.SIGKILL)


def ranks_of(cluster: Cluster, worker_id: str) -> list[int]:
    """Processes of the worker's other ranks."""
    leader, found = cluster.pid_of(worker_id), []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            is_rank = any(word.endswith(b".ranks.follower") for word in words)
            if is_rank and (entry / "stat").read_text().split()[3] == str(leader):
                found.append(int(entry.name))
        except OSError:
            continue  # the process has ended
    return found
