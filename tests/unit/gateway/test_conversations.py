"""Conversations, by OpenAI's client against a gateway, a router and a Redis."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from pdserve.gateway import respond
from pdserve.gateway.conversations import ConversationStore
from pdserve.gateway.stored import Turn
from pdserve.prefix.embedded import EmbeddedRedis
from tests.support.tooled_model import BUNDLED
from tests.unit.gateway.conftest import PATIENT_S, Served, serve, serve_stored


@pytest.fixture(scope="module")
def served(redis: EmbeddedRedis) -> Iterator[Served]:
    with serve_stored(redis, store_bytes=2_000_000) as found:
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


def test_a_turn_that_cannot_be_added_fails_and_is_not_stored(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    append = ConversationStore.append

    async def late(self: ConversationStore, one: Turn, output: Any) -> None:
        await self.delete(one.tenant, one.conversation)
        await append(self, one, output)

    monkeypatch.setattr(ConversationStore, "append", late)
    *_, last = answer(served, "x", conversation=served.openai.conversations.create().id, stream=True)
    assert last.type == "response.failed"
    with pytest.raises(openai.NotFoundError):
        served.openai.responses.retrieve(last.response.id)


def test_a_turn_whose_client_leaves_is_not_added(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    known = served.openai.conversations.create().id
    left, has_ended = asyncio.Event(), threading.Event()
    disconnected, pieces, run = respond.disconnected, respond.Answers.pieces, respond.Responder.respond

    async def leave(receive: Any) -> None:
        await disconnected(receive)
        left.set()

    async def slow(self: respond.Answers) -> Any:
        async for one in pieces(self):
            yield one
            await left.wait()

    async def ended(*arguments: Any) -> int:
        try:
            return await run(*arguments)
        finally:
            has_ended.set()

    monkeypatch.setattr(respond, "disconnected", leave)
    monkeypatch.setattr(respond.Answers, "pieces", slow)
    monkeypatch.setattr(respond.Responder, "respond", ended)
    answer(served, "x", conversation=known, stream=True).close()
    assert has_ended.wait(PATIENT_S)
    assert served.openai.conversations.items.list(known).data == []


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
