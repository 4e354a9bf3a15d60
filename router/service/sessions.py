"""Lists and ends the sessions that this router knows (docs/sessions.md)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, final

from pdserve.core.access.shares import COUNT_WEIGHT, Shares, caller_of
from pdserve.core.errors import InvalidRequest, Overloaded
from pdserve.core.types import RequestAttributes, require_at_most
from pdserve.prefix.index import PrefixDepths, PrefixLookup
from pdserve.v1 import inference_pb2
from pdserve.wire.protocol import SESSION
from router.service.runtime import Runtime
from router.state.conversations import Conversation, Session
from router.state.interface import SessionEnded

DEFAULT_LIMIT: Final = 20  # sessions of a page
MAX_LIMIT: Final = 100
MAX_ROWS: Final = 100  # conversations of a page; it has at least one session
LOOKUPS_S: Final = 1.0  # for all lookups of one page
WAIT_S: Final = 2.0  # while others list sessions
MAX_LISTS: Final = 8  # that wait or are made


@final
class SessionCalls:
    """Lives on one event loop."""

    def __init__(self, runtime: Runtime, lookup: PrefixLookup) -> None:
        self._runtime, self._lookup = runtime, lookup
        self._listing = asyncio.Lock()  # one list of sessions at a time
        self._lists = Shares(MAX_LISTS, COUNT_WEIGHT)  # so that no tenant takes all places

    async def page(self, tenant: str, after: int, limit: int) -> inference_pb2.ListSessionsResponse:
        """Of the tenant; without one, of all: the caller is then the operator, or there are no tenants. Raises
        InvalidRequest and Overloaded."""
        limit = limit or DEFAULT_LIMIT
        require_at_most("limit", "sessions", limit, MAX_LIMIT)
        async with self._alone(caller_of(tenant)):
            return await self._page(tenant or None, after, limit)

    def end(self, tenant: str, session_id: str) -> bool:
        """Whether this router knows the session. Raises InvalidRequest."""
        if not session_id:
            raise InvalidRequest("session_id", "none", "the id of a session")
        RequestAttributes(session_id=session_id)
        is_known = self._runtime.state.sessions.find(tenant, session_id) is not None
        if is_known:
            self._runtime.submit(SessionEnded(tenant=tenant, session_id=session_id))
        return is_known

    @contextlib.asynccontextmanager
    async def _alone(self, caller: str) -> AsyncIterator[None]:
        """Raises Overloaded if others list sessions for long, or the caller has its share of the places to wait."""
        busy = Overloaded("other calls are listing sessions", 1.0)
        if not self._lists.fits(caller, 1):
            raise busy
        self._lists.add(caller, 1)
        try:
            try:
                async with asyncio.timeout(WAIT_S):
                    await self._listing.acquire()
            except TimeoutError:
                raise busy from None
            try:
                yield
            finally:
                self._listing.release()
        finally:
            self._lists.add(caller, -1)

    async def _page(self, tenant: str | None, after: int, limit: int) -> inference_pb2.ListSessionsResponse:
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
        cached = await self._cached_by_conversation([row for one, _ in found for row in one.conversations.values()])
        since_1970_s = time.time() - time.monotonic()
        for session, serial in found:
            view = state.sessions.view(session, cached, state.block_size_of, since_1970_s)
            page.sessions.append(SESSION.encode(replace(view, cursor=serial)))
            await asyncio.sleep(0.0)
        return page

    async def _cached_by_conversation(self, conversations: Sequence[Conversation]) -> dict[int, Mapping[str, int]]:
        """Leading ones of `hashes` by worker, by the conversation's number. It lacks those for which the index has not
        answered in time."""
        cached: dict[int, Mapping[str, int]] = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOKUPS_S):
                for one in conversations:
                    found = await self._lookup.inspect(one.hashes) if one.hashes else PrefixDepths()
                    if found is not None:
                        cached[one.number] = found
                    await asyncio.sleep(0.0)
        return cached
