"""Workers pull cached KV from each other over real gRPC: tokens, bytes, memory, refusals and failures."""

from __future__ import annotations

import asyncio
import socket
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from kvtransfer import pulls
from kvtransfer.link import dial
from kvtransfer.protocol.grants import grant_to_proto
from pdserve.core.access.proof import caller_name
from pdserve.core.attempt import PULLS_GIVEN, PULLS_TAKEN
from pdserve.core.errors import TransferFailed, Unavailable
from pdserve.core.kv.kv_shape import Grant, TransferKey
from pdserve.core.kv.pulls import ASK_S, LONG_QUERIES
from pdserve.core.types import Role
from pdserve.engine.load_engine import load_engine
from pdserve.engine.memory.host import HostMemory
from pdserve.engine.toy import answer
from pdserve.v1 import transfer_pb2, worker_pb2
from tests.support.slow import slow_except

PROMPT = list(b"The quick brown fox jumps over it")  # 33 bytes: 8 blocks can be reused
REUSED = 32


def from_(worker: Any, sequence: worker_pb2.Sequence, num_tokens: int = REUSED) -> worker_pb2.Sequence:
    """The sequence, with that worker as the source of its prefix."""
    context = worker.program.context
    sequence.source.CopyFrom(
        worker_pb2.PrefixSource(
            worker_id=context.config.worker_id,
            incarnation=context.incarnation,
            endpoint=worker.address,
            num_tokens=num_tokens,
        )
    )
    return sequence


async def waits(worker: Any, computed_s: float = 60.0) -> None:
    """Its prompts are worth to be pulled, and wait for so long: the toy engine would compute them at once."""
    await worker.on_engine(lambda program: setattr(program.fetches, "_prefill_s", lambda tokens, cached: computed_s))


async def idle(*workers: Any) -> None:
    for worker in workers:
        await worker.until(lambda program: program.is_idle and not program.blocks.num_referenced, "no block in use")


@pytest.fixture
async def pair(start: Any, attach: Any, ask: Any) -> Any:
    """(p0, which has the prompt; p1, which has not; a router of p1; a decode worker)"""
    p0, p1 = start(Role.PREFILL), start(Role.PREFILL, worker_id="prefill-1")
    d = start(Role.DECODE)
    assert await (await attach(p0, d)).remote(ask("before", PROMPT)) == answer(PROMPT, 8, prefilled=len(PROMPT))
    await waits(p1)
    return p0, p1, await attach(p1, d, name="router-1"), d


@pytest.mark.parametrize("transport", slow_except(["tcp", "shm"], "shm"))
async def test_a_prefill_worker_pulls_from_another(start: Any, attach: Any, ask: Any, transport: str) -> None:
    p0, d = start(Role.PREFILL, transport=transport), start(Role.DECODE, transport=transport)
    p1 = start(Role.PREFILL, worker_id="prefill-1", transport=transport)
    expected = answer(PROMPT, 8, prefilled=len(PROMPT))
    assert await (await attach(p0, d)).remote(ask("before", PROMPT)) == expected
    await waits(p1)
    router = await attach(p1, d, name="router-1")
    assert router.hellos[Role.PREFILL].pulls_kv
    assert await router.remote(from_(p0, ask("r", PROMPT))) == expected
    [ended] = router.all("pull_ended", "r")
    assert (ended.source, ended.num_tokens, ended.error) == ("prefill-0", REUSED, "")
    assert ended.num_bytes == 8 * p1.program.engine.spec.block_bytes
    assert 0.0 < ended.busy_s <= ended.pull_s
    assert router.all("first_token", "r")[0].cached_tokens == REUSED
    assert await router.remote(from_(p0, ask("again", PROMPT))) == expected
    assert not router.all("pull_ended", "again"), "it has the prefix now"
    await idle(p0, p1)


