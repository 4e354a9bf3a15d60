"""Publisher and index together over a real server."""

import asyncio
import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from pdserve.core.errors import ConfigError
from pdserve.core.kv.hashing import block_hashes, chain_key
from pdserve.core.kv.tier_reads import Tier, TierDepths
from pdserve.prefix import redis_index, schema
from pdserve.prefix.embedded import EmbeddedRedis
from pdserve.prefix.publisher import GRACE_LEASES
from pdserve.prefix.redis_index import LOOKUP_SLOTS, MAX_PROBES, RedisIndex
from pdserve.prefix.registry import Registry
from pdserve.prefix.schema import fingerprint_of, index_tag
from tests.support.tcp_redis import listen_on_tcp
from tests.unit.prefix.given import SEED, chain, crash, following, publisher, publishing, until, until_found

TAG = index_tag("test", fingerprint_of(SEED))


async def test_stored_blocks_are_found_and_removed_ones_are_not(url: str) -> None:
    blocks = chain(6)
    async with following(url) as index, publishing(url, "w") as worker:
        worker.offer(stored=blocks)
        await until_found(index, blocks, {"w": 6})
        worker.offer(removed=blocks[4:])
        await until_found(index, blocks, {"w": 4})
        assert await index.lookup(chain(3, "unknown")) == {}
        assert await index.lookup([]) == {}


async def test_blocks_offered_before_the_start_are_published(url: str) -> None:
    worker = publisher(url, "w")
    worker.offer(stored=chain(3))
    await worker.start()
    async with following(url) as index:
        await until_found(index, chain(3), {"w": 3})
    await worker.stop()


