"""Sessions whose turns several routers of one port have placed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from pdserve.core.errors import Overloaded, PermissionDenied, Unauthenticated, Unavailable, UnknownMethod
from pdserve.v1 import inference_pb2, router_group_pb2, router_group_pb2_grpc
from pdserve.wire import status
from router.service import router_group, sessions
from router.service.router_group import RouterGroup, socket_of
from router.service.sessions import MAX_ENDS, merged
from tests.unit.router_io.conftest import ConnectTwo, until
from tests.unit.router_io.processes import Program
from tests.unit.router_io.test_quotas_live import ACME, BETA, file_of, presenting

PROMPT = "a prompt of some blocks " * 8
TOKEN = "token-of-the-operator"


async def test_a_session_ends_on_all_routers(connect_two: ConnectTwo, decode: Program, tmp_path: Path) -> None:
    first, second = await connect_two(decode, key_file=file_of(tmp_path), token=TOKEN)
    async with (
        presenting(first, ACME) as one,
        presenting(second, ACME) as two,
        presenting(second, BETA) as other,
    ):
        for client in (one, two):
            await client.generate(PROMPT, max_tokens=2, session_id="both")
        await two.generate("another " + PROMPT, max_tokens=2, session_id="second")
        await other.generate(PROMPT, max_tokens=2, session_id="both")
        for name, are_over in (("both", {"router-0": True, "router-1": True}), ("second", {"router-1": True})):
            assert await one.end_session(name)
            page = await two.sessions()
            found = {view.router_id: view.conversations[0].is_over for view in page.sessions if view.session_id == name}
            assert (found, page.is_partial) == (are_over, False)
        assert not await one.end_session("unknown")
        [view] = (await other.sessions()).sessions
        assert not view.conversations[0].is_over, "the session of another tenant"


async def test_sessions_of_all_routers_have_one_order(connect_two: ConnectTwo, decode: Program) -> None:
    fronts = await connect_two(decode)
    names = [f"s{number}" for number in range(5)]
    for number, name in enumerate(names):
        front = fronts[number in (1, 2, 4)]
        await front.client.generate(f"{name} {PROMPT}", max_tokens=1, session_id=name)
    for front in fronts:
        seen, page = [], await front.client.sessions(limit=2)
        while page.has_more:
            seen += page.sessions
            page = await front.client.sessions(limit=2, after=page.sessions[-1].cursor)
        seen += page.sessions
        assert [one.session_id for one in seen] == names[::-1]
        assert [one.router_id for one in seen] == ["router-1", "router-0", "router-1", "router-1", "router-0"]


async def test_a_session_that_a_silent_router_may_know_is_unavailable(connect_two: ConnectTwo, decode: Program) -> None:
    first, second = await connect_two(decode, members=3)
    await second.client.generate(PROMPT, max_tokens=1, session_id="s")
    assert await first.client.end_session("s"), "one knows it"
    page = await first.client.sessions()
    assert ([one.session_id for one in page.sessions], page.is_partial) == (["s"], True)
    with pytest.raises(Unavailable, match="another router does not answer"):
        await first.client.end_session("unknown")


async def test_only_the_routers_say_whose_session_ends(
    connect_two: ConnectTwo, decode: Program, folder: Path, tmp_path: Path
) -> None:
    front, _ = await connect_two(decode, key_file=file_of(tmp_path), token=TOKEN)
    async with presenting(front, ACME) as client:
        await client.generate(PROMPT, max_tokens=1, session_id="s")
    request = router_group_pb2.EndTenantSessionRequest(tenant="acme", session_id="s")
    listing = router_group_pb2.ListTenantSessionsRequest(limit=9)
    stub = router_group_pb2_grpc.RouterGroupServiceStub(front.channel)
    async with grpc.aio.insecure_channel(f"unix:{socket_of(folder, 0)}") as channel:
        inside = router_group_pb2_grpc.RouterGroupServiceStub(channel)
        for asked, token, error in (
            (stub, TOKEN, UnknownMethod),
            (stub, ACME, PermissionDenied),
            (inside, ACME, PermissionDenied),
            (inside, "wrong", Unauthenticated),
        ):
            metadata = (("authorization", f"Bearer {token}"),)
            for method, message in ((asked.EndTenantSession, request), (asked.ListTenantSessions, listing)):
                with pytest.raises(grpc.RpcError) as caught:
                    await method(message, metadata=metadata)
                assert type(status.from_rpc_error(caught.value)) is error
        metadata = (("authorization", f"Bearer {TOKEN}"),)
        [view] = (await inside.ListTenantSessions(listing, metadata=metadata)).page.sessions
        assert not view.conversations[0].is_over
        assert (await inside.EndTenantSession(request, metadata=metadata)).is_known


async def test_a_slow_list_delays_none_of_another_router(
    connect_two: ConnectTwo, decode: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_group, "ANSWER_S", 60.0)
    first, second = await connect_two(decode)
    await first.client.generate(PROMPT, max_tokens=1, session_id="s")
    begun, release, make = asyncio.Event(), asyncio.Event(), sessions.SessionCalls._page

    async def slow(
        self: sessions.SessionCalls, tenant: str | None, after: int, limit: int, lookups_s: float
    ) -> inference_pb2.ListSessionsResponse:
        if self._router_id == "router-0" and lookups_s == sessions.LOOKUPS_S:
            begun.set()
            await release.wait()
        return await make(self, tenant, after, limit, lookups_s)

    monkeypatch.setattr(sessions.SessionCalls, "_page", slow)
    listing = asyncio.create_task(first.client.sessions())
    await until(begun.is_set)
    page = await second.client.sessions()
    release.set()
    assert ([one.session_id for one in page.sessions], page.is_partial) == (["s"], False)
    assert [one.session_id for one in (await listing).sessions] == ["s"]


async def test_ends_that_wait_for_other_routers_are_few(
    connect_two: ConnectTwo, decode: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, _ = await connect_two(decode)
    release, asked = asyncio.Event(), 0

    async def hang(self: RouterGroup, tenant: str, session_id: str) -> tuple[bool, bool]:
        nonlocal asked
        asked += 1
        await release.wait()
        return True, True

    monkeypatch.setattr(RouterGroup, "end_session", hang)
    many = [asyncio.create_task(front.client.end_session("s")) for _ in range(2 * MAX_ENDS)]
    await until(lambda: sum(one.done() for one in many) >= MAX_ENDS)
    release.set()
    found = await asyncio.gather(*many, return_exceptions=True)
    assert {type(one) for one in found} == {bool, Overloaded}
    assert asked <= MAX_ENDS


async def test_a_tenant_ends_sessions_at_a_limited_rate(
    connect_two: ConnectTwo, decode: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "ENDS_PER_S", 1e-6)
    monkeypatch.setattr(sessions, "ENDS_BURST", 2)
    monkeypatch.setattr(router_group, "ANSWER_S", 60.0)
    first, second = await connect_two(decode, key_file=file_of(tmp_path), token=TOKEN)
    async with presenting(first, ACME) as one, presenting(second, ACME) as two, presenting(first, BETA) as other:
        for client in (one, two):
            await client.generate(PROMPT, max_tokens=1, session_id="both")
        for name in ("invented", "another"):
            assert not await one.end_session(name)
        with pytest.raises(Overloaded, match="sessions end too fast") as caught:
            await one.end_session("both")
        assert 0.0 < caught.value.retry_after_s <= 1e6
        found = {view.router_id: view.conversations[0].is_over for view in (await two.sessions()).sessions}
        assert found == {"router-0": True, "router-1": False}, "only the asked router has ended its part"
        assert not await other.end_session("invented"), "another tenant"
        assert await two.end_session("both"), "the other router"


def views(*cursors: int, rows: int = 1) -> list[inference_pb2.SessionView]:
    conversations = [inference_pb2.ConversationView()] * rows
    return [inference_pb2.SessionView(cursor=one, conversations=conversations) for one in cursors]


def test_a_page_ends_where_that_of_a_router_goes_on() -> None:
    def page(*pages: tuple[list[inference_pb2.SessionView], bool], limit: int = 9) -> tuple[list[int], bool]:
        found = [inference_pb2.ListSessionsResponse(sessions=one, has_more=more) for one, more in pages]
        result = merged(found, limit)
        return [one.cursor for one in result.sessions], result.has_more

    assert page((views(9, 7), False), (views(8, 1), False)) == ([9, 8, 7, 1], False)
    assert page((views(9, 7), True), (views(8, 1), False)) == ([9, 8, 7], True)
    assert page((views(9, 7), True), (views(8, 6), True)) == ([9, 8, 7], True)
    assert page((views(9, 7), False), (views(8, 1), False), limit=3) == ([9, 8, 7], True)
    assert page((views(9, 7, rows=60), False), (views(8, rows=30), False)) == ([9, 8], True)
    assert page((views(9, rows=200), False), ([], False)) == ([9], False)
