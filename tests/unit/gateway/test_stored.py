"""Stored responses, by OpenAI's client against a gateway, a router and a Redis."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from redis import Redis

from pdserve.config import GatewayConfig
from pdserve.core.errors import ConfigError, InvalidRequest, NotFound, Overloaded, Unavailable
from pdserve.gateway import storage, stored
from pdserve.gateway.api.conversations import input_page
from pdserve.gateway.storage import Storage
from pdserve.gateway.stored import ResponseStore, Turn
from pdserve.prefix.embedded import EmbeddedRedis
from tests.support.tooled_model import BUNDLED
from tests.unit.gateway.conftest import PATIENT_S, Served, record_calls, serve, serve_stored

MOST_BYTES = 200_000


@pytest.fixture(scope="module")
def served(redis: EmbeddedRedis) -> Iterator[Served]:
    with serve_stored(redis, store_bytes=MOST_BYTES, store_count=50) as found:
        yield found


def answer(served: Served, text: str, **fields: Any) -> Any:
    return served.openai.responses.create(model=served.model, input=text, max_output_tokens=8, temperature=0, **fields)


# --- end to end ---------------------------------------------------------------------------------------------------


def test_a_response_continues_a_stored_one(served: Served) -> None:
    first = answer(served, "def fib(n):")
    assert (first.store, first.previous_response_id) == (True, None)
    second = answer(served, "and now?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    whole = answer(
        served,
        [
            {"role": "user", "content": "def fib(n):"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "and now?"},
        ],
        store=False,
    )
    assert not whole.store
    assert second.usage.input_tokens == whole.usage.input_tokens
    assert second.output_text == whole.output_text
    assert served.openai.responses.retrieve(first.id).output_text == first.output_text
    with pytest.raises(openai.NotFoundError):
        served.openai.responses.retrieve(whole.id)


def test_a_stream_is_stored_before_it_ends(served: Served) -> None:
    last = None
    for event in answer(served, "a stream", stream=True):
        last = event
    assert last is not None
    found = served.openai.responses.retrieve(last.response.id)
    assert found.output_text == last.response.output_text
    assert last.response.store
    assert answer(served, "next", previous_response_id=found.id).previous_response_id == found.id


def test_the_input_is_listed_in_pages(served: Served) -> None:
    items = [{"role": "user", "content": f"text {number}"} for number in range(5)]
    response = answer(served, items)
    listed = served.openai.responses.input_items
    page = listed.list(response.id, limit=2, order="asc")
    assert [one.content for one in page.data] == ["text 0", "text 1"]
    assert [one.content for one in listed.list(response.id, limit=2, order="asc")] == [f"text {n}" for n in range(5)]
    assert [one.content for one in listed.list(response.id).data] == [f"text {number}" for number in (4, 3, 2, 1, 0)]
    with pytest.raises(openai.NotFoundError):
        listed.list(response.id, after="item_9_none").data  # noqa: B018
    with pytest.raises(openai.BadRequestError):
        listed.list(response.id, limit=101)


def test_a_deleted_response_continues_nothing(served: Served) -> None:
    first = answer(served, "one")
    second = answer(served, "two", previous_response_id=first.id)
    served.openai.responses.delete(first.id)
    for call in (
        lambda: served.openai.responses.retrieve(first.id),
        lambda: served.openai.responses.delete(first.id),
        lambda: answer(served, "three", previous_response_id=second.id),
    ):
        with pytest.raises(openai.NotFoundError, match=first.id):
            call()
    assert served.openai.responses.retrieve(second.id).id == second.id


@pytest.mark.parametrize("given", ["resp_x", "resp_" + "x" * 5000, "../../x", "resp_*", "", "\u0000"])
def test_an_unknown_id_is_not_found(served: Served, given: str) -> None:
    with pytest.raises((openai.NotFoundError, openai.UnprocessableEntityError)) as caught:
        answer(served, "x", previous_response_id=given)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("fields", [{"store": "yes"}, {"previous_response_id": 7}, {"conversation": 7}])
def test_fields_about_storing_are_checked(served: Served, fields: dict[str, Any]) -> None:
    status, text = served.post("/v1/responses", {"input": "x", **fields})
    assert (status, json.loads(text)["error"]["param"]) == (400, next(iter(fields)))


def test_an_id_that_its_client_chose_is_stored_once(served: Served) -> None:
    mine = {"x-request-id": "mine"}
    assert answer(served, "x", extra_headers=mine).id == "resp_mine"
    with pytest.raises(openai.ConflictError):
        answer(served, "y", extra_headers=mine)
    answer(served, "y", extra_headers=mine, store=False)


@pytest.mark.parametrize("chosen", ["é", "a b", "a/b", "a?b", "a#b", "a%2fb"])
def test_an_id_that_cannot_be_in_a_path_is_not_stored(served: Served, chosen: str) -> None:
    headers = {"x-request-id": chosen.encode().decode("latin-1")}
    fields = {"model": served.model, "input": "x", "max_output_tokens": 2}
    for more, status in (({}, 200), ({"store": True}, 400)):
        connection = http.client.HTTPConnection(served.address, timeout=60)
        body = json.dumps({**fields, **more})
        connection.request("POST", "/v1/responses", body, {"content-type": "application/json", **headers})
        reply = connection.getresponse()
        found = json.loads(reply.read())
        connection.close()
        assert reply.status == status
        assert found["error"]["param"] == "x-request-id" if more else not found["store"]


@pytest.mark.parametrize("chosen", ["a.b", "A_b~1:2@c=d+e,f-g", "x" * 128])
def test_an_id_that_can_be_in_a_path_is_found(served: Served, chosen: str) -> None:
    assert answer(served, "x", extra_headers={"x-request-id": chosen}).store
    assert served.openai.responses.retrieve(f"resp_{chosen}").id == f"resp_{chosen}"


@pytest.mark.slow
def test_only_calls_that_need_redis_fail_without_it() -> None:
    with EmbeddedRedis.start() as server, serve(model=str(BUNDLED), redis=server.url, store_bytes=MOST_BYTES) as served:
        create = served.openai.responses.create
        server.kill()
        for call in (
            lambda: served.openai.responses.retrieve("resp_x"),
            lambda: served.openai.responses.delete("resp_x"),
            lambda: create(input="x", store=True),
            lambda: create(input="x", previous_response_id="resp_x"),
        ):
            with pytest.raises(openai.InternalServerError) as caught:
                call()
            assert (caught.value.status_code, caught.value.code) == (503, "unavailable")
        assert served.openai.completions.create(model=served.model, prompt="x", max_tokens=2).choices
        for headers in ({}, {"x-request-id": "mine"}):
            assert not answer(served, "x", extra_headers=headers).store


# --- the store ----------------------------------------------------------------------------------------------------


@pytest.fixture
async def store(redis: EmbeddedRedis, request: pytest.FixtureRequest) -> Any:
    config = GatewayConfig(
        router="h:1", redis=redis.url, cluster="unit", store_bytes=10_000, store_count=5, max_body_bytes=4000
    )
    with Redis.from_url(redis.url) as client:
        for key in client.scan_iter("pdserve:unit:*"):
            client.delete(key)
    found = Storage(config, PATIENT_S)
    yield ResponseStore(found)
    await found.close()


def turn(previous: str = "", *, tenant: str = "tenant a", text: str = "hi", is_required: bool = True) -> Turn:
    items = [{"type": "message", "role": "user", "content": text}]
    return Turn(tenant=tenant, is_stored=True, is_required=is_required, previous=previous, items=items)


async def keep(store: ResponseStore, name: str, one: Turn | None = None, text: str = "ho", **fields: Any) -> bool:
    part = {"type": "output_text", "text": text, "logprobs": [1]}
    item = {"type": "message", "role": "assistant", "content": [part]}
    response = {"id": name, "output": [item], **fields}
    encoded, one = json.dumps(response).encode(), one or turn()
    items = await store.record(one, response, encoded)
    return items is not None and await store.keep(one, name, encoded, items)


def hold(num_bytes: int) -> None:
    assert num_bytes >= 0


async def read(store: ResponseStore, name: str, tenant: str = "tenant a") -> Any:
    assert (await store.response(tenant, name, hold))["id"] == name
    return await store.input(tenant, name, hold)


async def history(store: ResponseStore, one: Turn) -> list[Any]:
    return await store.history(one, hold)


SIZES, ENDS = (f"pdserve:unit:stored-{name}:tenant a" for name in ("sizes", "ends"))


def held_bytes(client: Any) -> int:
    keys = client.scan_iter("pdserve:unit:stored:*")
    return sum(len(value) for key in keys for value in client.hmget(key, "response", "items"))


async def test_other_tenants_find_nothing(store: ResponseStore) -> None:
    await keep(store, "resp_1")
    other = turn("resp_1", tenant="tenant b")
    with pytest.raises(NotFound):
        await read(store, "resp_1", "tenant b")
    with pytest.raises(NotFound):
        await store.delete("tenant b", "resp_1")
    with pytest.raises(NotFound):
        await history(store, other)
    assert await keep(store, "resp_1", turn(tenant="tenant b"))
    assert await read(store, "resp_1") == turn().items


async def test_unknown_fields_are_not_stored(store: ResponseStore) -> None:
    one = turn()
    await keep(store, "resp_1", replace(one, items=[{**item, "id": "a", "junk": [{}]} for item in one.items]))
    assert await read(store, "resp_1") == [{**item, "id": "a"} for item in one.items]


async def test_history_has_inputs_and_outputs_in_order(store: ResponseStore) -> None:
    await keep(store, "resp_1", turn(text="a"), "b")
    await keep(store, "resp_2", turn("resp_1", text="c"), "d")
    items = await history(store, turn("resp_2"))
    texts = [one["content"] if isinstance(one["content"], str) else one["content"][0]["text"] for one in items]
    assert texts == ["a", "b", "c", "d"]
    assert all("logprobs" not in one["content"][0] for one in items[1::2])


async def test_a_chain_has_a_limit(store: ResponseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MAX_CHAIN", 3)
    previous = ""
    for number in range(4):
        await keep(store, f"resp_{number}", turn(previous))
        previous = f"resp_{number}"
    assert len(await history(store, turn("resp_2"))) == 6
    with pytest.raises(InvalidRequest, match="over 3 responses"):
        await history(store, turn("resp_3"))


async def test_a_conversation_is_no_larger_than_a_body(store: ResponseStore) -> None:
    await keep(store, "resp_1", turn(text="x" * 2500))
    await keep(store, "resp_2", turn("resp_1", text="x" * 2500))
    with pytest.raises(InvalidRequest, match="over 4000 bytes"):
        await history(store, turn("resp_2"))


async def test_a_loop_of_responses_ends(store: ResponseStore, redis: EmbeddedRedis) -> None:
    """A client can make one: it deletes a response that others name, and stores another one of its id."""
    await keep(store, "resp_1")
    await keep(store, "resp_2", turn("resp_1"))
    await store.delete("tenant a", "resp_1")
    await keep(store, "resp_1", turn("resp_2"))
    with pytest.raises(InvalidRequest, match="previous_response_id"):
        await history(store, turn("resp_1"))


async def test_numbers_and_bytes_of_a_tenant_are_limited(store: ResponseStore, redis: EmbeddedRedis) -> None:
    for number in range(7):
        await keep(store, f"resp_{number}")
    for number in range(7):
        if number < 2:
            with pytest.raises(NotFound):
                await read(store, f"resp_{number}")
        else:
            await read(store, f"resp_{number}")
    await keep(store, "resp_large", turn(text="x" * 9700))
    with pytest.raises(NotFound):
        await read(store, "resp_6")
    with pytest.raises(InvalidRequest, match="at most 10000 bytes"):
        await keep(store, "resp_larger", turn(text="x" * 10_001))
    assert not await keep(store, "resp_larger", turn(text="x" * 10_001, is_required=False))
    with Redis.from_url(redis.url) as client:
        assert held_bytes(client) == int(client.hget(SIZES, "sum"))
    await store.delete("tenant a", "resp_large")
    with Redis.from_url(redis.url) as client:
        assert int(client.hget(SIZES, "sum")) == 0


async def test_bytes_are_counted_before_they_are_read(store: ResponseStore) -> None:
    await keep(store, "resp_1", turn(text="x" * 3000))
    await keep(store, "resp_2", turn("resp_1"))

    def refuse(num_bytes: int) -> None:
        asked.append(num_bytes)
        raise Overloaded("full", 1.0)

    asked: list[int] = []
    for call in (
        store.response("tenant a", "resp_1", refuse),
        store.input("tenant a", "resp_1", refuse),
        store.history(turn("resp_2"), refuse),
    ):
        with pytest.raises(Overloaded):
            await call
    sizes = [len(json.dumps(await store.response("tenant a", "resp_1", hold))), 3000, 3000]
    assert asked[0] == sizes[0]
    assert asked[2] > asked[1] > 3000


async def test_a_conversation_is_measured_without_what_answers_repeat(store: ResponseStore) -> None:
    tools = [{"type": "function", "name": "f" * 1500}]
    previous = ""
    for number in range(4):
        await keep(store, f"resp_{number}", turn(previous), tools=tools)
        previous = f"resp_{number}"
    assert len(await history(store, turn(previous))) == 8


@pytest.mark.parametrize("lost", [SIZES, ENDS])
async def test_a_table_that_redis_has_evicted_is_rebuilt(store: ResponseStore, redis: EmbeddedRedis, lost: str) -> None:
    for number in range(5):
        await keep(store, f"resp_{number}")
    with Redis.from_url(redis.url) as client:
        client.delete(lost)
        await keep(store, "resp_5")
        assert (client.hlen(SIZES), client.zcard(ENDS)) == (6, 5)
        assert held_bytes(client) == int(client.hget(SIZES, "sum"))
        assert min(client.pttl(SIZES), client.pttl(ENDS)) > 0
    with pytest.raises(NotFound):
        await read(store, "resp_0")


async def test_a_shorter_lifetime_ends_no_table_early(store: ResponseStore, redis: EmbeddedRedis) -> None:
    await keep(store, "resp_1")
    shorter = Storage(replace(store._config, store_s=5.0), PATIENT_S)
    short = ResponseStore(shorter)
    await keep(short, "resp_2")
    with Redis.from_url(redis.url) as client:
        for key in (SIZES, ENDS):
            assert client.pttl(key) > 1000 * 3600
    await shorter.close()


async def test_few_responses_leave_at_once(
    store: ResponseStore, redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that others do not wait for Redis; a large one is stored all the same."""
    larger = Storage(replace(store._config, store_bytes=200_000, store_count=1000), PATIENT_S)
    many = ResponseStore(larger)
    for number in range(600):
        await keep(many, f"resp_{number}")
    told = record_calls(many, "_put")
    await keep(many, "resp_large", turn(text="x" * 150_000))
    assert told == [b"full", b"stored"]
    with Redis.from_url(redis.url) as client:
        assert held_bytes(client) == int(client.hget(SIZES, "sum")) <= 200_000
    await larger.close()