@pytest.mark.parametrize("length", [1, 16, 64, 65, 256, 1000, 1024, 5000])
async def test_depths_are_exact_for_chains_of_any_length(url: str, length: int) -> None:
    blocks = chain(length)
    depths = {"all": length, "most": length * 9 // 10, "half": length // 2, "one": 1, "none": 0}
    async with following(url) as index:
        workers = []
        for name, depth in depths.items():
            worker = publisher(url, name)
            worker.offer(stored=blocks[:depth])
            await worker.start()
            workers.append(worker)
        await until_found(index, blocks, {name: depth for name, depth in depths.items() if depth})
        await asyncio.gather(*(worker.stop() for worker in workers))


async def test_more_workers_than_one_script_asks_for(url: str) -> None:
    assert LOOKUP_SLOTS < 72
    blocks = chain(80)
    async with following(url) as index:
        workers = [publisher(url, f"w{number}") for number in range(72)]
        for number, worker in enumerate(workers):
            worker.offer(stored=blocks[: number + 1])
            await worker.start()
        await until_found(index, blocks, {f"w{number}": number + 1 for number in range(72)})
        await asyncio.gather(*(worker.stop() for worker in workers))


def fill(client: Any, blocks: list[bytes], depths: list[int]) -> None:
    """Leases a slot for each depth, whose worker holds so many of the blocks."""
    claim = client.register_script(schema.CLAIM)
    for number, depth in enumerate(depths):
        owner = schema.owner_of(f"w{number}", "first")
        slot, _, _ = claim(keys=[TAG], args=[owner, f"w{number}", 600_000, schema.MAX_SLOTS, "0"])
        if depth:
            client.sadd(f"{TAG}:r:{slot}", "", *blocks[:depth])


@pytest.mark.parametrize(("count", "length"), [(3, 1000), (64, 1000), (65, 129), (200, 1), (200, 700)])
async def test_depths_are_exact_for_any_number_of_workers(url: str, count: int, length: int) -> None:
    blocks = chain(length)
    depths = [(number * 7919) % (length + 1) for number in range(count)]
    with redis.Redis.from_url(url) as client:
        fill(client, blocks, depths)
    async with following(url) as index:
        await until_found(index, blocks, {f"w{number}": depth for number, depth in enumerate(depths) if depth})


async def test_a_chain_is_sent_only_for_the_slots_that_hold_its_first_block(url: str) -> None:
    blocks = chain(4096)
    with redis.Redis.from_url(url) as client:
        fill(client, blocks, [4096, *[0] * 600, 7])
        async with following(url, refresh_s=60.0) as index:
            await until_found(index, blocks, {"w0": 4096, "w601": 7})
            before = client.info("stats")["total_net_input_bytes"]
            assert await index.lookup(blocks) == {"w0": 4096, "w601": 7}
            sent = client.info("stats")["total_net_input_bytes"] - before
    assert 16 * 4096 < sent < 2 * 16 * 4096


async def test_slots_that_change_during_a_second_lookup_too_are_not_believed(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        fill(client, chain(4), [4])
        async with following(url, refresh_s=60.0) as index:
            await until_found(index, chain(4), {"w0": 4})
            read = index._read_slots

            async def read_before_a_change() -> object:
                slots = await read()
                client.incr(f"{TAG}:epoch")
                return slots

            index._read_slots = read_before_a_change  # type: ignore[method-assign, assignment]
            client.incr(f"{TAG}:epoch")
            assert await index.lookup(chain(4)) == {}


async def test_a_new_incarnation_masks_the_old_one_at_once(url: str) -> None:
    blocks = chain(4)
    async with following(url, refresh_s=60.0) as index, publishing(url, "w", "old") as old:
        old.offer(stored=blocks)
        await until(lambda: old.num_waiting == 0)
        index.bind(bytes(32))  # the slots may have been read before the worker came, and are read rarely
        index.bind(SEED)
        await until_found(index, blocks, {"w": 4})
        async with publishing(url, "w", "new") as new:
            # No refresh is due for a minute, so the change is detected by the epoch in the answer.
            assert await index.lookup(blocks) == {}
            new.offer(stored=blocks[:1])
            await until_found(index, blocks, {"w": 1})


async def test_an_old_incarnation_that_wakes_up_does_not_come_back(url: str) -> None:
    async with (
        following(url) as index,
        publishing(url, "w", "old", heartbeat_s=0.05) as old,
        publishing(url, "w", "new") as new,
    ):
        await until(lambda: not old.is_connected)
        old.offer(stored=chain(3))
        new.offer(stored=chain(2))
        await until_found(index, chain(3), {"w": 2})
        assert not old.is_connected
        assert new.is_connected


async def test_a_crash_is_masked_when_the_lease_ends_without_any_cleanup(url: str) -> None:
    blocks = chain(4)
    async with following(url) as index:
        worker = publisher(url, "w", lease_s=60.0)
        worker.offer(stored=blocks)
        await worker.start()
        await until_found(index, blocks, {"w": 4})
        await crash(worker)
        with redis.Redis.from_url(url) as client:
            assert 0 < client.pttl(f"{TAG}:w:0") <= 60_000
            assert client.pexpire(f"{TAG}:w:0", 1)  # the end of the lease
            await until_found(index, blocks, {})
            # The blocks are still there: they were masked, not deleted.
            assert client.smembers(f"{TAG}:r:0") == {b"", *blocks}


async def test_a_clean_stop_is_visible_at_once(url: str) -> None:
    async with following(url) as index:
        async with publishing(url, "w") as worker:
            worker.offer(stored=chain(2))
            await until_found(index, chain(2), {"w": 2})
        assert await index.lookup(chain(2)) == {}


async def test_a_slot_is_reused_only_after_its_sweep(url: str) -> None:
    blocks = chain(3000)
    async with following(url) as index, publishing(url, "sweeper", heartbeat_s=0.05) as sweeper:
        worker = publisher(url, "w")
        worker.offer(stored=blocks)
        await worker.start()
        await until_found(index, blocks, {"w": 3000})
        await crash(worker)
        with redis.Redis.from_url(url) as client:
            assert client.scard(f"{TAG}:free") == 0
            assert client.delete(f"{TAG}:w:1") == 1  # its lease ends
            await until(lambda: client.scard(f"{TAG}:free") == 1)
            assert client.exists(f"{TAG}:r:1") == 0
        await until(lambda: sweeper._sweeper.num_swept_slots == 1)
        async with publishing(url, "other") as other:
            assert other._index.slot == 1
            other.offer(stored=blocks[:1])
            await until_found(index, blocks, {"other": 1})


async def test_nothing_is_swept_if_most_workers_seem_dead(url: str) -> None:
    """The leases are so long that none ends by itself: a busy machine cannot end that of the worker that sweeps."""
    async with publishing(url, "alive", lease_s=60.0) as alive:
        lost = [publisher(url, f"lost{number}", lease_s=60.0) for number in range(2)]
        for worker in lost:
            await worker.start()
        await until(lambda: all(worker.is_connected for worker in lost))
        slots = [worker._index.slot for worker in lost]
        for worker in lost:
            await crash(worker)
        with redis.Redis.from_url(url, decode_responses=True) as client:
            assert client.delete(*(f"{TAG}:w:{slot}" for slot in slots)) == 2  # their leases end
            for _ in range(2):
                await alive._sweeper.sweep()
                assert set(client.hkeys(f"{TAG}:dead")) == set(map(str, slots))  # they were seen dead
                assert client.scard(f"{TAG}:free") == 0
            now_ms = 1000 * client.time()[0]
            client.hset(f"{TAG}:dead", slots[0], now_ms - 1000 * 60 * (GRACE_LEASES + 1))
            await alive._sweeper.sweep()  # it goes after the grace, and the other one is no longer one of most
            assert client.smembers(f"{TAG}:free") == {str(slots[0])}
            await alive._sweeper.sweep()
            assert client.smembers(f"{TAG}:free") == set(map(str, slots))
        assert alive._sweeper.num_swept_slots == 2
        assert alive.is_connected


async def test_a_gap_is_repaired_on_a_new_slot(url: str) -> None:
    blocks = chain(4)
    async with following(url) as index, publishing(url, "w") as worker:
        worker.offer(stored=blocks[:2])
        await until_found(index, blocks, {"w": 2})
        with redis.Redis.from_url(url) as client:
            client.set(f"{TAG}:q:{worker._index.slot}", 17)  # as a restored, older or newer Redis would have it
        worker.offer(stored=blocks[2:])
        await until_found(index, blocks, {"w": 4})
        assert worker.num_snapshots == 2


async def test_a_batch_whose_answer_was_lost_is_not_applied_twice(url: str) -> None:
    async with publishing(url, "w") as worker:
        worker.offer(stored=chain(1))
        await until(lambda: worker.num_waiting == 0)
        slot = worker._index.slot
        worker._index._sequence -= 1  # as if the answer had not come
        with redis.Redis.from_url(url) as client:
            client.client_kill_filter(_type="normal", skipme=True)
            worker.offer(stored=chain(2))
            await until(lambda: worker.is_connected and worker.num_waiting == 0)
        assert (worker._index.slot, worker.num_snapshots) == (slot, 1)


async def test_a_lost_connection_resumes_without_a_snapshot(url: str) -> None:
    blocks = chain(4)
    async with following(url) as index, publishing(url, "w") as worker:
        worker.offer(stored=blocks[:2])
        await until_found(index, blocks, {"w": 2})
        with redis.Redis.from_url(url) as client:
            client.client_kill_filter(_type="normal", skipme=True)
        worker.offer(stored=blocks[2:], removed=blocks[:0])
        await until_found(index, blocks, {"w": 4})
        assert worker.num_snapshots == 1


async def test_many_missed_changes_are_replaced_by_a_snapshot(mortal: EmbeddedRedis) -> None:
    async with publishing(mortal.url, "w") as worker:
        os.kill(mortal.pid, signal.SIGSTOP)
        try:
            for turn in range(40):
                blocks = chain(1000, f"turn{turn}")
                worker.offer(stored=blocks)
                worker.offer(removed=blocks)
            worker.offer(stored=chain(5))
            assert worker.num_waiting < 10_000
        finally:
            os.kill(mortal.pid, signal.SIGCONT)
        async with following(mortal.url) as index:
            await until_found(index, chain(5), {"w": 5})
        assert worker.num_snapshots == 2


async def test_a_redis_whose_name_moves_is_found_again(mortal: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a worker, the index and the registry."""
    hosts, resolve = ["127.0.0.1"], socket.getaddrinfo

    def resolved(host: Any, *args: Any, **kwargs: Any) -> Any:
        return resolve(hosts[0] if host == "redis.example" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    known, blocks = listen_on_tcp(mortal), chain(3)
    url = known.replace("127.0.0.1", "redis.example")
    registry = Registry(url, "test", poll_s=0.02)
    with EmbeddedRedis.start() as other:
        async with (
            forwarding("127.0.0.2", port_of(known), port_of(listen_on_tcp(other))),
            following(url) as index,
            publishing(url, "w", heartbeat_s=0.05) as worker,
        ):
            watching = asyncio.create_task(registry.watch(lambda workers: None))
            worker.offer(stored=blocks)
            await until_found(index, blocks, {"w": 3})
            hosts[0] = "127.0.0.2"
            mortal.stop()
            async with publishing(url, "late") as late:
                late.offer(stored=blocks[:1])
                await until_found(index, blocks, {"w": 3, "late": 1})
                await until(lambda: [one.worker_id for one in registry.workers] == ["late", "w"])
            watching.cancel()


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


@asynccontextmanager
async def forwarding(host: str, port: int, to: int) -> AsyncIterator[None]:
    """Another address of a server on loopback."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", to)
        await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))

    server = await asyncio.start_server(accept, host, port)
    try:
        yield
    finally:
        server.close()