async def test_a_prefill_worker_pulls_an_answer(start: Any, attach: Any, ask: Any) -> None:
    """The next turn of a session: only the decode worker has the KV of the answer."""
    p, d = start(Role.PREFILL, model="toy"), start(Role.DECODE, model="toy")
    router = await attach(p, d)
    before = await router.remote(ask("before", PROMPT, max_tokens=20))
    await waits(p)
    turn = [*PROMPT, *before, *b"next"]
    cached = (len(PROMPT) + 19) // 4 * 4
    other = await attach(p, start(Role.DECODE, model="toy", worker_id="decode-1"), name="router-1")
    assert await other.remote(from_(d, ask("r", turn), cached)) == answer(turn, 8)
    assert other.all("pull_ended", "r")[0].num_tokens == cached - REUSED
    assert other.all("first_token", "r")[0].cached_tokens == cached
    await idle(p, d)


@pytest.mark.parametrize("of", list(Role))
async def test_a_decode_worker_pulls_a_local_prompt(start: Any, attach: Any, ask: Any, of: Role) -> None:
    p, d0 = start(Role.PREFILL, model="toy"), start(Role.DECODE, model="toy")
    d1 = start(Role.DECODE, model="toy", worker_id="decode-1")
    await (await attach(p, d0)).remote(ask("before", PROMPT))
    await waits(d1)
    router = await attach(d1, name="router-1")
    assert await router.local(from_(p if of is Role.PREFILL else d0, ask("r", PROMPT))) == answer(PROMPT, 8)
    assert [one.num_tokens for one in router.all("pull_ended", "r")] == [REUSED]
    assert router.rows("r")[0].cached_tokens == REUSED
    await idle(p, d0, d1)


async def test_the_leading_part_is_given(pair: Any, ask: Any) -> None:
    """The index was late: the source has only the first blocks of what the router expects."""
    p0, p1, router, _ = pair
    longer = [*PROMPT[:REUSED], *b"and something else"]
    assert await router.remote(from_(p0, ask("r", longer), 48)) == answer(longer, 8, prefilled=len(longer))
    [ended] = router.all("pull_ended", "r")
    assert (ended.num_tokens, ended.error) == (REUSED, "")
    assert router.all("first_token", "r")[0].cached_tokens == REUSED
    await idle(p0, p1)


async def test_a_part_that_is_soon_computed_is_not_pulled(pair: Any, ask: Any) -> None:
    p0, p1, router, _ = pair

    def computes_a_part_at_once(program: Any) -> None:
        program.fetches._prefill_s = lambda tokens, cached: 60.0 if tokens > REUSED else 1e-9

    await p1.on_engine(computes_a_part_at_once)
    longer = [*PROMPT[:REUSED], *b"and something else"]
    assert await router.remote(from_(p0, ask("r", longer), 48)) == answer(longer, 8, prefilled=len(longer))
    [ended] = router.all("pull_ended", "r")
    assert (ended.num_tokens, ended.error) == (0, pulls.MISSING)
    await idle(p0, p1)


async def test_a_long_step_does_not_delay_the_answer(start: Any, attach: Any, ask: Any) -> None:
    """The source answers between two layers of a step, which lasts until the pull has ended."""
    is_running, has_ended = threading.Event(), threading.Event()

    def load(config: Any, role: Role) -> Any:
        engine = load_engine(config, role)
        step = engine.step

        def stepped(rows: Any, on_layer: Any = None) -> Any:
            while on_layer is not None and not has_ended.wait(0.005):
                is_running.set()
                on_layer(0)
            return step(rows, on_layer)

        engine.step = stepped
        return engine

    p0 = start(Role.PREFILL, load, max_batch_tokens=128)
    p1, d = start(Role.PREFILL, worker_id="prefill-1"), start(Role.DECODE)
    expected = answer(PROMPT, 8, prefilled=len(PROMPT))
    before = await attach(p0, d)
    assert await before.remote(ask("before", PROMPT)) == expected
    await waits(p1)
    long = [*range(3, 3 + 2 * LONG_QUERIES)]
    router = await attach(p1, d, name="router-1")
    running = asyncio.create_task(before.remote(ask("long", long)))
    try:
        assert await asyncio.to_thread(is_running.wait, 20.0)
        assert await router.remote(from_(p0, ask("r", PROMPT))) == expected
    finally:
        has_ended.set()
    assert router.all("pull_ended", "r")[0].num_tokens == REUSED
    assert await running == answer(long, 8, prefilled=len(long))
    await idle(p0, p1)