async def test_a_stored_response_is_not_replaced(store: ResponseStore) -> None:
    assert await keep(store, "resp_1")
    assert not await keep(store, "resp_1", turn(text="other", is_required=False))
    assert await read(store, "resp_1") == turn().items


async def test_a_redis_that_is_gone_is_unavailable() -> None:
    gone = Storage(GatewayConfig(router="h:1", redis="redis://127.0.0.1:1/0", store_bytes=1))
    store = ResponseStore(gone)
    with pytest.raises(Unavailable):
        await read(store, "resp_1")
    with pytest.raises(Unavailable):
        await history(store, turn("resp_1"))
    with pytest.raises(Unavailable):
        await store.check_unused(turn(), "resp_1")
    await store.check_unused(turn(is_required=False), "resp_1")
    await gone.close()


async def test_a_redis_that_hangs_is_unavailable() -> None:
    with EmbeddedRedis.start() as server:
        config = GatewayConfig(router="h:1", redis=server.url, store_bytes=9000)
        both = Storage(config, PATIENT_S), Storage(config, 0.2)
        patient, hasty = map(ResponseStore, both)
        assert await keep(patient, "resp_1")
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(Unavailable):
                await read(hasty, "resp_1")
            with pytest.raises(Unavailable):
                await keep(hasty, "resp_2")
            assert not await keep(hasty, "resp_3", turn(is_required=False))
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert await read(patient, "resp_1") == turn().items
        for one in both:
            await one.close()


