"""Conversations, by OpenAI's client against a gateway, a router and a Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import openai
import pytest
from redis import Redis

from pdserve.config import GatewayConfig
from pdserve.core.errors import InvalidRequest, NotFound, Overloaded, Unavailable
from pdserve.gateway import conversations, storage
from pdserve.gateway.api.conversations import ConversationRequest, kept_item, stored_item
from pdserve.gateway.conversations import ConversationStore, Stores
from pdserve.gateway.storage import Storage
from pdserve.gateway.stored import Turn
from pdserve.prefix.embedded import EmbeddedRedis
from tests.support.tooled_model import BUNDLED
from tests.unit.gateway.conftest import Served, serve

PATIENT_S = 120.0  # a busy machine is no failure


@pytest.fixture(scope="module")
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start() as server:
        yield server


@pytest.fixture(scope="module")
def served(redis: EmbeddedRedis) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "TIMEOUT_S", PATIENT_S)
        with serve(model=str(BUNDLED), worker={"deterministic": "on"}, redis=redis.url, store_bytes=2_000_000) as found:
            yield found


def answer(served: Served, given: Any, **fields: Any) -> Any:
    return served.openai.responses.create(model=served.model, input=given, max_output_tokens=4, temperature=0, **fields)


def texts(items: Any) -> list[str]:
    return [one.content[0].text for one in items]


# --- end to end ---------------------------------------------------------------------------------------------------


def test_turns_extend_a_conversation(served: Served) -> None:
    api = served.openai.conversations
    conversation = api.create(metadata={"topic": "a"}, items=[{"role": "user", "content": "def fib(n):"}])
    assert (conversation.object, conversation.metadata) == ("conversation", {"topic": "a"})
    first = answer(served, "begin", conversation=conversation.id)
    assert first.conversation.id == conversation.id
    second = answer(served, "and now?", conversation={"id": conversation.id}, store=False, stream=True)
    last = list(second)[-1].response
    assert (last.conversation.id, last.store) == (conversation.id, False)
    whole = [
        {"role": "user", "content": "def fib(n):"},
        {"role": "user", "content": "begin"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and now?"},
    ]
    alone = answer(served, whole, store=False)
    assert alone.conversation is None
    assert (alone.usage.input_tokens, alone.output_text) == (last.usage.input_tokens, last.output_text)
    items = list(api.items.list(conversation.id, order="asc", limit=2))
    assert texts(items) == ["def fib(n):", "begin", first.output_text, "and now?", last.output_text]
    assert items[2].id == first.output[0].id
    assert api.items.retrieve(items[1].id, conversation_id=conversation.id) == items[1]
    sessions = {one.session_id: one for one in served.sdk.sessions().sessions}
    assert sessions[conversation.id].turns == 2
    # The response alone does not continue the conversation.
    with pytest.raises(openai.BadRequestError, match=conversation.id):
        answer(served, "x", previous_response_id=first.id)
    assert served.openai.responses.retrieve(first.id).conversation == first.conversation
    with pytest.raises(openai.BadRequestError, match="background"):
        served.openai.responses.cancel(first.id)


def test_a_conversation_is_changed_and_deleted(served: Served) -> None:
    api = served.openai.conversations
    conversation = api.create()
    assert api.items.list(conversation.id).data == []
    added = api.items.create(
        conversation.id,
        items=[
            {"role": "user", "content": "add"},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "5"},
            {"role": "assistant", "content": "five"},
        ],
        include=["message.output_text.logprobs"],
    )
    assert [one.type for one in added.data] == ["message", "function_call", "function_call_output", "message"]
    page = api.items.list(conversation.id, limit=3, include=["reasoning.encrypted_content"])
    assert [one.id for one in page.data] == [one.id for one in reversed(added.data[1:])]
    assert [one.id for one in api.items.list(conversation.id, after=added.data[1].id)] == [added.data[0].id]
    assert api.items.delete(added.data[3].id, conversation_id=conversation.id).id == conversation.id
    assert len(api.items.list(conversation.id).data) == 3
    assert api.update(conversation.id, metadata={"a": "b"}).metadata == {"a": "b"}
    assert api.retrieve(conversation.id).created_at == conversation.created_at
    assert api.retrieve(conversation.id).metadata == {"a": "b"}
    assert api.update(conversation.id, metadata=None).metadata == {}
    deleted = api.delete(conversation.id)
    assert (deleted.object, deleted.deleted) == ("conversation.deleted", True)
    for call in (
        lambda: api.retrieve(conversation.id),
        lambda: api.update(conversation.id, metadata={}),
        lambda: api.delete(conversation.id),
        lambda: api.items.list(conversation.id),
        lambda: api.items.create(conversation.id, items=[{"role": "user", "content": "x"}]),
        lambda: api.items.retrieve("msg_1", conversation_id=conversation.id),
        lambda: api.items.delete("msg_1", conversation_id=conversation.id),
        lambda: answer(served, "x", conversation=conversation.id),
    ):
        with pytest.raises(openai.NotFoundError, match=conversation.id):
            call()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("", {"items": [{"role": "user", "content": "x"}] * 21}, 400),
        ("", {"items": [{"type": "computer_call"}]}, 400),
        ("", {"items": [{"role": "user", "content": 7}]}, 400),
        ("", {"items": ["x"]}, 400),
        ("", {"items": [{"type": ["message"]}]}, 400),
        ("", {"metadata": {"a": 1}}, 400),
        ("", {"metadata": {"a" * 65: ""}}, 400),
        ("", {"metadata": {"a": "b" * 513}}, 400),
        ("", {"metadata": {str(number): "" for number in range(17)}}, 400),
        ("", {"name": "x"}, 400),
        ("/{id}/items", {"items": []}, 400),
        ("/{id}/items", {}, 400),
        ("/{id}/items?include=x", {"items": [{"role": "user", "content": "x"}]}, 400),
        ("/conv_x", {"metadata": {}}, 404),
        ("/" + "x" * 3000, {"metadata": {}}, 404),
        ("/resp_x/items", {"items": [{"role": "user", "content": "x"}]}, 404),
    ],
    ids=lambda one: str(one)[:40],
)
def test_a_wrong_call_is_rejected(served: Served, path: str, body: Any, status: int) -> None:
    known = served.openai.conversations.create().id
    found, text = served.post("/v1/conversations" + path.format(id=known), body)
    assert found == status, text
    assert len(text) < 2000


@pytest.mark.parametrize(
    ("query", "field"),
    [("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("x=1", "query")],
)
def test_a_page_is_limited(served: Served, query: str, field: str) -> None:
    known = served.openai.conversations.create().id
    with pytest.raises(openai.BadRequestError) as caught:
        served.openai.get(f"/conversations/{known}/items?{query}", cast_to=object)
    assert caught.value.param == field


def test_a_conversation_excludes_a_previous_response(served: Served) -> None:
    known = served.openai.conversations.create().id
    with pytest.raises(openai.BadRequestError) as caught:
        answer(served, "x", conversation=known, previous_response_id="resp_x")
    assert caught.value.param == "conversation"
    given: Any
    for given in ("conv_x", "../x", "conv_" + "0" * 32, "", {"id": ""}):
        with pytest.raises(openai.NotFoundError):
            answer(served, "x", conversation=given)


def test_turns_at_the_same_time_do_not_mix(served: Served) -> None:
    known = served.openai.conversations.create().id
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda number: answer(served, f"turn {number}", conversation=known), range(6)))
    items = list(served.openai.conversations.items.list(known, order="asc", limit=100))
    said = texts(items)
    assert sorted(said[::2]) == [f"turn {number}" for number in range(6)]
    assert [items[said.index(f"turn {at}") + 1].id for at in range(6)] == [one.output[0].id for one in answers]


def test_a_request_id_that_was_used_before_gets_items_of_new_ids(served: Served) -> None:
    known = served.openai.conversations.create().id
    for _ in range(2):
        answer(served, "x", conversation=known, store=False, extra_headers={"x-request-id": "again"})
    ids = [one.id for one in served.openai.conversations.items.list(known)]
    assert len(ids) == len(set(ids)) == 4
    assert "msg_again_0" in ids


def test_without_a_store_there_are_no_conversations(bundled: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="store_bytes"):
        bundled.openai.conversations.create()
    with pytest.raises(openai.NotFoundError):
        bundled.openai.conversations.retrieve("conv_" + "0" * 32)
    with pytest.raises(openai.BadRequestError, match="store_bytes"):
        answer(bundled, "x", conversation="conv_x")


@pytest.mark.slow
def test_only_calls_that_need_redis_fail_without_it() -> None:
    with EmbeddedRedis.start() as server, serve(model=str(BUNDLED), redis=server.url, store_bytes=200_000) as served:
        known = served.openai.conversations.create().id
        server.kill()
        for call in (
            lambda: served.openai.conversations.create(),
            lambda: served.openai.conversations.retrieve(known),
            lambda: served.openai.conversations.items.list(known),
            lambda: answer(served, "x", conversation=known),
            lambda: answer(served, "x", conversation=known, store=False),
        ):
            with pytest.raises(openai.InternalServerError) as caught:
                call()
            assert (caught.value.status_code, caught.value.code) == (503, "unavailable")
        assert not answer(served, "x", store=False).store


# --- the store ----------------------------------------------------------------------------------------------------

TENANT = "tenant a"
SIZES, ENDS = (f"pdserve:talks:stored-{name}:{TENANT}" for name in ("sizes", "ends"))


@pytest.fixture
async def store(redis: EmbeddedRedis) -> Any:
    config = GatewayConfig(
        router="h:1", redis=redis.url, cluster="talks", store_bytes=10_000, store_count=3, max_body_bytes=4000
    )
    with Redis.from_url(redis.url) as client:
        for key in client.scan_iter("pdserve:talks:*"):
            client.delete(key)
    found = Storage(config, PATIENT_S)
    yield ConversationStore(found)
    await found.close()


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


async def test_a_conversation_does_not_leave_for_its_own_items(store: ConversationStore) -> None:
    """Also if others were used in the same millisecond."""
    for _ in range(30):
        known = await create(store, "x" * 2500)
        await store.append(turn(known, "y" * 700), [])
        assert len(await contents(store, known)) == 2


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
    assert await contents(store, known) == ["a", "x" * 3000, "z"]


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
    await store.delete(TENANT, known)
    with Redis.from_url(redis.url) as client:
        assert int(client.hget(SIZES, "sum")) == 0


async def test_bytes_are_counted_before_they_are_read(store: ConversationStore) -> None:
    known = await create(store, "x" * 2000)

    def refuse(num_bytes: int) -> None:
        asked.append(num_bytes)
        raise Overloaded("full", 1.0)

    asked: list[int] = []
    with pytest.raises(Overloaded):
        await store.history(turn(known), refuse)
    assert asked[0] > 2000


@pytest.mark.parametrize("lost", [SIZES, ENDS])
async def test_a_table_that_redis_has_evicted_is_rebuilt(
    store: ConversationStore, redis: EmbeddedRedis, lost: str
) -> None:
    known = [await create(store, text * 9) for text in "ab"]
    with Redis.from_url(redis.url) as client:
        client.delete(lost)
        await store.append(turn(known[0], "c"), [])
        await create(store)
        assert is_exact(client)
        assert client.zcard(ENDS) == 3


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