async def test_no_block_of_a_running_step_is_free(start: Any, attach: Any, ask: Any) -> None:
    """Between two layers, free blocks can be lent or fetched into. The transfer of the step's prompt cannot start."""
    num_referenced: list[int] = []

    def load(config: Any, role: Role) -> Any:
        engine = load_engine(config, role)
        step = engine.step

        def stepped(rows: Any, on_layer: Any = None) -> Any:
            def looked(num_layers: int) -> None:
                blocks = p.program.blocks
                num_referenced.extend(blocks._references[block] for row in rows for block in row.blocks)
                on_layer(num_layers)

            return step(rows) if on_layer is None else step(rows, looked)

        engine.step = stepped
        return engine

    p, d = start(Role.PREFILL, load, max_batch_tokens=128), start(Role.DECODE)
    router = await attach(p, d)

    def fails(*arguments: Any, **named: Any) -> None:
        raise Unavailable("no connection can be made")

    await p.on_engine(lambda program: setattr(program._sender, "start", fails))
    sequence = ask("r", [*range(3, 3 + 2 * LONG_QUERIES)])
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence))
    granted = await router.next("granted", "r")
    await router.send(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=sequence, grant=granted.grant))
    await router.released("r", Role.PREFILL)
    assert "no connection can be made" in (await router.next("transfer_ended", "r", Role.PREFILL)).error
    assert num_referenced
    assert all(num_referenced)
    await idle(p)


async def test_what_the_host_tier_has_is_given(start: Any, attach: Any, ask: Any) -> None:
    p0, d = start(Role.PREFILL, kv_blocks=16, kv_host_bytes=2**20, toy_step_s=0.01), start(Role.DECODE)
    p1 = start(Role.PREFILL, worker_id="prefill-1")
    expected = answer(PROMPT, 8, prefilled=len(PROMPT))
    before = await attach(p0, d)
    assert await before.remote(ask("before", PROMPT)) == expected
    await before.remote(ask("other", PROMPT[::-1] + PROMPT[10:]))  # needs all blocks of the pool
    assert len(p0.program.blocks.tier) > 0
    await waits(p1)
    router = await attach(p1, d, name="router-1")
    assert await router.remote(from_(p0, ask("r", PROMPT))) == expected
    assert router.all("pull_ended", "r")[0].num_tokens == REUSED
    await idle(p0, p1)


async def test_a_refusal_is_a_miss(pair: Any, ask: Any) -> None:
    p0, p1, router, _ = pair
    other = PROMPT[::-1]
    assert await router.remote(from_(p0, ask("missing", other))) == answer(other, 8, prefilled=len(other))
    [ended] = router.all("pull_ended", "missing")
    assert (ended.num_tokens, ended.error, ended.is_unreachable) == (0, pulls.MISSING, False)
    assert router.all("first_token", "missing")[0].cached_tokens == 0
    await p0.on_engine(lambda program: program._set_drained(True))
    assert await router.remote(from_(p0, ask("drained", PROMPT))) == answer(PROMPT, 8, prefilled=len(PROMPT))
    assert router.all("pull_ended", "drained")[0].error == pulls.DRAINING
    await idle(p0, p1)


async def test_wrong_contents_are_not_given(pair: Any, ask: Any) -> None:
    p0, p1, router, _ = pair

    def damage(program: Any) -> None:
        for block in range(program.blocks.num_blocks):
            program.blocks.stamps.mark(block, 1)

    await p0.on_engine(damage)
    assert await router.remote(from_(p0, ask("r", PROMPT))) == answer(PROMPT, 8, prefilled=len(PROMPT))
    assert router.all("pull_ended", "r")[0].error == pulls.MISSING
    await idle(p0, p1)