@pytest.mark.parametrize("size", [1, storage.LARGE_BYTES + 1])
async def test_a_tenant_has_its_share_of_the_calls(store: ResponseStore, size: int) -> None:
    """The calls of another one neither wait for them, nor for large ones."""
    release, running = asyncio.Event(), 0

    async def hang() -> None:
        nonlocal running
        running += 1
        await release.wait()

    async def done() -> int:
        return 7

    calls = [asyncio.create_task(store._storage.ask("tenant a", hang, size=size)) for _ in range(100)]
    while not running:
        await asyncio.sleep(0.0)
    assert await store._storage.ask("tenant b", done, size=size) == 7
    assert await store._storage.ask("tenant a", done, size=storage.LARGE_BYTES + 2 - size) == 7
    assert running <= storage.MAX_CALLS - 3
    release.set()
    await asyncio.gather(*calls)
    assert running == 100


def test_storing_needs_a_redis() -> None:
    with pytest.raises(ConfigError, match="store_bytes"):
        Storage(GatewayConfig(router="h:1", store_bytes=1))


def test_a_page_of_nothing_has_no_ids() -> None:
    found = input_page("resp_1", [], 20, "", is_ascending=True)
    assert (found["data"], found["first_id"], found["has_more"]) == ([], None, False)


def test_items_without_an_id_get_one() -> None:
    given = [{"id": None, "content": "a"}, {"id": "mine"}, {}]
    page = input_page("resp_1", given, 1, "", is_ascending=True)
    assert [one["id"] for one in page["data"]] == ["item_0_resp_1"]
    page = input_page("resp_1", given, 9, page["last_id"], is_ascending=True)
    assert [one["id"] for one in page["data"]] == ["mine", "item_2_resp_1"]
