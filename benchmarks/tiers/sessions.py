"""Sessions that grow, on a live cluster with and without a host tier."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdserve import AsyncClient
from pdserve.testing import Cluster
from simulator.traces.workloads import coding_agents

BLOCK_SIZE: Final = 16
PATIENT: Final = {"slo_ttft_s": 3600.0, "slo_tpot_s": 60.0}  # no request is rejected


@dataclass(frozen=True, slots=True)
class Turn:
    reusable: int
    cached: int
    output_tokens: int
    seconds: float
    ttft_s: float


async def generate(client: AsyncClient, text: list[int], answer: int, reusable: int) -> tuple[list[int], Turn]:
    """The tokens of the answer, and the turn."""
    began_s, ttft_s, ids = time.perf_counter(), 0.0, list[int]()
    stream = client.stream(text, max_tokens=answer, temperature=0.0, ignore_eos=True)
    async for piece in stream:
        ttft_s = ttft_s or time.perf_counter() - began_s
        ids += piece.token_ids
    seconds = time.perf_counter() - began_s
    cached = stream.completion.usage.cached_prompt_tokens
    return ids, Turn(reusable, min(cached, reusable), len(ids), seconds, ttft_s)


async def replay(target: str, arguments: argparse.Namespace) -> list[Turn]:
    """The turns after the first of each session."""
    draw = random.Random(arguments.seed)
    texts: list[list[int]] = [[] for _ in range(arguments.sessions)]
    found: list[Turn] = []
    gate = asyncio.Semaphore(arguments.at_once)
    async with AsyncClient(target) as client:

        async def turn(session: int) -> None:
            text = texts[session]
            reusable = max(0, len(text) - 1) // BLOCK_SIZE * BLOCK_SIZE
            text += [draw.randrange(3, 4000) for _ in range(arguments.growth)]
            async with gate:
                ids, measured = await generate(client, text, arguments.answer, reusable)
            text += ids
            if reusable:
                found.append(measured)

        for _ in range(arguments.turns):
            await asyncio.gather(*map(turn, range(arguments.sessions)))
    return found


def agent_turns(arguments: argparse.Namespace) -> list[tuple[list[int], int]]:
    """Prompt and length of the answer of each turn of sessions that begin together. Prompts have tokens of the trace
    for the answers before."""
    trace = coding_agents(
        rate_rps=36.0 * arguments.sessions, duration_s=1.0, seed=arguments.seed, scale=arguments.agents
    )
    return [
        (
            [
                random.Random(f"{arguments.seed} {one} {at}").randrange(3, 4000)
                for one in request.block_ids
                for at in range(trace.block_tokens)
            ][: request.prompt_tokens],
            request.output_tokens,
        )
        for request in itertools.islice(trace, arguments.requests)
    ]


async def replay_agents(target: str, turns: list[tuple[list[int], int]]) -> list[Turn]:
    """One after another; those with reusable blocks are measured."""
    seen: set[tuple[int, ...]] = set()
    found: list[Turn] = []
    async with AsyncClient(target) as client:
        for text, answer in turns:
            prefixes = [tuple(text[:end]) for end in range(BLOCK_SIZE, len(text), BLOCK_SIZE)]
            reusable = BLOCK_SIZE * sum(one in seen for one in prefixes)
            seen.update(prefixes)
            _, measured = await generate(client, text, answer, reusable)
            if reusable:
                found.append(measured)
    return found


def sessions(model: Path, block_bytes: int, arguments: argparse.Namespace) -> list[list[str]]:
    longest = arguments.turns * (arguments.growth + arguments.answer)
    working = arguments.sessions * -(-longest // BLOCK_SIZE)
    agents = [] if arguments.agents is None else agent_turns(arguments)
    if agents:
        longest = max(len(text) + answer for text, answer in agents)
        ends = range(BLOCK_SIZE, longest + 1, BLOCK_SIZE)
        working = len({tuple(text[:end]) for text, _ in agents for end in ends if end <= len(text)})
    pool = max(working // arguments.times, arguments.at_once * -(-longest // BLOCK_SIZE) + 1)
    found: dict[bool, list[Turn]] = {False: [], True: []}
    shared = {"model": str(model), "block_size": BLOCK_SIZE}
    for number in range(2 * arguments.rounds):
        has_tier = bool(number % 2)
        worker = {**shared, "kv_blocks": pool, "kv_host_bytes": 2 * working * block_bytes if has_tier else 0}
        with Cluster(prefill=0, decode=1, router={"model": str(model), **PATIENT}, worker=worker) as cluster:
            replayed = replay_agents(cluster.address, agents) if agents else replay(cluster.address, arguments)
            found[has_tier] += asyncio.run(replayed)
        print(f"round {number // 2 + 1}, {'with' if has_tier else 'without'} a tier", flush=True)
    rows = [["", "reusable tokens served", "TTFT p50, p90 ms", "seconds of a request per output token, p90"]]
    for has_tier, turns in found.items():
        share = 100 * sum(one.cached for one in turns) / sum(one.reusable for one in turns)
        per_token = statistics.quantiles([one.seconds / one.output_tokens for one in turns], n=10)[-1]
        ttft = statistics.quantiles([one.ttft_s * 1e3 for one in turns], n=10)
        rows.append(
            [
                "with a tier" if has_tier else "without",
                f"{share:.1f} %",
                f"{ttft[4]:.0f}, {ttft[-1]:.0f}",
                f"{per_token:.4f}",
            ]
        )
    print(f"working set {working} blocks, pool {pool} blocks")
    return rows