async def test_a_worker_of_another_shape_is_no_source(start: Any, attach: Any, ask: Any) -> None:
    p0, d = start(Role.PREFILL, block_size=8), start(Role.DECODE)
    p1 = start(Role.PREFILL, worker_id="prefill-1")
    await (await attach(p0, d)).remote(ask("before", PROMPT))
    await waits(p1)
    router = await attach(p1, d, name="router-1")
    assert await router.remote(from_(p0, ask("r", PROMPT))) == answer(PROMPT, 8, prefilled=len(PROMPT))
    assert router.all("pull_ended", "r")[0].error == pulls.FOREIGN
    await idle(p0, p1)


async def test_a_dead_source_is_a_miss(pair: Any, ask: Any) -> None:
    p0, p1, router, _ = pair
    source = from_(p0, ask("r", PROMPT))
    p0.host.stop()
    assert await router.remote(source) == answer(PROMPT, 8, prefilled=len(PROMPT))
    [ended] = router.all("pull_ended", "r")
    assert "UNAVAILABLE" in ended.error
    assert ended.is_unreachable
    await idle(p1)


@pytest.fixture
def hung() -> Any:
    """The address of a process that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def test_sources_that_hang_keep_no_thread(pair: Any, ask: Any, hung: str) -> None:
    p0, p1, router, _ = pair
    await waits(p1, 0.05)
    for number in range(2 * PULLS_TAKEN):
        sequence = from_(p0, ask(f"hung-{number}", [50 + number] * len(PROMPT)))
        sequence.source.endpoint = hung
        await router.remote(sequence)
        [ended] = router.all("pull_ended", f"hung-{number}")
        assert ended.error
        assert not ended.is_unreachable, "it had little time"
    has_run = threading.Event()
    for _ in range(PULLS_TAKEN):
        p1.program.giver._threads.submit(has_run.set)
    assert await asyncio.to_thread(has_run.wait, ASK_S / 2), "the threads are free long before the asks' time is over"
    await waits(p1)
    assert await router.remote(from_(p0, ask("r", PROMPT))) == answer(PROMPT, 8, prefilled=len(PROMPT))
    assert router.all("pull_ended", "r")[0].num_tokens == REUSED
    await idle(p0, p1)


async def test_a_source_that_never_answers_is_unreachable(pair: Any, ask: Any, hung: str, monkeypatch: Any) -> None:
    p0, p1, router, _ = pair
    monkeypatch.setattr(dial, "SILENT_S", 0.5)
    await waits(p1, 0.15)
    for number in range(100):  # asks of little time add up
        sequence = from_(p0, ask(f"hung-{number}", [50 + number] * len(PROMPT)))
        sequence.source.endpoint = hung
        await router.remote(sequence)
        [ended] = router.all("pull_ended", f"hung-{number}")
        if ended.is_unreachable:
            break
    assert ended.is_unreachable
    await idle(p1)


async def test_an_ask_disturbs_no_other_of_its_source(pair: Any, hung: str, monkeypatch: Any) -> None:
    """Neither by its own end, nor by the end of the connection in favour of another source."""
    p0, p1, _, _ = pair
    client, servicer = p1.program.giver._client, p0.program._peers.receiver.servicer
    has_asked, may_answer = threading.Event(), threading.Event()

    async def late(request: Any, caller: str) -> Any:
        has_asked.set()
        while not may_answer.is_set():
            await asyncio.sleep(0.005)
        return transfer_pb2.PullResponse(refusal="late")

    monkeypatch.setattr(servicer, "give", late)
    monkeypatch.setattr(dial, "MAX_CHANNELS", 1)
    nothing = transfer_pb2.PullRequest()
    patient = asyncio.create_task(asyncio.to_thread(client.ask, nothing, p0.address, 60.0))
    try:
        assert await asyncio.to_thread(has_asked.wait, 20.0)
        for address in (p0.address, hung):
            with pytest.raises(dial.NoAnswer):
                await asyncio.to_thread(client.ask, nothing, address, 0.2)
        [connection] = client._dropped
    finally:
        may_answer.set()
    assert (await patient).refusal == "late"
    assert not client._dropped
    with pytest.raises(ValueError, match="closed"):
        connection.channel.unary_unary("/")(b"")


async def test_a_connection_for_which_there_is_no_thread_is_left(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To wait for its calls or to close it may take for ever."""
    p0, p1, _, _ = pair
    client, closed = p1.program.giver._client, []

    def fails(channel: Any, *arguments: Any) -> None:
        monkeypatch.setattr(channel, "close", lambda: closed.append(True))
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(dial, "_proven", fails)
    with pytest.raises(TransferFailed, match="can't start new thread"):
        await asyncio.to_thread(client.ask, transfer_pb2.PullRequest(), p0.address, 1.0)
    client.close()
    assert not closed

    class Endless:
        def result(self, timeout: float) -> None:
            raise grpc.FutureTimeoutError

    with pytest.raises(grpc.FutureTimeoutError):
        dial.Calls().wait(Endless(), 0.5)


