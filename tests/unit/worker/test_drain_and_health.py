"""Readiness, heartbeats, cache changes and drain of a worker."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decode_worker.program import make_host
from pdserve.core.errors import ConfigError
from pdserve.core.kv.hashing import block_hashes, chain_key
from pdserve.core.kv.retention import Kind
from pdserve.core.types import Role
from pdserve.engine.toy import answer
from pdserve.v1 import worker_pb2
from pdserve.worker import host
from pdserve.worker.host import SERVICE
from tests.unit.worker.conftest import DEADLINE_S, config

PROMPT = list(range(10, 31))
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
LOCAL = (("grpc.use_local_subchannel_pool", 1),)


async def test_a_hello_has_the_facts_for_planning(start: Any, attach: Any) -> None:
    p, d = start(Role.PREFILL, toy_step_s=0.002), start(Role.DECODE, toy_step_s=0.002)
    router = await attach(p, d)
    hello = router.hellos[Role.DECODE]
    assert (hello.worker_id, hello.role, hello.model) == ("decode-0", worker_pb2.ROLE_DECODE, "toy-marked")
    assert (hello.block_size, hello.num_blocks, hello.max_context_tokens, hello.vocab_size) == (4, 64, 256, 257)
    assert (hello.max_batch, hello.max_batch_tokens, hello.inbox_depth) == (8, 32, 8)
    assert list(hello.eos_token_ids) == [256]
    assert hello.fingerprint == router.hellos[Role.PREFILL].fingerprint
    assert hello.hash_seed == router.hellos[Role.PREFILL].hash_seed
    assert hello.incarnation != router.hellos[Role.PREFILL].incarnation
    cost = hello.cost
    assert cost.prefill_base_s + 8 * cost.prefill_per_token_s > 0.001
    assert cost.decode_base_s + 8 * cost.decode_per_row_s > 0.001
    assert router.hellos[Role.PREFILL].cost.decode_base_s == 0.0  # Unknown to a prefill worker.


async def test_a_context_window_larger_than_the_pool_is_cut_to_it(start: Any, attach: Any) -> None:
    router = await attach(start(Role.DECODE, kv_blocks=10))
    assert router.hellos[Role.DECODE].max_context_tokens == 40


async def test_load_is_reported_on_heartbeats_and_changes(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE)
    router = await attach(d)
    await router.wait_for(lambda: len(router.all("load")) >= 3)
    idle = router.all("load")[-1]
    assert (idle.free_blocks, idle.running, idle.waiting, idle.is_draining) == (64, 0, 0, False)
    await router.local(ask("r", PROMPT))
    load = await router.wait_for(lambda: [one for one in router.all("load") if one.evictable_blocks])
    assert (load[-1].evictable_blocks, load[-1].free_blocks) == (7, 57)
    assert router.all("batch_timed")[0].step_s > 0


async def test_cache_changes_go_to_subscribed_routers(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE)
    early = await attach(d, wants_kv_events=True, name="early")
    deaf = await attach(d, name="deaf")
    await early.local(ask("r", PROMPT, max_tokens=1))
    seed = early.hellos[Role.DECODE].hash_seed
    hashes = block_hashes(PROMPT, 4, chain_key(b"", seed))
    events = await early.wait_for(lambda: early.all("kv_events")[1:])
    assert early.all("kv_events")[0].is_snapshot
    assert [one for event in events for one in event.stored] == hashes
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert deaf.all("kv_events") == []
    late = await attach(d, wants_kv_events=True, name="late")
    snapshot = await late.next("kv_events")
    assert (snapshot.is_snapshot, list(snapshot.stored), snapshot.sequence) == (True, hashes, len(events))


@pytest.mark.parametrize("role", Role)
async def test_a_worker_reads_the_end_of_a_text(start: Any, attach: Any, ask: Any, role: Role) -> None:
    workers = {one: start(one) for one in Role}
    router = await attach(*workers.values())
    assert router.hellos[role].ends_texts
    await router.remote(ask("r", PROMPT))
    hashes = block_hashes(PROMPT, 4, chain_key(b"", router.hellos[role].hash_seed))
    await router.send(role, end_text=worker_pb2.EndText(block_hashes=[b"unknown", *hashes[1::2]]))

    def has_ended(program: Any) -> bool:
        known = program.blocks._retention._known
        return [known[one].reuse_class[0] is Kind.ENDED for one in hashes] == [False] + [True] * (len(hashes) - 1)

    await workers[role].until(has_ended, "the text's class")


async def test_health_has_a_real_watch_and_readiness_ends_with_a_drain(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE, toy_step_s=0.005)
    router = await attach(d)
    async with grpc.aio.insecure_channel(d.address, options=LOCAL) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=""))).status == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert {*(await stub.List(health_pb2.HealthListRequest())).statuses} == {"", SERVICE}
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == SERVING
        reserve = worker_pb2.Reserve(sequence=ask("resident", PROMPT, max_tokens=40), is_local=True)
        await router.send(Role.DECODE, reserve=reserve)
        await router.next("granted", "resident")
        await router.send(Role.DECODE, drain=worker_pb2.DrainWorker())
        assert (await asyncio.wait_for(watch.read(), 60)).status == NOT_SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=""))).status == SERVING
        reserve = worker_pb2.Reserve(sequence=ask("new", PROMPT), is_local=True)
        await router.send(Role.DECODE, reserve=reserve)
        assert (await router.next("refused", "new")).reason == worker_pb2.REFUSAL_REASON_DRAINING
        assert await router.finished("resident") == answer(PROMPT, 40)
        assert (await router.wait_for(lambda: [one for one in router.all("load") if one.is_draining]))[0]
        watch.cancel()


async def test_an_operator_drains_and_undrains_a_worker(
    start: Any, attach: Any, ask: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pdserve.worker.program")
    d = start(Role.DECODE)
    router, other = await attach(d), await attach(d, name="other")
    async with grpc.aio.insecure_channel(d.address, options=LOCAL) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == SERVING
        await router.send(Role.DECODE, drain=worker_pb2.DrainWorker())
        for each in (router, other):
            drained = await each.wait_for(lambda each=each: [one for one in each.all("load") if one.is_drained])
            assert drained[0].is_draining
        assert (await asyncio.wait_for(watch.read(), 60)).status == NOT_SERVING
        await asyncio.to_thread(d.host._engine.is_idle.wait, 20)
        await other.send(Role.DECODE, undrain=worker_pb2.UndrainWorker())
        assert (await asyncio.wait_for(watch.read(), 60)).status == SERVING
        watch.cancel()
    last = await router.wait_for(lambda: [one for one in router.all("load")[-1:] if not one.is_draining])
    assert not last[0].is_drained
    logged = [one.getMessage() for one in caplog.records if "operator" in one.getMessage()]
    assert logged == ["an operator has drained the worker", "an operator has undone the drain"]
    assert not d.host._engine.is_idle.is_set()  # A later SIGTERM waits for the attempts of that time.
    assert await router.local(ask("r", PROMPT)) == answer(PROMPT, 8)


async def test_a_worker_that_shuts_down_cannot_be_undrained(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE, toy_step_s=0.03)
    router = await attach(d)
    reserve = worker_pb2.Reserve(sequence=ask("resident", PROMPT, max_tokens=40), is_local=True)
    await router.send(Role.DECODE, reserve=reserve)
    await router.next("granted", "resident")
    d.host.drain()
    await router.wait_for(lambda: [one for one in router.all("load") if one.is_draining])
    assert not router.all("load")[-1].is_drained
    await router.send(Role.DECODE, drain=worker_pb2.DrainWorker())
    await router.send(Role.DECODE, undrain=worker_pb2.UndrainWorker())
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=ask("new", PROMPT), is_local=True))
    assert (await router.next("refused", "new")).reason == worker_pb2.REFUSAL_REASON_DRAINING
    assert await router.finished("resident") == answer(PROMPT, 40)
    assert await asyncio.to_thread(d.host.wait, 20)


async def test_a_drained_host_stops_after_its_sequences(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE, toy_step_s=0.005)
    router = await attach(d)
    reserve = worker_pb2.Reserve(sequence=ask("r", PROMPT, max_tokens=40), is_local=True)
    await router.send(Role.DECODE, reserve=reserve)
    await router.next("granted", "r")
    d.host.drain()
    assert await router.finished("r") == answer(PROMPT, 40)
    assert await asyncio.to_thread(d.host.wait, 10)
    await router.wait_for(lambda: router.all("ended"))
    assert not d.host.is_healthy()


async def test_a_drained_host_waits_for_an_order_only_while_a_router_is_there(
    start: Any, attach: Any, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "ORDER_S", 3600.0)
    d = start(Role.DECODE, drain_s=3600.0)
    router = await attach(d)
    assert await router.local(ask("r", PROMPT)) == answer(PROMPT, 8)
    d.host.drain()
    assert not await asyncio.to_thread(d.host.wait, 0.2)
    await router.close()
    assert await asyncio.to_thread(d.host.wait, DEADLINE_S)


async def test_a_drain_does_not_wait_for_ever(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE, drain_s=0.1)
    router = await attach(d)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=ask("r", PROMPT)))
    await router.next("granted", "r")
    d.host.drain()
    assert await asyncio.to_thread(d.host.wait, 10)


def test_a_port_in_use_is_a_config_error(start: Any) -> None:
    d = start(Role.DECODE)
    with pytest.raises(ConfigError, match="port"):
        start(Role.PREFILL, port=int(d.address.rpartition(":")[2]))


def test_an_unservable_model_fails_the_start(start: Any, tmp_path: Any) -> None:
    with pytest.raises(ConfigError):
        start(Role.DECODE, model=str(tmp_path / "nothing"))


def test_stopping_twice_is_harmless(start: Any) -> None:
    d = start(Role.DECODE)
    d.host.stop()
    d.host.stop()
    assert d.host.wait(0)


def test_the_end_of_a_worker_follows_the_calls_before_it(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise attempts of a router that has left would remain."""
    worker = start(Role.DECODE)
    engine, tick = worker.host._engine, worker.program.tick
    is_held, is_free, calls = threading.Event(), threading.Event(), list[str]()

    def held() -> None:
        is_held.set()
        assert is_free.wait(DEADLINE_S)
        tick()

    monkeypatch.setattr(worker.program, "tick", held)
    engine.post(lambda: None)
    assert is_held.wait(DEADLINE_S)
    engine.post(lambda: calls.append("lost"))
    num_waiting = engine.num_waiting_calls
    ending = threading.Thread(target=worker.host.stop)
    ending.start()
    until_s = time.monotonic() + DEADLINE_S
    while engine.num_waiting_calls == num_waiting:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    is_free.set()
    ending.join(DEADLINE_S)
    assert calls == ["lost"]


def test_a_worker_takes_new_times() -> None:
    worker = make_host(config(Role.DECODE, stall_s=0.02))
    worker.reload({"stall_s": 50.0, "drain_s": 2.0})
    assert (worker._config.drain_s, worker._watchdog.stall_s, worker._watchdog._interval_s) == (2.0, 50.0, 1.0)