async def test_an_empty_redis_is_refilled_after_a_restart(mortal: EmbeddedRedis) -> None:
    blocks = chain(100)
    async with following(mortal.url) as index, publishing(mortal.url, "w") as worker:
        worker.offer(stored=blocks)
        await until_found(index, blocks, {"w": 100})
        mortal.kill()
        assert await index.lookup(blocks) == {}  # the first one finds out
        await until(lambda: not index.is_available)
        async with asyncio.timeout(60):  # each lookup would wait for a Redis that is gone
            for _ in range(1000):
                assert await index.lookup(blocks) == {}
        worker.offer(removed=blocks[50:])
        with EmbeddedRedis.start(mortal.path):
            await until_found(index, blocks, {"w": 50})
            assert worker.num_snapshots == 2


async def test_a_redis_on_tcp_with_a_password(mortal: EmbeddedRedis) -> None:
    url = listen_on_tcp(mortal)
    async with following(url) as index, publishing(url, "w") as worker:
        worker.offer(stored=chain(4))
        await until_found(index, chain(4), {"w": 4})


async def test_a_hanging_redis_is_skipped_after_a_few_late_answers(mortal: EmbeddedRedis) -> None:
    blocks = chain(8)
    async with following(mortal.url, timeout_s=0.2, refresh_s=60.0) as index, publishing(mortal.url, "w") as worker:
        worker.offer(stored=blocks)
        await until(lambda: worker.num_waiting == 0)
        index.bind(bytes(32))
        index.bind(SEED)
        await until_found(index, blocks, {"w": 8})
        os.kill(mortal.pid, signal.SIGSTOP)
        try:
            for _ in range(3):
                assert await index.lookup(blocks) == {}
            assert not index.is_available
            late = set(index._in_flight)
            assert len(late) == 3
            for _ in range(20):
                assert await index.lookup(blocks) == {}
                assert index._in_flight == late  # it asks nothing
        finally:
            os.kill(mortal.pid, signal.SIGCONT)
        await until_found(index, blocks, {"w": 8})


