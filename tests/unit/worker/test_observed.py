"""What others see of a worker from outside its streams: Redis, logs, metrics."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from kvtransfer.protocol.transport import EVENTS
from pdserve.core.kv.hashing import block_hashes, chain_key
from pdserve.core.types import Role
from pdserve.engine.ranks.rejected_joins import count_rejected_join, rejected_joins
from pdserve.engine.toy import answer
from pdserve.prefix.embedded import EmbeddedRedis
from pdserve.prefix.redis_index import RedisIndex
from pdserve.prefix.registry import Registry
from pdserve.telemetry import metric_names
from pdserve.telemetry.metrics import Metrics
from pdserve.worker.reports import WorkerMetrics

PROMPT = list(range(10, 31))
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start() as server:
        yield server


async def eventually(holds: Callable[[], Awaitable[bool]], what: str, deadline_s: float = 60.0) -> None:
    until_s = time.monotonic() + deadline_s
    while not await holds():
        assert time.monotonic() < until_s, f"never saw: {what}"
        await asyncio.sleep(0.01)


async def test_a_worker_registers_publishes_its_cache_and_leaves(
    start: Any, attach: Any, ask: Any, redis: EmbeddedRedis
) -> None:
    d = start(Role.DECODE, redis=redis.url)
    router = await attach(d)
    registry = Registry(redis.url, "default")
    await eventually(lambda: has(registry, [("decode-0", d.address, Role.DECODE)]), "the registration")
    assert await router.local(ask("r", PROMPT)) == answer(PROMPT, 8)
    seed = router.hellos[Role.DECODE].hash_seed
    index = RedisIndex(redis.url, "default", hash_seed=seed, timeout_s=1.0, refresh_s=0.02)
    await index.start()
    hashes = block_hashes(PROMPT, 4, chain_key(b"", seed))

    async def is_found() -> bool:
        return await index.lookup(hashes) == {"decode-0": 5}

    await eventually(is_found, "the cached prefix")
    await asyncio.to_thread(d.host.stop)
    await eventually(lambda: has(registry, []), "the farewell")
    await index.close()
    await registry.close()


async def has(registry: Registry, expected: list[tuple[str, str, Role]]) -> bool:
    return [(one.worker_id, one.endpoint, one.role) for one in await registry.read()] == expected


async def test_requests_continue_without_redis(start: Any, attach: Any, ask: Any, redis: EmbeddedRedis) -> None:
    p, d = start(Role.PREFILL, redis=redis.url), start(Role.DECODE, redis=redis.url)
    router = await attach(p, d)
    assert await router.remote(ask("before", PROMPT)) == answer(PROMPT, 8, prefilled=len(PROMPT))
    redis.kill()
    for n in range(5):
        prompt = [50 + n, *PROMPT]
        assert await router.remote(ask(f"r{n}", prompt)) == answer(prompt, 8, prefilled=len(prompt))
    assert p.host.is_healthy()
    assert d.host.is_healthy()


async def test_a_worker_starts_without_redis(start: Any, attach: Any, ask: Any, redis: EmbeddedRedis) -> None:
    redis.kill()
    router = await attach(start(Role.DECODE, redis=redis.url))
    assert await router.local(ask("r", PROMPT)) == answer(PROMPT, 8)


async def test_log_records_about_an_attempt_name_its_trace(
    start: Any, attach: Any, ask: Any, caplog: pytest.LogCaptureFixture
) -> None:
    d = start(Role.DECODE, toy_step_s=0.02)
    router = await attach(d)
    sequence = ask("r", PROMPT, max_tokens=500)
    sequence.traceparent = f"00-{TRACE}-b7ad6b7169203331-01"
    sequence.priority, sequence.session_id = -2, "conversation 7"
    asked = asyncio.create_task(router.local(sequence))
    await eventually(lambda: has_begun(d), "the attempt")
    await d.on_engine(lambda program: program.fail_all("broken"))
    asked.cancel()
    [record] = [one for one in caplog.records if one.message == "attempt failed"]
    expected = {"request_id": "r", "trace_id": TRACE, "priority": -2, "session_id": "conversation 7"}
    assert {name: vars(record).get(name) for name in expected} == expected


async def has_begun(worker: Any) -> bool:
    return bool(await worker.on_engine(lambda program: program.scheduler.live()))


async def test_a_worker_serves_its_metrics(start: Any, attach: Any, ask: Any, unused_tcp_port: int) -> None:
    d = start(Role.DECODE, metrics_port=unused_tcp_port)
    router = await attach(d)
    await router.local(ask("r", PROMPT))
    url = f"http://127.0.0.1:{unused_tcp_port}/metrics"

    async def uses_recorded_placement() -> bool:
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
        wanted = (
            "pdserve_sampled_tokens_total 8.0",
            "pdserve_prefilled_tokens_total 21.0",
            'pdserve_kv_blocks{state="cached"} 7.0',
            'pdserve_kv_blocks{state="used"} 0.0',
        )
        return all(one in text for one in wanted)

    await eventually(uses_recorded_placement, "the metrics of one request")


async def test_transfer_events_are_counted_once(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    d = start(Role.DECODE)
    seen: list[tuple[str, float, str]] = []
    program = d.program

    def add(metric: Any, amount: float = 1, **labels: str) -> None:
        seen.append((metric.name, amount, labels["event"]))

    monkeypatch.setattr(program.context.metrics, "add", add)
    await d.on_engine(lambda one: one.reports.metrics.transferred({"late_messages": 2, "silent": 0}))
    await d.on_engine(lambda one: one.reports.metrics.transferred({"late_messages": 2, "silent": 0}))
    await d.on_engine(lambda one: one.reports.metrics.transferred({"late_messages": 5, "silent": 1}))
    name = metric_names.TRANSFER_EVENTS.name
    assert seen == [(name, 2, "late_messages"), (name, 3, "late_messages"), (name, 1, "silent")]
    assert set(program.transfer_events()) == {*EVENTS, "stuck_nccl_calls"}


@pytest.mark.parametrize("role", list(Role))
async def test_rejected_rank_joins_are_counted(start: Any, role: Role) -> None:
    """Including calls before the engine was ready: a foreign process calls while the leader waits for its ranks."""
    before = rejected_joins().get("ALL_JOINED", 0)
    count_rejected_join("ALL_JOINED")
    worker = start(role)
    metrics = Metrics("worker")
    await worker.on_engine(lambda program: setattr(program.reports, "metrics", WorkerMetrics(metrics)))
    series = f'{metric_names.REJECTED_RANK_JOINS.name}{{reason="ALL_JOINED"}}'
    for count in (before + 1, before + 2):

        async def uses_recorded_placement(line: str = f"{series} {count}.0") -> bool:
            return line in metrics.text()

        await eventually(uses_recorded_placement, f"{count} rejected joins")
        count_rejected_join("ALL_JOINED")
