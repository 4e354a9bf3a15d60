"""Conversations in Redis, and their turns beside stored responses."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from typing import Any

import pytest
from redis import Redis

from pdserve.config import GatewayConfig
from pdserve.core.errors import InvalidRequest, NotFound, Overloaded, Unavailable
from pdserve.gateway import conversations
from pdserve.gateway.api.conversations import ConversationRequest, kept_item, stored_item
from pdserve.gateway.conversations import ConversationStore, Stores
from pdserve.gateway.stored import Turn
from pdserve.prefix.embedded import EmbeddedRedis
from tests.unit.gateway.conftest import PATIENT_S, record_calls

TENANT = "tenant a"
SIZES, ENDS = (f"pdserve:talks:stored-{name}:{TENANT}" for name in ("sizes", "ends"))


@pytest.fixture
async def stores(redis: EmbeddedRedis) -> Any:
    config = GatewayConfig(
        router="h:1", redis=redis.url, cluster="talks", store_bytes=10_000, store_count=3, max_body_bytes=4000
    )
    with Redis.from_url(redis.url) as client:
        for key in client.scan_iter("pdserve:talks:*"):
            client.delete(key)
    found = Stores(config, PATIENT_S)
    yield found
    await found.close()


@pytest.fixture
def store(stores: Stores) -> ConversationStore:
    return stores.conversations


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def hold(num_bytes: int) -> None:
    assert num_bytes > 0


async def create(store: ConversationStore, *given: str) -> str:
    found = await store.create(TENANT, ConversationRequest(items=[said(one) for one in given]))
    return str(found["id"])


def turn(conversation: str, *given: str) -> Turn:
    return Turn(
        tenant=TENANT,
        is_stored=False,
        is_required=False,
        previous="",
        conversation=conversation,
        items=[said(one) for one in given],
    )


async def keep(stores: Stores, one: Turn, name: str, **fields: Any) -> bool:
    part = {"type": "output_text", "text": "ok"}
    item = {"type": "message", "id": f"msg_{name}", "role": "assistant", "content": [part]}
    response = {"id": name, "output": [item], **fields}
    kept = stores.keep(one)
    assert kept is not None
    return await kept(response, json.dumps(response).encode())


async def contents(store: ConversationStore, conversation: str) -> list[str]:
    return [one["content"][0]["text"] for one in await store.history(turn(conversation), hold)]


def is_exact(client: Any) -> bool:
    """Whether the sums are those of the records."""
    sizes = {name.decode(): int(size) for name, size in client.hgetall(SIZES).items()}
    total = sizes.pop("sum", 0)
    for name, size in sizes.items():
        record = client.hgetall(f"pdserve:talks:stored:{TENANT}:{name}")
        items = [(at.split(b" ", 1)[1], text) for at, text in record.items() if b" " in at]
        held = sum(len(at) + len(text) for at, text in items) + len(record[b"metadata"])
        assert int(record[b"bytes"]) == size == held + conversations._BESIDE_BYTES
    assert {one.decode() for one in client.zrange(ENDS, 0, -1)} == sizes.keys()
    return total == sum(sizes.values())


def next_millisecond(redis: EmbeddedRedis) -> None:
    """The order of what was used in the same one is not known."""
    with Redis.from_url(redis.url) as client:
        before = client.time()
        while client.time()[1] // 1000 == before[1] // 1000:
            pass


async def test_other_tenants_find_nothing(store: ConversationStore) -> None:
    known = await create(store, "a")
    [item] = (await store.page(TENANT, known, hold, 9, "", is_ascending=True))["data"]
    other = "tenant b"
    for call in (
        store.describe(other, known),
        store.update(other, known, {}),
        store.delete(other, known),
        store.add(other, known, [said("x")]),
        store.page(other, known, hold, 9, "", is_ascending=True),
        store.item(other, known, item["id"], hold),
        store.delete_item(other, known, item["id"]),
        store.history(replace(turn(known), tenant=other), hold),
        store.append(replace(turn(known, "x"), tenant=other), []),
    ):
        with pytest.raises(NotFound) as caught:
            await call
        assert str(caught.value) == str(NotFound("conversation", known))
    assert await contents(store, known) == ["a"]


async def test_the_least_lately_used_conversation_leaves_first(store: ConversationStore, redis: EmbeddedRedis) -> None:
    known = []
    for text in "abc":
        known.append(await create(store, text))
        next_millisecond(redis)
    first, second, third = known
    await store.append(turn(first, "d"), [{"type": "message", "role": "assistant", "content": "e"}])
    fourth = await create(store)
    with pytest.raises(NotFound):
        await store.describe(TENANT, second)
    assert await contents(store, first) == ["a", "d", "e"]
    for text in ("x" * 1400, "y" * 1400):
        for one in (first, third, fourth):
            await store.add(TENANT, one, [said(text)])
            next_millisecond(redis)
    with pytest.raises(NotFound):
        await store.describe(TENANT, first)
    with Redis.from_url(redis.url) as client:
        assert is_exact(client)
        assert int(client.hget(SIZES, "sum")) <= 10_000
        for key in (SIZES, ENDS):
            assert client.pttl(key) > 0


async def test_a_conversation_does_not_leave_for_its_own_turns(stores: Stores, redis: EmbeddedRedis) -> None:
    store = stores.conversations
    known = await create(store, "x" * 700)
    for name in ("resp_1", "resp_2"):
        next_millisecond(redis)
        assert await keep(stores, replace(turn("", "o"), is_stored=True), name)
    one = replace(turn(known, "y" * 300), is_stored=True)
    assert await keep(stores, one, "resp_3")
    assert not await keep(stores, one, "resp_4", instructions="z" * 8500)  # too large beside its conversation
    with pytest.raises(InvalidRequest, match="beside its conversation"):
        await keep(stores, replace(one, is_required=True), "resp_5", instructions="z" * 8500)
    assert len(await contents(store, known)) == 7


async def test_a_turn_that_cannot_be_added_leaves_no_response(stores: Stores) -> None:
    """Otherwise a second attempt would find its id in use."""
    store = stores.conversations
    one = replace(turn(await create(store, "x" * 3000), "y" * 900), is_stored=True)
    with pytest.raises(InvalidRequest, match="at most 4000 bytes"):
        await keep(stores, one, "resp_1")
    await store.delete(TENANT, one.conversation)
    with pytest.raises(NotFound):
        await keep(stores, one, "resp_1")
    await stores.responses.check_unused(replace(one, is_required=True), "resp_1")


async def test_a_conversation_stays_while_many_records_leave(store: ConversationStore, redis: EmbeddedRedis) -> None:
    known = await create(store, "a")
    with Redis.from_url(redis.url) as client:
        names = [f"resp_{number}" for number in range(600)]
        client.zadd(ENDS, dict.fromkeys(names, client.zscore(ENDS, known) + 1))
        client.hset(SIZES, mapping=dict.fromkeys(names, 1))
        client.hincrby(SIZES, "sum", 600)
        told = record_calls(store, "_write")
        await store.add(TENANT, known, [said("b")])
        assert told == [b"full", b"written"]
        assert await contents(store, known) == ["a", "b"]
        sizes = client.hgetall(SIZES)
        assert int(sizes.pop(b"sum")) == sum(map(int, sizes.values()))
        assert client.zcard(ENDS) == len(sizes) == 3


async def test_a_turn_that_is_written_late_is_added_once(
    store: ConversationStore, redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = await create(store, "a")
    write, calls = store._storage.write, 0

    async def late(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        told = await write(*arguments)
        if calls == 1:
            raise Unavailable("Redis did not answer in time", 1.0)
        return told

    monkeypatch.setattr(store._storage, "write", late)
    await store.append(turn(known, "b"), [{"type": "message", "role": "assistant", "content": "c"}])
    assert calls == 2
    assert await contents(store, known) == ["a", "b", "c"]
    with Redis.from_url(redis.url) as client:
        assert is_exact(client)


async def test_a_lifetime_begins_again(store: ConversationStore, redis: EmbeddedRedis) -> None:
    """Before a turn, so that it does not end during the turn, and when an item is deleted."""
    known = await create(store, "a")
    [item] = await store.history(turn(known), hold)
    with Redis.from_url(redis.url) as client:
        key, least_ms = f"pdserve:talks:stored:{TENANT}:{known}", 3600 * 1000
        for call in (
            lambda: store.history(turn(known), hold),
            lambda: store.delete_item(TENANT, known, item["id"]),
        ):
            client.pexpire(key, least_ms)
            client.zadd(ENDS, {known: 1})
            await call()
            assert client.pttl(key) > least_ms
            assert client.zscore(ENDS, known) > client.time()[0] * 1000 + least_ms
            assert is_exact(client)


async def test_items_are_made_in_a_thread(store: ConversationStore, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def spy(*arguments: Any, **fields: Any) -> dict[str, Any]:
        threads.append(threading.get_ident())
        return stored_item(*arguments, **fields)

    monkeypatch.setattr(conversations, "stored_item", spy)
    known = await create(store, "a")
    await store.add(TENANT, known, [said("b")])
    await store.append(turn(known, "c"), [])
    assert len(threads) == 3
    assert threading.get_ident() not in threads


async def test_a_conversation_is_limited(store: ConversationStore, monkeypatch: pytest.MonkeyPatch) -> None:
    known = await create(store, "a")
    with pytest.raises(InvalidRequest, match="at most 4000 bytes"):
        await store.add(TENANT, known, [said("x" * 4000)])
    await store.add(TENANT, known, [said("x" * 3000)])
    with pytest.raises(InvalidRequest, match="at most 4000 bytes"):
        await store.append(turn(known, "y" * 700), [])
    monkeypatch.setattr(conversations, "MAX_ITEMS", 4)
    await store.add(TENANT, known, [said("z")])
    with pytest.raises(InvalidRequest, match="over 4 items with the answer"):
        await store.history(turn(known, "x"), hold)
    with pytest.raises(InvalidRequest, match="at most 4 items"):
        await store.append(turn(known, "x"), [{"type": "message", "role": "assistant", "content": "e"}])
    monkeypatch.undo()
    assert await contents(store, known) == ["a", "x" * 3000, "z"]
    with pytest.raises(InvalidRequest, match="with the body of this call"):
        await store.history(replace(turn(known), num_bytes=800), hold)


async def test_deleted_items_make_room(store: ConversationStore, redis: EmbeddedRedis) -> None:
    known = await create(store, "a")
    for _ in range(5):
        added = await store.add(TENANT, known, [said("x" * 3000)])
        await store.delete_item(TENANT, known, added["first_id"])
    with Redis.from_url(redis.url) as client:
        assert is_exact(client)
    await store.update(TENANT, known, {"a": "b" * 100})
    await store.update(TENANT, known, {})
    with Redis.from_url(redis.url) as client:
        assert is_exact(client)
    with Redis.from_url(redis.url) as client:
        client.config_resetstat()
        await store.delete(TENANT, known)
        assert int(client.hget(SIZES, "sum")) == 0
        commands = client.info("commandstats")
        assert "cmdstat_unlink" in commands
        assert "cmdstat_del" not in commands  # it would free a large record while Redis serves nobody


async def test_bytes_are_counted_before_they_are_read(store: ConversationStore) -> None:
    known = await create(store, "x" * 2000)

    def refuse(num_bytes: int) -> None:
        asked.append(num_bytes)
        raise Overloaded("full", 1.0)

    asked: list[int] = []
    with pytest.raises(Overloaded):
        await store.history(turn(known), refuse)
    assert asked[0] > 2000


@pytest.mark.parametrize("lost", [[SIZES], [ENDS], [SIZES, ENDS]], ids=["sizes", "ends", "both"])
async def test_a_table_that_redis_has_evicted_is_rebuilt(
    store: ConversationStore, redis: EmbeddedRedis, lost: list[str]
) -> None:
    known = [await create(store, text * 9) for text in "ab"]
    [item] = await store.history(turn(known[0]), hold)
    with Redis.from_url(redis.url) as client:
        client.delete(*lost)
        await store.append(turn(known[0], "c" * 3000), [])
        assert is_exact(client)
        client.delete(*lost)
        await store.delete_item(TENANT, known[0], item["id"])
        await create(store)
        assert is_exact(client)
        # Nothing is left that names the other one.
        assert client.zcard(ENDS) == (2 if len(lost) == 2 else 3)
    assert await contents(store, known[0]) == ["c" * 3000]


async def test_many_turns_at_the_same_time_are_kept(store: ConversationStore, redis: EmbeddedRedis) -> None:
    known = await create(store)
    said_by = [turn(known, f"{number}a", f"{number}b") for number in range(8)]
    await asyncio.gather(*(store.append(one, []) for one in said_by))
    found = await contents(store, known)
    assert sorted(found) == sorted(text["content"] for one in said_by for text in one.items)
    assert all(a[:-1] == b[:-1] for a, b in zip(found[::2], found[1::2], strict=True))


async def test_a_turn_after_a_deletion_is_not_found(store: ConversationStore, redis: EmbeddedRedis) -> None:
    known = await create(store, "a")
    await store.delete(TENANT, known)
    with pytest.raises(NotFound):
        await store.append(turn(known, "x"), [])
    with Redis.from_url(redis.url) as client:
        assert not client.exists(f"pdserve:talks:stored:{TENANT}:{known}")


async def test_a_redis_that_is_gone_is_unavailable() -> None:
    stores = Stores(GatewayConfig(router="h:1", redis="redis://127.0.0.1:1/0", store_bytes=1000), 0.5)
    known = "conv_" + "0" * 32
    for call in (
        stores.history(turn(known), hold),
        stores.conversations.create(TENANT, ConversationRequest()),
        stores.conversations.describe(TENANT, known),
    ):
        with pytest.raises(Unavailable):
            await call
    keep = stores.keep(turn(known))
    assert keep is not None
    with pytest.raises(Unavailable):
        await keep({"id": "resp_1", "output": []}, b"{}")
    await stores.close()


def test_an_item_is_stored_with_an_id_and_what_later_turns_need() -> None:
    junk: Any = [{}] * 9
    part = {"type": "output_text", "text": "a", "logprobs": junk, "annotations": junk, "junk": junk}
    given = {"id": "msg 1", "type": "message", "role": "assistant", "content": [part], "status": junk, "junk": junk}
    found = stored_item(given, "new", keeps_id=True)
    assert found == {
        "id": "msg_new",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "a", "annotations": []}],
        "status": "completed",
    }
    assert stored_item({**given, "id": "msg_1"}, "new", keeps_id=True)["id"] == "msg_1"
    assert stored_item({**given, "id": "msg_1"}, "new", keeps_id=False)["id"] == "msg_new"
    text = {"type": "reasoning_text", "text": "b"}
    assert stored_item({"type": "reasoning", "content": [{**text, "junk": junk}, junk, 1]}, "new", keeps_id=False) == {
        "id": "rs_new",
        "type": "reasoning",
        "content": [text],
        "summary": [],
        "status": "completed",
    }
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    assert stored_item({**call, "junk": junk}, "new", keeps_id=False) == {**call, "id": "fc_new", "status": "completed"}
    result = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "5"}]}
    assert kept_item({**result, "junk": junk, "status": None}) == result
