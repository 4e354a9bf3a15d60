"""The recording of a running cluster replays to equal commands, and is a trace with the lengths that clients saw.

During the recording clients cancel, requests are rejected and workers die.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path

import pytest

from pdserve import AsyncClient
from pdserve.cli.main import main
from pdserve.client.retries import Retries
from pdserve.core.errors import Overloaded, PdserveError
from router.recording import replay
from simulator.traces.files import FileTrace
from tests.cluster.cluster import Cluster
from tests.cluster.suite import toy_prompt

MAX_TOKENS = 60
MAX_CONCURRENT = 640


async def one_client(client: AsyncClient, number: int, answered: dict[str, int]) -> bool:
    """Sends one request; every fifth is cancelled after a few tokens. Returns whether it was rejected."""
    request_id = f"r{number}"
    prompt = toy_prompt(20 + number * 37 % 300, salt=number)
    with contextlib.suppress(PdserveError):
        try:
            async with client.stream(prompt, max_tokens=MAX_TOKENS, seed=number, request_id=request_id) as stream:
                count = 0
                async for piece in stream:
                    count += len(piece.token_ids)
                    if number % 5 == 0 and count > 3:
                        return False
                answered[request_id] = count
        except Overloaded:
            return True
    return False


async def drive(cluster: Cluster, record: Path, num_events: int) -> dict[str, int]:
    """Sends bursts of requests and kills workers until enough was recorded. Bursts grow until a request is rejected."""
    answered: dict[str, int] = {}
    number = bursts = rejected = 0
    size = 40
    async with AsyncClient(cluster.target, retries=Retries(limit=0)) as client:
        while (
            bursts < 4 or sum(1 for _ in record.open()) < num_events + 300 or (not rejected and size < MAX_CONCURRENT)
        ):
            tasks = [asyncio.create_task(one_client(client, number + index, answered)) for index in range(size)]
            number += len(tasks)
            bursts += 1
            if bursts in (2, 3):
                await asyncio.sleep(0.05)
                cluster.kill("d1" if bursts == 2 else "p0")
            rejected += sum(await asyncio.gather(*tasks))
            if not rejected:
                size = min(2 * size, MAX_CONCURRENT)  # a fast machine serves a small burst without a queue
    return answered


@pytest.mark.parametrize("num_events", [1_500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_running_clusters_recording_replays(
    num_events: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "recording.jsonl"
    words = ("router.policy=goodput", "router.max_queue=6", "worker.toy_step_s=0.001", "worker.heartbeat_s=0.05")
    sets = [flag for word in words for flag in ("--set", word)]
    flags = ("--model", "toy", "--prefill", "2", "--decode", "2", "--record", str(record), *sets)
    with Cluster(*flags) as cluster:
        answered = asyncio.run(drive(cluster, record, num_events))
        cluster.wait_until_idle()
    with record.open() as lines:
        next(lines)
        seen = Counter(type(step.event).__name__ for step in replay.read(lines))
    assert seen.total() >= num_events
    for kind in ("ClientLeft", "WorkerLost", "FirstToken", "TransferEnded", "TokensArrived", "BatchTimed"):
        assert seen[kind], kind
    assert '"outcome":"rejected"' in record.read_text()
    assert main(["replay", str(record)]) == 0
    assert capsys.readouterr().out == f"the router decided the same in all {seen.total()} events\n"

    trace = FileTrace(record)
    found = list(trace)
    assert len(found) == seen["RequestArrived"]
    complete = Counter(answered.values())
    lengths = Counter(one.output_tokens for one in found)
    assert all(lengths[length] >= count for length, count in complete.items())
    recorded = trace.cluster()
    assert recorded is not None
    assert sorted(one.worker_id for one in recorded.workers) == ["d0", "d1", "p0", "p1"]
    assert {one.worker_id for one in recorded.faults} == {"d1", "p0"}