async def test_few_requests_wait_for_a_busy_engine(pair: Any) -> None:
    p0, p1, _, _ = pair
    context, giver, may_go_on = p1.program.context, p0.program.giver, threading.Event()
    requests = []
    for number in range(4 * pulls.MAX_ASKED):
        grant = Grant(
            key=TransferKey(transfer_id=f"pull-{number}", attempt=1, generation=1),
            endpoint=p1.address,
            worker_id="prefill-1",
            incarnation=context.incarnation,
            fingerprint=p1.program.fingerprint,
            blocks=(0,),
            num_cached_blocks=0,
        )
        request = transfer_pb2.PullRequest(grant=grant_to_proto(grant), block_hashes=bytes(16), deadline_s=1.0)
        requests.append(giver.give(request, caller_name("prefill-1", context.incarnation)))
    p0.host._engine.post(lambda: may_go_on.wait(60.0))
    answers = asyncio.gather(*requests)
    await asyncio.sleep(0)  # until each waits, or is refused
    assert len(giver._asked) == pulls.MAX_ASKED
    may_go_on.set()
    refusals = [one.refusal for one in await answers]
    assert refusals == [pulls.RESTARTED] * pulls.MAX_ASKED + [pulls.BUSY] * (3 * pulls.MAX_ASKED)