async def test_an_inspection_changes_nothing_for_lookups(
    mortal: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(mortal.url, refresh_s=60.0) as index, publishing(mortal.url, "w") as worker:
        worker.offer(stored=chain(3))
        await until(lambda: worker.num_waiting == 0)
        index.bind(bytes(32))
        index.bind(SEED)
        await until_found(index, chain(3), {"w": 3})
        assert await index.inspect(chain(3)) == {"w": 3}
        monkeypatch.setattr(redis_index, "REDIS_TIMEOUT_S", 0.05)
        os.kill(mortal.pid, signal.SIGSTOP)
        try:
            for _ in range(5):
                assert await index.inspect(chain(3)) is None
        finally:
            os.kill(mortal.pid, signal.SIGCONT)
        assert (index.is_available, index._late, len(index._in_flight)) == (True, 0, 0)


async def test_exceeding_a_callers_budget_counts_as_late(mortal: EmbeddedRedis) -> None:
    async with following(mortal.url, timeout_s=0.2) as index, publishing(mortal.url, "w") as worker:
        worker.offer(stored=chain(4))
        await until_found(index, chain(4), {"w": 4})
        os.kill(mortal.pid, signal.SIGSTOP)
        try:
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.19):
                        await index.lookup(chain(4))
            assert not index.is_available
        finally:
            os.kill(mortal.pid, signal.SIGCONT)


