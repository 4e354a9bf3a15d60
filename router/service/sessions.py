"""Lists and ends sessions (docs/sessions.md).

A router knows only the sessions whose requests it has placed, so it also asks the routers that share its port. A router
that is asked by another one answers for itself alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, final

from pdserve.core.access.shares import COUNT_WEIGHT, Shares, caller_of
from pdserve.core.errors import InvalidRequest, Overloaded, PdserveError, Unavailable
from pdserve.core.types import RequestAttributes, require_at_most
from pdserve.prefix.index import PrefixDepths, PrefixLookup
from pdserve.v1 import inference_pb2, router_group_pb2, router_group_pb2_grpc
from pdserve.wire import status
from pdserve.wire.protocol import SESSION
from router.service.router_group import ANSWER_S, RouterGroup
from router.service.runtime import Runtime
from router.service.tenants import CallRate
from router.state.conversations import Conversation, Session
from router.state.interface import SessionEnded

DEFAULT_LIMIT: Final = 20  # sessions of a page
MAX_LIMIT: Final = 100
MAX_ROWS: Final = 100  # conversations of a page; it has at least one session
LOOKUPS_S: Final = 1.0  # for all lookups of one page
ASKED_LOOKUPS_S: Final = ANSWER_S / 2  # for another router, which waits for ANSWER_S
WAIT_S: Final = 2.0  # while others list sessions
MAX_LISTS: Final = 8  # that wait or are made; as many again for other routers
MAX_ENDS: Final = 32  # that other routers are told at a time
# Of each tenant's ends, because one call of a client makes a call to each other router.
ENDS_PER_S: Final = 50.0
ENDS_BURST: Final = 100


@final
class SessionCalls:
    """Answers calls that list and end sessions. Lives on one event loop."""

    def __init__(self, runtime: Runtime, lookup: PrefixLookup, group: RouterGroup, router_id: str) -> None:
        self._runtime, self._lookup, self._group, self._router_id = runtime, lookup, group, router_id
        # One list of sessions is made at a time, and no tenant takes all places of those that wait. Lists for other
        # routers have a lock and places of their own: routers may ask each other at the same time, and wait for less
        # time than clients.
        self._listing, self._listing_asked = asyncio.Lock(), asyncio.Lock()
        self._lists, self._asked = Shares(MAX_LISTS, COUNT_WEIGHT), Shares(MAX_LISTS, COUNT_WEIGHT)
        self._ends, self._end_rate = Shares(MAX_ENDS, COUNT_WEIGHT), CallRate(ENDS_PER_S, ENDS_BURST)

    async def page(self, tenant: str, after: int, limit: int) -> inference_pb2.ListSessionsResponse:
        """Of the tenant; without one, of all: the caller is then the operator, or there are no tenants. Raises
        InvalidRequest and Overloaded."""
        limit = limit or DEFAULT_LIMIT
        require_at_most("limit", "sessions", limit, MAX_LIMIT)
        with _place(self._lists, tenant, "listing sessions"):
            async with _alone(self._listing):
                own = await self._page(tenant or None, after, limit, LOOKUPS_S)
            # Without the lock, so that the next list of this router can be made meanwhile.
            others, is_complete = await self._group.sessions(tenant, after, limit)
        page = merged([own, *others], limit)
        page.is_partial = not is_complete
        return page

    async def own_page(self, tenant: str, after: int, limit: int) -> inference_pb2.ListSessionsResponse:
        """Of this router, for another one. Raises InvalidRequest and Overloaded."""
        require_at_most("limit", "sessions", limit, MAX_LIMIT)
        with _place(self._asked, tenant, "listing sessions"):
            async with _alone(self._listing_asked):
                return await self._page(tenant or None, after, limit, ASKED_LOOKUPS_S)

    async def end(self, tenant: str, session_id: str) -> bool:
        """Whether a router knows the session. Raises InvalidRequest, Overloaded, and Unavailable if a router that may
        know it has not answered. With the last two errors, this router has already ended what it has of the session."""
        is_known = self.end_own(tenant, session_id)
        if not self._group.num_others:
            return is_known
        if wait_s := self._end_rate.take(caller_of(tenant), time.monotonic()):
            message = f"sessions end too fast: at most {ENDS_PER_S:g} a second of a tenant, or {ENDS_BURST} at once"
            raise Overloaded(message, wait_s)
        with _place(self._ends, tenant, "ending sessions"):
            is_known_to_others, have_all_answered = await self._group.end_session(tenant, session_id)
        if not (is_known or is_known_to_others or have_all_answered):
            raise Unavailable(f"this router does not know session {session_id}, and another router does not answer")
        return is_known or is_known_to_others

    def end_own(self, tenant: str, session_id: str) -> bool:
        """Whether this router knows the session. Raises InvalidRequest."""
        if not session_id:
            raise InvalidRequest("session_id", "none", "the id of a session")
        RequestAttributes(session_id=session_id)
        is_known = self._runtime.state.sessions.find(tenant, session_id) is not None
        if is_known:
            self._runtime.submit(SessionEnded(tenant=tenant, session_id=session_id))
        return is_known

    async def _page(
        self, tenant: str | None, after: int, limit: int, lookups_s: float
    ) -> inference_pb2.ListSessionsResponse:
        """Made in small parts, because requests are routed on the same event loop."""
        state, page = self._runtime.state, inference_pb2.ListSessionsResponse()
        found: list[tuple[Session, int]] = []  # with their place, which changes when they are used
        num_rows = 0
        for session in state.sessions.page(tenant, after, limit + 1):
            num_rows += len(session.conversations)
            if len(found) == limit or (found and num_rows > MAX_ROWS):
                page.has_more = True
                break
            found.append((session, session.serial))
        rows = [row for one, _ in found for row in one.conversations.values()]
        cached = await self._cached_by_conversation(rows, lookups_s)
        since_1970_s = time.time() - time.monotonic()
        for session, serial in found:
            view = state.sessions.view(session, cached, state.block_size_of, since_1970_s)
            page.sessions.append(SESSION.encode(replace(view, cursor=serial, router_id=self._router_id)))
            await asyncio.sleep(0.0)
        return page

    async def _cached_by_conversation(
        self, conversations: Sequence[Conversation], lookups_s: float
    ) -> dict[int, Mapping[str, int]]:
        """Leading ones of `hashes` by worker, by the conversation's number. It lacks those for which the index has not
        answered in time."""
        cached: dict[int, Mapping[str, int]] = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(lookups_s):
                for one in conversations:
                    found = await self._lookup.inspect(one.hashes) if one.hashes else PrefixDepths()
                    if found is not None:
                        cached[one.number] = found
                    await asyncio.sleep(0.0)
        return cached


@final
class RouterGroupServicer(router_group_pb2_grpc.RouterGroupServiceServicer):
    """For the other routers that share the port. They say for which tenant they have authorised a call, so no other
    caller may reach this service."""

    def __init__(self, sessions: SessionCalls) -> None:
        self._sessions = sessions

    async def EndTenantSession(
        self, request: router_group_pb2.EndTenantSessionRequest, context: Any
    ) -> router_group_pb2.EndTenantSessionResponse:
        try:
            is_known = self._sessions.end_own(request.tenant, request.session_id)
        except PdserveError as error:
            return await status.abort(context, error)
        return router_group_pb2.EndTenantSessionResponse(is_known=is_known)

    async def ListTenantSessions(
        self, request: router_group_pb2.ListTenantSessionsRequest, context: Any
    ) -> router_group_pb2.ListTenantSessionsResponse:
        try:
            page = await self._sessions.own_page(request.tenant, request.after, request.limit)
        except PdserveError as error:
            return await status.abort(context, error)
        return router_group_pb2.ListTenantSessionsResponse(page=page)


def merged(pages: Sequence[inference_pb2.ListSessionsResponse], limit: int) -> inference_pb2.ListSessionsResponse:
    """One page of the sessions of all routers, the last used first. Pure.

    Where a page goes on, the sessions that follow it may have been used before those of another page. So the result
    ends where the first such page does.
    """
    last = max((one.sessions[-1].cursor for one in pages if one.has_more and one.sessions), default=0)
    sessions = sorted((one for page in pages for one in page.sessions), key=lambda one: one.cursor, reverse=True)
    result, num_rows = inference_pb2.ListSessionsResponse(has_more=any(one.has_more for one in pages)), 0
    for session in sessions:
        num_rows += len(session.conversations)
        if len(result.sessions) == limit or session.cursor < last or (result.sessions and num_rows > MAX_ROWS):
            result.has_more = True
            break
        result.sessions.append(session)
    return result


@contextlib.asynccontextmanager
async def _alone(listing: asyncio.Lock) -> AsyncIterator[None]:
    """Raises Overloaded if others list sessions for long."""
    try:
        async with asyncio.timeout(WAIT_S):
            await listing.acquire()
    except TimeoutError:
        raise _busy("listing sessions") from None
    try:
        yield
    finally:
        listing.release()


@contextlib.contextmanager
def _place(places: Shares, tenant: str, doing: str) -> Iterator[None]:
    """Raises Overloaded if the caller has its share of the places."""
    caller = caller_of(tenant)
    if not places.fits(caller, 1):
        raise _busy(doing)
    places.add(caller, 1)
    try:
        yield
    finally:
        places.add(caller, -1)


def _busy(doing: str) -> Overloaded:
    return Overloaded(f"other calls are {doing}", 1.0)