async def test_without_a_thread_nothing_is_pulled(pair: Any, ask: Any, monkeypatch: Any) -> None:
    p0, p1, router, _ = pair

    def no_thread(*arguments: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(p1.program.giver._threads, "submit", no_thread)
    assert await router.remote(from_(p0, ask("r", PROMPT))) == answer(PROMPT, 8, prefilled=len(PROMPT))
    [ended] = router.all("pull_ended", "r")
    assert (ended.num_tokens, ended.error) == (0, "can't start new thread")
    await idle(p1)
    assert p1.host.is_healthy()


async def test_what_cannot_be_sent_is_not_kept(pair: Any, ask: Any) -> None:
    """Blocks that stay lent would keep a worker that drains from ever being idle."""
    p0, p1, router, _ = pair

    def fails(*arguments: Any, **named: Any) -> None:
        raise MemoryError("no memory for a connection")

    await p0.on_engine(lambda program: setattr(program._sender, "start", fails))
    assert await router.remote(from_(p0, ask("r", PROMPT))) == answer(PROMPT, 8, prefilled=len(PROMPT))
    assert router.all("pull_ended", "r")[0].error == pulls.BUSY
    await idle(p0, p1)


@pytest.mark.parametrize("how", ["source dies", "source drains", "too slow", "cancelled"])
async def test_a_pull_that_is_interrupted(pair: Any, ask: Any, how: str) -> None:
    """In the middle: the first block has arrived, and the source does not send the others."""
    p0, p1, router, _ = pair
    push = p0.program._sender.push

    def push_first(key: Any, blocks: Any, is_last: bool) -> None:
        push(key, blocks[:1], False)

    await p0.on_engine(lambda program: setattr(program._sender, "push", push_first))
    if how == "too slow":
        await waits(p1, 0.3)
    sequence = from_(p0, ask("r", PROMPT))
    expected = answer(PROMPT, 8, prefilled=len(PROMPT))
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=sequence))
    granted = await router.next("granted", "r")
    await router.send(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=sequence, grant=granted.grant))
    if how != "too slow":
        await p1.until(lambda program: program._peers.receiver.stats.chunks > 0, "the first block")
        assert not p0.program.is_idle
        pending = await p1.on_engine(lambda program: program.scheduler.load().pending_prefill_tokens)
        assert pending == len(PROMPT) - REUSED, "only what it computes counts as its work"
        await p1.on_engine(lambda program: program.check())
        await p0.on_engine(lambda program: program.check())
    if how == "source dies":
        p0.program._sender.close()
    elif how == "source drains":
        await p0.on_engine(lambda program: program.drain())
    elif how == "cancelled":
        for role in (Role.PREFILL, Role.DECODE):
            await router.send(role, cancel=worker_pb2.Cancel(request_id="r", attempt=1))
            await router.released("r", role)
    if how != "cancelled":
        first = await router.next("first_token", "r", Role.PREFILL)
        assert first.cached_tokens == 0
        admit = worker_pb2.Admit(request_id="r", attempt=1, first_token_id=first.token.token_id)
        await router.send(Role.DECODE, admit=admit)
        assert [first.token.token_id, *await router.finished("r")] == expected
        [ended] = router.all("pull_ended", "r")
        assert ended.num_tokens == 0
        assert ended.error
    await idle(p0, p1)


async def test_requests_of_strangers_are_refused(pair: Any) -> None:
    p0, p1, _, _ = pair
    program = p1.program
    context = program.context
    grant = Grant(
        key=TransferKey(transfer_id="pull", attempt=1, generation=1),
        endpoint=p1.address,
        worker_id="prefill-1",
        incarnation=context.incarnation,
        fingerprint=program.fingerprint,
        blocks=(0, 1),
        num_cached_blocks=0,
        hash_seed=program.limits.hash_seed,
    )
    good = transfer_pb2.PullRequest(grant=grant_to_proto(grant), block_hashes=bytes(32), deadline_s=1.0)
    good.source_incarnation = p0.program.context.incarnation
    caller = caller_name("prefill-1", context.incarnation)
    give = p0.program.giver.give
    assert (await give(good, caller)).refusal == pulls.MISSING
    assert (await give(good, caller_name("prefill-2", "x"))).refusal == pulls.INVALID
    for changes in ({"block_hashes": b""}, {"block_hashes": bytes(33)}, {"block_hashes": bytes(16)}):
        bad = transfer_pb2.PullRequest(grant=good.grant, deadline_s=1.0, **changes)
        assert (await give(bad, caller)).refusal == pulls.INVALID
    for deadline_s in (0.0, -1.0, float("nan"), 1e9):
        bad = transfer_pb2.PullRequest(grant=good.grant, block_hashes=bytes(32), deadline_s=deadline_s)
        assert (await give(bad, caller)).refusal == pulls.INVALID
    empty = transfer_pb2.PullRequest(block_hashes=bytes(32), deadline_s=1.0)
    assert (await give(empty, caller)).refusal == pulls.INVALID
    good.grant.fingerprint.model = "another"
    assert (await give(good, caller)).refusal == pulls.FOREIGN
    good.source_incarnation = "of a process before"
    assert (await give(good, caller)).refusal == pulls.RESTARTED


