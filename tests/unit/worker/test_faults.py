"""Lost routers, repeated and late messages, invalid prompts, and broken engines."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.config import WorkerConfig
from pdserve.core.types import Role
from pdserve.engine.interface import Row, RowOut
from pdserve.engine.load_engine import load_engine
from pdserve.engine.toy import answer
from pdserve.v1 import worker_pb2
from pdserve.worker.messages import MAX_ENDED_HASHES
from tests.support.cluster_secret import attach as proven_attach

PROMPT = list(range(10, 70))
POISON = 200  # A token that the toy engine never samples.


class FaultyEngine:
    """A toy engine that raises on a row with the poison token, or on every row once it is broken."""

    def __init__(self, config: WorkerConfig, role: Role) -> None:
        self._engine = load_engine(config, role)
        self.spec, self.pool = self._engine.spec, self._engine.pool
        self.is_broken = False

    def step(self, rows: Sequence[Row]) -> list[RowOut]:
        if self.is_broken or any(POISON in row.tokens for row in rows):
            raise RuntimeError("the device is gone")
        return self._engine.step(rows)

    def close(self) -> None:
        self._engine.close()


def is_empty(program: Any) -> bool:
    program.check()
    return program.is_idle and program.blocks.num_referenced == 0


# -- routers ---------------------------------------------------------------------------------------------------


async def test_a_lost_stream_frees_only_that_routers_attempts(start: Any, attach: Any, ask: Any) -> None:
    p = start(Role.PREFILL, toy_step_s=0.01, max_batch_tokens=4)
    d = start(Role.DECODE, toy_step_s=0.005)
    lost, kept = await attach(p, d, name="lost"), await attach(p, d, name="kept")
    await kept.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=ask("k", PROMPT, max_tokens=60), is_local=True))
    await lost.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=ask("l", PROMPT, max_tokens=90), is_local=True))
    sequence = ask("m", PROMPT)
    await lost.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence))
    granted = await lost.next("granted", "m")
    await lost.send(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=sequence, grant=granted.grant))
    await lost.wait_for(lambda: lost.rows("l"))
    await lost.close()
    await p.until(is_empty, "an empty prefill worker")
    await d.until(lambda program: {key.request_id for key in program.scheduler.live()} <= {"k"}, "only the kept one")
    assert await kept.finished("k") == answer(PROMPT, 60)
    await d.until(is_empty, "an empty decode worker")


async def test_a_router_that_attaches_again_replaces_its_old_stream(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE, toy_step_s=0.005)
    old = await attach(d)
    await old.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=ask("r", PROMPT, max_tokens=90), is_local=True))
    await old.wait_for(lambda: old.rows("r"))
    new = await attach(d)
    await old.wait_for(lambda: old.all("ended"))
    assert await new.local(ask("r", PROMPT)) == answer(PROMPT, 8)
    await d.until(is_empty, "an empty worker")


async def test_routers_with_the_same_id_keep_their_streams(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE, toy_step_s=0.005)
    one = await attach(d, incarnation="1")
    await one.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=ask("r", PROMPT, max_tokens=40), is_local=True))
    other = await attach(d, incarnation="2")
    assert await other.local(ask("r", PROMPT)) == answer(PROMPT, 8)
    assert await one.finished("r") == answer(PROMPT, 40)
    await d.until(is_empty, "an empty worker")


async def test_a_router_that_does_not_read_does_not_slow_the_others(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE, heartbeat_s=0.005)
    async with grpc.aio.insecure_channel(d.address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        deaf = await proven_attach(channel, d.address)
        hello = worker_pb2.RouterHello(router_id="deaf", wants_kv_events=True)
        await deaf.write(worker_pb2.AttachRequest(hello=hello))
        router = await attach(d)
        for n in range(5):
            assert await router.local(ask(f"r{n}", PROMPT)) == answer(PROMPT, 8)
        deaf.cancel()


@pytest.mark.parametrize(
    "first",
    [
        worker_pb2.AttachRequest(),
        worker_pb2.AttachRequest(hello=worker_pb2.RouterHello()),
        worker_pb2.AttachRequest(drain=worker_pb2.DrainWorker()),
    ],
)
async def test_a_stream_that_does_not_begin_with_hello_is_refused(start: Any, first: Any) -> None:
    d = start(Role.DECODE)
    async with grpc.aio.insecure_channel(d.address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        stream = await proven_attach(channel, d.address)
        await stream.write(first)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(stream.read(), 60)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not await d.on_engine(lambda program: program.is_draining)


# -- messages --------------------------------------------------------------------------------------------------


async def test_repeated_and_late_messages_are_counted(start: Any, attach: Any, ask: Any) -> None:
    p, d = start(Role.PREFILL), start(Role.DECODE, toy_step_s=0.005)
    router = await attach(p, d)
    sequence = ask("r", PROMPT, attempt=2)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence))
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence))
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=ask("r", PROMPT), is_local=True))
    granted = await router.next("granted", "r")
    for _ in range(2):
        await router.send(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=sequence, grant=granted.grant))
    first = await router.next("first_token", "r")
    for attempt in (2, 2, 1):
        admit = worker_pb2.Admit(request_id="r", attempt=attempt, first_token_id=first.token.token_id)
        await router.send(Role.DECODE, admit=admit)
    tokens = [first.token.token_id, *await router.finished("r", attempt=2)]
    assert tokens == answer(PROMPT, 8, prefilled=len(PROMPT))
    assert len(router.all("granted")) == len(router.all("first_token")) == 1
    await d.until(lambda program: program.counts["late or duplicate admit"] == 2, "two admits dropped")
    assert d.program.counts["late or duplicate attempt"] == 2
    assert p.program.counts["late or duplicate attempt"] == 1


async def test_a_newer_attempt_ends_the_older_one(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE, toy_step_s=0.005)
    router = await attach(d)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=ask("r", PROMPT, max_tokens=90), is_local=True))
    await router.wait_for(lambda: router.rows("r"))
    got = tuple(router.text("r"))
    sequence = ask("r", PROMPT, attempt=2, output=got, max_tokens=len(got) + 5)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence, is_local=True))
    await router.released("r", Role.DECODE, attempt=1)
    assert [*got, *await router.finished("r", attempt=2)] == answer(PROMPT, len(got) + 5)


async def test_a_released_request_id_may_be_reused(start: Any, attach: Any, ask: Any) -> None:
    """After a complete answer, and after a cancelled one."""
    d = start(Role.DECODE, toy_step_s=0.005)
    router = await attach(d)
    for times in (1, 2):
        await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=ask("r", PROMPT), is_local=True))
        await router.wait_for(lambda times=times: len(router.all("released")) == times)
        assert router.text("r") == times * answer(PROMPT, 8)
    long = worker_pb2.Reserve(sequence=ask("left", PROMPT, max_tokens=90), is_local=True)
    await router.send(Role.DECODE, reserve=long)
    await router.wait_for(lambda: router.rows("left"))
    await router.send(Role.DECODE, cancel=worker_pb2.Cancel(request_id="left", attempt=1))
    await router.released("left", Role.DECODE)
    before = len(router.text("left"))
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=ask("left", PROMPT), is_local=True))
    await router.wait_for(lambda: len(router.all("released")) == 4)
    assert router.text("left")[before:] == answer(PROMPT, 8)


async def test_messages_for_the_other_role_are_dropped(start: Any, attach: Any, ask: Any) -> None:
    p, d = start(Role.PREFILL), start(Role.DECODE, is_prefix_cache_on=False)  # otherwise it could send KV
    router = await attach(p, d)
    await router.send(Role.PREFILL, reserve=worker_pb2.Reserve(sequence=ask("r", PROMPT)))
    await router.send(Role.DECODE, prefill=worker_pb2.Prefill(sequence=ask("r", PROMPT)))
    for worker in (p, d):
        await worker.until(lambda program: program.counts["message for the other role"] == 1, "a dropped message")


async def test_a_stale_grant_loses_the_transfer_and_frees_both_sides(start: Any, attach: Any, ask: Any) -> None:
    p, d = start(Role.PREFILL), start(Role.DECODE)
    router = await attach(p, d)
    sequence = ask("r", PROMPT)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence))
    granted = await router.next("granted", "r")
    await router.send(Role.DECODE, cancel=worker_pb2.Cancel(request_id="r", attempt=1))
    await router.released("r", Role.DECODE)
    await router.send(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=sequence, grant=granted.grant))
    ended = await router.next("transfer_ended", "r", Role.PREFILL)
    assert not ended.is_committed
    await router.released("r", Role.PREFILL)
    for worker in (p, d):
        await worker.until(is_empty, "an empty worker")


async def test_a_grant_is_used_by_one_request_only(start: Any, attach: Any, ask: Any) -> None:
    p, d = start(Role.PREFILL, toy_step_s=0.01, max_batch_tokens=16), start(Role.DECODE)
    router = await attach(p, d)
    good, bad = ask("good", PROMPT), ask("bad", PROMPT[::-1])
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=good))
    granted = await router.next("granted", "good")
    for sequence in (good, bad):
        await router.send(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=sequence, grant=granted.grant))
    assert (await router.next("failed", "bad")).kind == worker_pb2.FAILURE_KIND_TRANSFER
    first = await router.next("first_token", "good")
    admit = worker_pb2.Admit(request_id="good", attempt=1, first_token_id=first.token.token_id)
    await router.send(Role.DECODE, admit=admit)
    tokens = [first.token.token_id, *await router.finished("good")]
    assert tokens == answer(PROMPT, 8, prefilled=len(PROMPT))


async def test_a_dead_receiver_ends_the_worker(start: Any) -> None:
    d = start(Role.DECODE)
    d.program._receiver.close()
    await d.until_fatal()
    assert not d.host.is_healthy()


async def test_a_grant_of_a_dead_worker_fails_the_transfer(start: Any, attach: Any, ask: Any) -> None:
    p, d = start(Role.PREFILL), start(Role.DECODE)
    router = await attach(p, d)
    sequence = ask("r", PROMPT)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence))
    granted = await router.next("granted", "r")
    d.host.stop()
    await router.send(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=sequence, grant=granted.grant))
    ended = await router.next("transfer_ended", "r", Role.PREFILL)
    assert not ended.is_committed
    await router.released("r", Role.PREFILL)


async def test_a_decode_worker_of_another_model_is_not_written_to(start: Any, attach: Any, ask: Any) -> None:
    p, d = start(Role.PREFILL, model="toy"), start(Role.DECODE, model="toy-marked")
    router = await attach(p, d)
    sequence = ask("r", PROMPT)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence))
    granted = await router.next("granted", "r")
    await router.send(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=sequence, grant=granted.grant))
    ended = await router.next("transfer_ended", "r", Role.PREFILL)
    assert "fingerprint.model" in ended.error
    await router.send(Role.DECODE, cancel=worker_pb2.Cancel(request_id="r", attempt=1))
    await router.released("r", Role.DECODE)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prompt": []}, "prompt_token_ids"),
        ({"prompt": [300]}, "prompt_token_ids"),
        ({"prompt": [1] * 257}, "prompt_token_ids"),
        ({"output": (999,)}, "output_token_ids"),
        ({"output": (1, 2), "max_tokens": 2}, "output_token_ids"),
        ({"stop_token_ids": (4000,)}, "stop_token_ids"),
        ({"deadline_s": float("nan")}, "deadline_s: got nan, expected between 0 and 86400 seconds"),
        ({"deadline_s": float("inf")}, "deadline_s: got inf"),
        ({"deadline_s": 86_401.0}, "deadline_s: got 86401"),
        ({"deadline_s": -1.0}, "deadline_s: got -1"),
        ({"tpot_s": float("nan")}, "tpot_s: got nan, expected between 1e-06 and 86400 seconds"),
        ({"tpot_s": float("inf")}, "tpot_s: got inf"),
        ({"tpot_s": 5e-324}, "tpot_s: got 5e-324"),
        ({"tpot_s": 0.0}, "tpot_s: got 0"),
        ({"itl_s": -1.0}, "itl_s: got -1"),
    ],
)
async def test_an_invalid_sequence_names_its_field(
    start: Any, attach: Any, ask: Any, changes: dict[str, Any], named: str
) -> None:
    d = start(Role.DECODE)
    router = await attach(d)
    sequence = ask("r", **{"prompt": PROMPT, **changes})
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence, is_local=True))
    failed = await router.next("failed", "r")
    assert failed.kind == worker_pb2.FAILURE_KIND_INVALID
    assert named in failed.message
    await router.released("r", Role.DECODE)


async def test_invalid_sampling_names_its_field(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE)
    router = await attach(d)
    for name, field, value in (("a", "temperature", float("nan")), ("b", "top_p", 0.0), ("c", "max_tokens", 0)):
        sequence = ask(name, PROMPT)
        setattr(sequence.sampling, field, value)
        await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence, is_local=True))
        failed = await router.next("failed", name)
        assert (failed.kind, field in failed.message) == (worker_pb2.FAILURE_KIND_INVALID, True)


async def test_a_message_that_names_no_attempt_is_dropped(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE)
    router = await attach(d)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve())
    await router.send(Role.DECODE, cancel=worker_pb2.Cancel(request_id="x" * 10_000, attempt=1))
    await router.send(Role.DECODE, admit=worker_pb2.Admit(request_id="r", attempt=0))
    await router.send(Role.DECODE, end_text=worker_pb2.EndText(block_hashes=[b"x"] * (MAX_ENDED_HASHES + 1)))
    await d.until(lambda program: program.counts["unusable message"] == 4, "four dropped messages")
    assert await router.local(ask("r", PROMPT)) == answer(PROMPT, 8)


async def test_a_deadline_ends_an_attempt_without_kv(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE)
    router = await attach(d)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=ask("r", PROMPT, deadline_s=0.1)))
    await router.next("granted", "r")
    await router.released("r", Role.DECODE)
    ends = router.all("failed", "r") + router.all("transfer_ended", "r")
    assert len(ends) == 1
    await d.until(is_empty, "an empty worker")


# -- engines ---------------------------------------------------------------------------------------------------


async def test_a_row_that_the_engine_cannot_compute_fails_alone(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE, FaultyEngine)
    router = await attach(d)
    prompts = {"good": [10, 11, 12, 13], "bad": [10, POISON], "fine": [20, 21]}
    for name, prompt in prompts.items():
        sequence = ask(name, prompt, max_tokens=4)
        await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence, is_local=True))
    failed = await router.next("failed", "bad")
    assert failed.kind == worker_pb2.FAILURE_KIND_INTERNAL
    await router.released("bad", Role.DECODE)
    assert await router.finished("good") == answer(prompts["good"], 4)
    assert await router.finished("fine") == answer(prompts["fine"], 4)
    assert d.host.is_healthy()


async def test_bad_rows_alone_do_not_end_a_worker(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE, FaultyEngine)
    router = await attach(d)
    for n in range(20):
        reserve = worker_pb2.Reserve(sequence=ask(f"bad{n}", [10, POISON]), is_local=True)
        await router.send(Role.DECODE, reserve=reserve)
        await router.released(f"bad{n}", Role.DECODE)
    assert await router.local(ask("good", PROMPT)) == answer(PROMPT, 8)
    assert d.host.is_healthy()


async def test_a_poisoned_prompt_frees_the_reservation(start: Any, attach: Any, ask: Any) -> None:
    p, d = start(Role.PREFILL, FaultyEngine), start(Role.DECODE)
    router = await attach(p, d)
    sequence = ask("r", [1, 2, POISON])
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence))
    granted = await router.next("granted", "r")
    await router.send(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=sequence, grant=granted.grant))
    failed = await router.next("failed", "r", Role.PREFILL)
    assert failed.kind == worker_pb2.FAILURE_KIND_INTERNAL
    await router.released("r", Role.PREFILL)
    await router.send(Role.DECODE, cancel=worker_pb2.Cancel(request_id="r", attempt=1))
    await router.released("r", Role.DECODE)
    for worker in (p, d):
        await worker.until(is_empty, "an empty worker")


async def test_a_broken_engine_fails_everything_and_ends_the_worker(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE, FaultyEngine, toy_step_s=0.005)
    router = await attach(d)
    async with grpc.aio.insecure_channel(d.address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        request = health_pb2.HealthCheckRequest(service="")
        watch = health_pb2_grpc.HealthStub(channel).Watch(request)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        for n in range(3):
            sequence = ask(f"r{n}", PROMPT, max_tokens=100)
            await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence, is_local=True))
        await router.wait_for(lambda: all(router.rows(f"r{n}") for n in range(3)))
        await d.on_engine(lambda program: setattr(program.engine, "is_broken", True))
        for n in range(3):
            failed = await router.next("failed", f"r{n}")
            assert failed.kind == worker_pb2.FAILURE_KIND_INTERNAL
        status = await asyncio.wait_for(watch.read(), 60)
        assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING
    await d.until_fatal()
    assert not d.host.is_healthy()


async def test_an_endless_deadline_fails_its_attempt_and_nothing_else(
    start: Any, attach: Any, ask: Any, unused_tcp_port: int
) -> None:
    """A receiver that waited for such a deadline would end the worker, and then its successor."""
    d = start(Role.DECODE, metrics_port=unused_tcp_port)
    router = await attach(d)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=ask("endless", PROMPT, deadline_s=math.inf)))
    failed = await router.next("failed", "endless")
    assert (failed.kind, "deadline_s" in failed.message) == (worker_pb2.FAILURE_KIND_INVALID, True)
    await router.released("endless", Role.DECODE)
    assert await router.local(ask("r", PROMPT)) == answer(PROMPT, 8)
    assert d.host.is_healthy()
    assert 'pdserve_invalid_messages_total{field="deadline_s"} 1.0' in d.program.context.metrics.text()