async def test_binding_finds_workers_at_once(url: str) -> None:
    """Its own refresh would come after the test."""
    async with publishing(url, "w") as worker, following(url, seed=b"", refresh_s=60.0) as index:
        worker.offer(stored=chain(4))
        await until(lambda: worker.num_waiting == 0)
        assert await index.lookup(chain(4)) == {}
        index.bind(SEED)
        await until_found(index, chain(4), {"w": 4})


async def test_binding_during_a_read_of_the_slots_reads_them_again(
    mortal: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, has_begun = RedisIndex._read_slots, asyncio.Event()

    async def read_visibly(self: RedisIndex) -> Any:
        has_begun.set()
        return await read(self)

    monkeypatch.setattr(RedisIndex, "_read_slots", read_visibly)
    async with publishing(mortal.url, "w") as worker:
        worker.offer(stored=chain(4))
        await until(lambda: worker.num_waiting == 0)
        os.kill(mortal.pid, signal.SIGSTOP)
        try:
            async with following(mortal.url, seed=bytes(32), refresh_s=60.0) as index:
                await has_begun.wait()  # and the read cannot end
                index.bind(SEED)
                os.kill(mortal.pid, signal.SIGCONT)
                await until_found(index, chain(4), {"w": 4})
        finally:
            os.kill(mortal.pid, signal.SIGCONT)


async def test_late_lookups_during_a_read_do_not_make_reads_follow_each_other_at_once(url: str) -> None:
    async with following(url) as index:
        await until(lambda: index.is_available)
        read, num_reads = index._read_slots, 0

        async def read_while_lookups_are_late() -> object:
            nonlocal num_reads
            num_reads += 1
            index._trip("answers are late")
            return await read()

        index._read_slots = read_while_lookups_are_late  # type: ignore[method-assign, assignment]
        index._late = 1
        began_s = time.monotonic()
        await until(lambda: num_reads >= 9)
        assert time.monotonic() - began_s > 8 * 0.025  # the shortest pause between two reads


async def test_without_a_server_everything_starts_and_nothing_is_found() -> None:
    with EmbeddedRedis.start() as gone:
        pass
    worker = publisher(gone.url, "w")
    await worker.start()
    async with following(gone.url) as index:
        worker.offer(stored=chain(2))
        assert await index.lookup(chain(2)) == {}
        await until(lambda: worker.num_failures > 1)
        assert not index.is_available
    await worker.stop()


async def test_tenants_clusters_and_models_do_not_see_each_other(url: str) -> None:
    tokens = list(range(64))
    mine, theirs = (block_hashes(tokens, 16, chain_key(salt, SEED)) for salt in (b"mine", b"theirs"))
    async with publishing(url, "w") as worker, following(url) as index:
        worker.offer(stored=mine)
        await until_found(index, mine, {"w": 4})
        assert await index.lookup(theirs) == {}
        async with following(url, cluster="other") as other, following(url, seed=bytes(32)) as model:
            await until(lambda: other.is_available and model.is_available)
            assert await other.lookup(mine) == {}
            assert await model.lookup(mine) == {}


async def test_blocks_expire_unless_republished(url: str) -> None:
    worker = publisher(url, "w", heartbeat_s=0.05, block_ttl_s=60.0)
    worker._repeat_s = 0.05
    worker.offer(stored=chain(2))
    await worker.start()
    async with following(url) as index:
        await until_found(index, chain(2), {"w": 2})
        sent = worker.num_sent_batches
        with redis.Redis.from_url(url) as client:
            assert client.pexpire(f"{TAG}:r:0", 20_000)  # as if it had been idle
            await until(lambda: worker.num_sent_batches >= sent + 2 and client.pttl(f"{TAG}:r:0") > 40_000)
            await crash(worker)
            assert 0 < client.pttl(f"{TAG}:r:0") <= 60_000
        assert worker.num_snapshots == 1


async def test_a_worker_without_cached_blocks_keeps_its_slot(url: str) -> None:
    """It sends nothing, so only its heartbeats keep the set in Redis."""
    async with publishing(url, "w", block_ttl_s=60.0, heartbeat_s=0.05) as worker:
        worker.offer(stored=chain(2))
        await until(lambda: worker.num_waiting == 0)
        worker.offer(removed=chain(2))
        await until(lambda: worker.num_waiting == 0)
        with redis.Redis.from_url(url) as client:
            assert client.pexpire(f"{TAG}:r:0", 20_000)  # as if it had been idle
            await until(lambda: client.pttl(f"{TAG}:r:0") > 40_000)


async def test_a_slot_whose_number_comes_again_is_empty(url: str) -> None:
    """As after Redis has evicted the number of slots."""
    blocks = chain(50)
    async with following(url) as index, publishing(url, "old") as old:
        old.offer(stored=blocks)
        await until(lambda: old.num_waiting == 0)
        with redis.Redis.from_url(url) as client:
            client.delete(f"{TAG}:next")
            async with publishing(url, "new") as new:
                assert new._index.slot == old._index.slot == 0
                assert not client.exists(f"{TAG}:r:0")
                client.sadd(f"{TAG}:r:0", *blocks)  # as the old owner of a slot, a moment before
                new.offer(stored=chain(1))
                await until(lambda: new.num_waiting == 0)
                assert client.smembers(f"{TAG}:r:0") == {b"", *chain(1)}
                await until_found(index, blocks, {"new": 1})


async def test_the_slots_of_builds_with_bitmaps_are_not_swept(url: str) -> None:
    """They had bits to clear, under the tag {kv:...}; a slot freed without that gives them to its next owner."""
    old = TAG.replace("{kv2:", "{kv:")
    with redis.Redis.from_url(url) as client:
        client.hset(f"{old}:slots", "0", "w\n1")
        client.hset(f"{old}:dead", "0", 0)
        client.sadd(f"{old}:r:0", *chain(2))
        async with publishing(url, "sweeper") as worker:
            await worker._sweeper.sweep()
        assert client.hlen(f"{old}:slots") == 1
        assert client.scard(f"{old}:r:0") == 2


async def test_offers_may_come_from_another_thread(url: str) -> None:
    blocks = chain(2000)
    async with publishing(url, "w") as worker, following(url) as index:
        await asyncio.to_thread(lambda: [worker.offer(stored=[one]) for one in blocks])
        await until_found(index, blocks, {"w": 2000})
        assert worker.num_sent_batches < 1000


async def test_stopping_works_at_any_moment(url: str) -> None:
    # Python 3.11 loses a cancellation that comes together with the end of a send; that must not keep us.
    for turn in range(60):
        worker, index = publisher(url, f"w{turn % 3}"), RedisIndex(url, "test", hash_seed=SEED, refresh_s=0.0)
        worker.offer(stored=chain(300))
        await worker.start()
        await index.start()
        for _ in range(turn * 7 % 41):
            await asyncio.sleep(0)
        async with asyncio.timeout(60.0):
            await asyncio.gather(worker.stop(), index.close())


async def test_answers_that_are_in_flight_are_bounded(url: str) -> None:
    blocks = chain(64)
    async with publishing(url, "w") as worker, following(url) as index:
        worker.offer(stored=blocks)
        await until_found(index, blocks, {"w": 64})
        answers = await asyncio.gather(*(index.lookup(blocks) for _ in range(200)))
        assert {tuple(answer.items()) for answer in answers} == {(("w", 64),), ()}
        assert index.is_available
        assert await index.lookup(blocks) == {"w": 64}


@pytest.mark.parametrize("bad", ["localhost:6379", "http://localhost", ""])
def test_an_invalid_url_is_a_config_error(bad: str) -> None:
    with pytest.raises(ConfigError, match="redis"):
        RedisIndex(bad, "test")


def test_a_name_cannot_escape_its_hash_tag() -> None:
    with pytest.raises(ConfigError, match="cluster"):
        RedisIndex("redis://localhost", "a}:b:", hash_seed=SEED)


def test_a_password_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        RedisIndex("rediss!//:secret@localhost", "test")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("length", [63, 64, 65, 300])
async def test_a_missing_block_ends_the_prefix_where_probes_can_tell(url: str, length: int) -> None:
    """A block in the middle may be gone after its KV was found damaged. All of a short chain are examined."""
    blocks = chain(length)
    async with following(url) as index, publishing(url, "w") as worker:
        worker.offer(stored=blocks)
        await until_found(index, blocks, {"w": length})
        missing = length // 2 if length <= MAX_PROBES else -(-length // MAX_PROBES) - 1
        worker.offer(removed=[blocks[missing]])
        await until_found(index, blocks, {"w": missing})
        worker.offer(removed=blocks[:1])
        await until_found(index, blocks, {})


async def test_a_set_that_redis_has_evicted_is_sent_again(url: str) -> None:
    blocks = chain(40)
    async with following(url) as index, publishing(url, "w") as worker:
        worker.offer(stored=blocks[:39])
        await until_found(index, blocks, {"w": 39})
        with redis.Redis.from_url(url) as client:
            assert client.delete(f"{TAG}:r:{worker._index.slot}") == 1
        worker.offer(stored=blocks[39:])
        await until_found(index, blocks, {"w": 40})
        worker.offer(removed=blocks)  # a set without blocks is not a missing one
        await until_found(index, blocks, {})
        worker.offer(stored=blocks[:1])
        await until_found(index, blocks, {"w": 1})
        assert worker.num_snapshots == 2


async def test_a_worker_of_an_earlier_build_is_found(url: str) -> None:
    """It also sets a bit for each block, in a key of its own, and its set has no empty text."""
    blocks = chain(100)
    async with following(url) as index, publishing(url, "w") as worker:
        await until(lambda: worker._index.slot == 0)
        with redis.Redis.from_url(url) as client:
            client.sadd(f"{TAG}:r:0", *blocks)
            client.setbit(TAG.encode() + b":b:" + blocks[0], 7, 1)
        await until_found(index, blocks, {"w": 100})


async def test_long_chains_cost_few_scripts(url: str) -> None:
    """Of a prompt of 30,000 tokens: two for a publication, and one for a lookup."""
    blocks = chain(1875)
    async with following(url) as index, publishing(url, "w") as worker:
        await until(lambda: index.is_available)
        worker.offer(stored=blocks)
        await until_found(index, blocks, {"w": 1875})
        assert worker.num_sent_batches == 2
        index._refreshing.cancel()  # type: ignore[union-attr]
        with redis.Redis.from_url(url) as client:
            before = client.info("commandstats")["cmdstat_evalsha"]["calls"]
            assert await index.lookup([*blocks[:1000], *chain(875, "other")]) == {"w": 1000}
            assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == before + 1


# --- tiers --------------------------------------------------------------------------------------------------------


async def until_split(index: Any, hashes: list[bytes], depths: dict[str, int], tiers: dict[str, TierDepths]) -> None:
    await until_found(index, hashes, depths)
    end_s = time.monotonic() + 60.0
    while (found := await index.lookup(hashes)).tiers != tiers or found != depths:
        assert time.monotonic() < end_s, f"found {found} {found.tiers}, expected {tiers}"
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 130])
async def test_a_lookup_says_how_the_blocks_are_split_over_tiers(url: str, length: int) -> None:
    """The first worker's split is tried first for the next one, whose is smaller, larger or equal."""
    blocks = chain(length)
    splits = [TierDepths(a, b) for a in range(0, length + 1, max(1, length // 3)) for b in range(a, length + 1, 2)]
    random.Random(length).shuffle(splits)
    async with following(url) as index:
        workers = [publisher(url, f"w{number}") for number in range(len(splits))]
        for worker, (pool, memory) in zip(workers, splits, strict=True):
            tiers = bytes(pool) + bytes([Tier.HOST]) * (memory - pool) + bytes([Tier.DISK]) * (length - memory)
            worker.offer(stored=blocks, tiers=tiers)
            await worker.start()
        expected = {f"w{number}": split for number, split in enumerate(splits) if split.pool < length}
        await until_split(index, blocks, {f"w{number}": length for number in range(len(splits))}, expected)
        await asyncio.gather(*(worker.stop() for worker in workers))


async def test_blocks_move_between_tiers(url: str) -> None:
    blocks = chain(6)
    async with following(url) as index, publishing(url, "w") as worker, publishing(url, "old") as old:
        old.offer(stored=blocks)  # says nothing of tiers, as an older worker
        worker.offer(stored=blocks, tiers=bytes((0, 0, 1, 1, 2, 2)))
        depths = {"w": 6, "old": 6}
        await until_split(index, blocks, depths, {"w": TierDepths(2, 4)})
        worker.offer(stored=blocks[3:], tiers=bytes((2, 1, 1)))  # to another lower tier
        await until(lambda: not worker.num_waiting)
        worker.offer(stored=blocks[3:4], tiers=bytes((1,)))
        await until_split(index, blocks, depths, {"w": TierDepths(2, 6)})
        worker.offer(stored=blocks)  # all into the pool
        await until_split(index, blocks, depths, {})
        worker.offer(stored=blocks[4:], tiers=bytes((2, 2)))
        worker.offer(removed=blocks[5:])
        await until_split(index, blocks, {"w": 5, "old": 6}, {"w": TierDepths(4, 4)})
        worker.offer(removed=blocks[4:5])
        await until_split(index, blocks, {"w": 4, "old": 6}, {})
        worker.offer(stored=blocks[4:])
        await until_split(index, blocks, depths, {})
    with redis.Redis.from_url(url) as client:
        marks = [one for key in client.scan_iter(f"{TAG}:r:*") for one in client.smembers(key) if len(one) == 17]
    assert marks == []


async def test_an_older_router_finds_the_blocks_of_all_tiers(url: str) -> None:
    """Whose script asks for hashes only."""
    blocks = chain(4)
    async with publishing(url, "w") as worker:
        worker.offer(stored=blocks, tiers=bytes((0, 1, 2, 2)))
        await until(lambda: not worker.num_waiting)
        with redis.Redis.from_url(url) as client:
            (slot,) = client.hkeys(f"{TAG}:slots")
            assert client.smismember(f"{TAG}:r:{slot.decode()}", blocks) == [1, 1, 1, 1]


async def test_marks_are_sent_again_with_their_blocks(url: str) -> None:
    """A server that has lost everything gets a snapshot."""
    blocks = chain(4)
    async with following(url) as index, publishing(url, "w") as worker:
        worker.offer(stored=blocks, tiers=bytes((0, 1, 2, 2)))
        await until_split(index, blocks, {"w": 4}, {"w": TierDepths(1, 2)})
        with redis.Redis.from_url(url) as client:
            client.flushall()
        worker.offer(stored=blocks[1:2])
        await until_split(index, blocks, {"w": 4}, {"w": TierDepths(2, 2)})