async def test_a_small_request_names_no_millions_of_blocks(pair: Any, monkeypatch: Any) -> None:
    p0, _, _, _ = pair
    grant = transfer_pb2.Grant(transfer_id="pull", worker_id="w", incarnation="i", num_blocks=2**24)
    grant.extents.add(first_block=0, num_blocks=2**24)
    requests = [transfer_pb2.PullRequest(grant=grant, block_hashes=bytes(16), deadline_s=1.0)]
    grant.num_blocks = 1
    requests.append(transfer_pb2.PullRequest(grant=grant, block_hashes=bytes(16), deadline_s=1.0))
    del grant.extents[:]
    for _ in range(1_000):
        grant.extents.add()
    requests.append(transfer_pb2.PullRequest(grant=grant, block_hashes=bytes(16), deadline_s=1.0))
    monkeypatch.setattr(pulls, "grant_from_proto", None)  # it would count the blocks, on the engine thread
    for request in requests:
        assert (await p0.program.giver.give(request, caller_name("w", "i"))).refusal == pulls.INVALID


async def test_a_worker_gives_to_few_at_a_time(pair: Any) -> None:
    p0, _, _, _ = pair

    def fill(program: Any) -> str:
        hashes = list(program.blocks._block_of)[:1]
        for number in range(PULLS_GIVEN):
            program.kv.lend(number, hashes)
        request = transfer_pb2.PullRequest(block_hashes=hashes[0], deadline_s=1.0)
        request.source_incarnation = program.context.incarnation
        grant = Grant(
            key=TransferKey(transfer_id="pull", attempt=1, generation=1),
            endpoint="127.0.0.1:1",
            worker_id="w",
            incarnation="i",
            fingerprint=program.fingerprint,
            blocks=(0,),
            num_cached_blocks=0,
            hash_seed=program.limits.hash_seed,
        )
        request.grant.CopyFrom(grant_to_proto(grant))
        refusal, _ = program.giver._decide(pulls._Asked(request, lambda *_: None, lambda: False))
        for number in range(PULLS_GIVEN):
            program.kv.take_back(number)
        return str(refusal)

    assert await p0.on_engine(fill) == pulls.BUSY


async def test_a_pull_that_ends_late_ends_no_worker(pair: Any, ask: Any) -> None:
    """Transfers have their own rules for a peer that hangs: those of a tier that hangs do not count it."""
    p0, p1, router, _ = pair
    await waits(p1, 0.05)
    held = threading.Event()
    receiver = p1.program._peers.receiver
    abort = receiver.abort

    def late(key: Any) -> None:
        threading.Thread(target=lambda: (held.wait(60.0), abort(key)), daemon=True).start()

    receiver.abort = late
    await p0.on_engine(lambda program: setattr(program._sender, "push", lambda *_, **__: None))
    await p1.on_engine(
        lambda program: setattr(
            program, "context", replace(program.context, config=replace(program.context.config, stall_s=0.01))
        )
    )
    assert await router.remote(from_(p0, ask("r", PROMPT))) == answer(PROMPT, 8, prefilled=len(PROMPT))
    assert await p1.on_engine(lambda program: len(program.fetches)) == 1
    await asyncio.sleep(0.02)  # longer than that
    assert p1.program.is_healthy
    held.set()
    await idle(p0, p1)
    assert p1.host.is_healthy()


@pytest.mark.parametrize("num_runs", [1, 2])
def test_memory_is_supplied_without_a_change(num_runs: int) -> None:
    memory = HostMemory(64 * 3000)
    pool = SimpleNamespace(
        buffer=memory.buffer, block_bytes=3000, num_blocks=64, runs_per_block=num_runs, is_on_host=True
    )
    memory.buffer[:] = bytes(range(250)) * 768
    before = bytes(memory.buffer)
    pulls.populate(pool, [63, 0, 1, 7])  # type: ignore[arg-type]
    assert bytes(memory.buffer) == before
