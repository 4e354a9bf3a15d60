"""Which requests enter: those of known callers, and none while the gateway drains.

Callers are admitted before their bodies are read. Only the router knows the tokens; the gateway stores none.

A token that the router accepts is remembered for some seconds, together with the model that the router serves. Each
call carries its caller's token, so a revoked token passes the gateway for at most that time, and the router rejects it.

A rejected token is remembered too, for a second, so that a caller that repeats it costs the router nothing. A flood of
unknown tokens is limited to MAX_CHECKS at a time. Tokens that were accepted before are checked beside that limit, so
their callers do not wait for the flood.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar, final

from pdserve.client.aio import AsyncClient
from pdserve.client.results import Model
from pdserve.core.access.shares import caller_of
from pdserve.core.errors import Overloaded, ShuttingDown, Unauthenticated

REMEMBER_S: Final = 10.0
KNOWN_S: Final = 50.0  # after it, in which the caller's requests can be rejected without a check
REMEMBER_REJECTED_S: Final = 1.0
MAX_CALLERS: Final = 1024
MAX_REJECTED: Final = 1024
MAX_CHECKS: Final = 64  # unknown tokens that are checked at a time
RETRY_S: Final = 0.1
RENEW_S: Final = 1.0  # a caller that names an unknown model has the model read again, if it is older

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class Caller:
    client: AsyncClient  # presents the caller's token
    model: Model
    key: bytes = b""  # digest of the token; empty without one

    @property
    def share(self) -> str:
        """Who it is in pdserve/core/access/shares.py. An older router names no tenant: then each token is a caller."""
        tenant = self.model.tenant
        return caller_of(f"token {self.key.hex()}" if tenant is None else tenant)


@final
class Door:
    def __init__(self, client: AsyncClient, *, needs_token: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """`needs_token`: a caller without a token is rejected even if the router would accept it."""
        self._client = client
        self._needs_token = needs_token
        self._clock = clock
        # With the time at which the entry expires, oldest first.
        self._known: OrderedDict[bytes, tuple[Caller, float]] = OrderedDict()
        self._rejected: OrderedDict[bytes, tuple[Unauthenticated, float]] = OrderedDict()  # the same
        # The last answer of `is_open`, with the time at which it expires.
        self._open: tuple[bool, float] = (False, -math.inf)
        self._num_unknown = 0  # checks of tokens that are not in _known
        self._checks: dict[bytes, asyncio.Task[Caller]] = {}

    def known(self, token: str | None) -> Caller | None:
        """The caller of a token that the router has accepted at its last check, which may be over: enough to reject a
        request, not to admit it. None after KNOWN_S more, because the token may have been revoked, or may belong to
        another tenant."""
        known = None if token is None and self._needs_token else self._known.get(_key_of(token))
        return known[0] if known is not None and self._clock() < known[1] + KNOWN_S else None

    async def admit(self, token: str | None) -> Caller:
        """Raises Unauthenticated, Unavailable if the router does not answer, and Overloaded."""
        if token is None and self._needs_token:
            raise Unauthenticated("no bearer token in the authorization header")
        key = _key_of(token)
        known = self._known.get(key)
        if known is not None and self._clock() < known[1]:
            return known[0]
        rejected = self._rejected.get(key)
        if rejected is not None and self._clock() < rejected[1]:
            raise Unauthenticated(rejected[0].message)
        check = self._checks.get(key)
        if check is None:
            if known is None and self._num_unknown >= MAX_CHECKS:
                raise Overloaded(f"{MAX_CHECKS} tokens are being checked", RETRY_S)
            self._num_unknown += known is None
            check = self._begin_check(key, self._client.with_token(token), is_unknown=known is None)
        return await asyncio.shield(check)

    async def renewed(self, caller: Caller) -> Caller:
        """The caller with the model's present names, at most RENEW_S old. Raises like `admit`."""
        known = self._known.get(caller.key)
        if known is not None and self._clock() < known[1] - REMEMBER_S + RENEW_S:
            return known[0]
        check = self._checks.get(caller.key) or self._begin_check(caller.key, caller.client, is_unknown=False)
        return await asyncio.shield(check)

    def renew_all(self) -> None:
        """The model has other names now."""
        now_s = self._clock()
        for key, (caller, expires_s) in self._known.items():
            self._known[key] = (caller, min(expires_s, now_s))

    async def is_open(self) -> bool:
        """Whether the router accepts a made-up token, which means that it needs none. Raises Unavailable."""
        if self._needs_token:
            return False
        if self._clock() >= self._open[1]:
            try:
                await self._client.with_token(secrets.token_hex(16)).model()
                found = True
            except Unauthenticated:
                found = False
            self._open = (found, self._clock() + REMEMBER_S)
        return self._open[0]

    # ------------------------------------------------------------------------------------------------------------

    def _begin_check(self, key: bytes, client: AsyncClient, *, is_unknown: bool) -> asyncio.Task[Caller]:
        check = self._checks[key] = asyncio.create_task(self._check(key, client, is_unknown=is_unknown))
        check.add_done_callback(_note_error)
        return check

    async def _check(self, key: bytes, client: AsyncClient, *, is_unknown: bool) -> Caller:
        try:
            caller = Caller(client, await client.model(), key)
        except Unauthenticated as error:
            self._known.pop(key, None)
            _remember(self._rejected, key, (error, self._clock() + REMEMBER_REJECTED_S), MAX_REJECTED)
            raise
        finally:
            del self._checks[key]
            self._num_unknown -= is_unknown
        _remember(self._known, key, (caller, self._clock() + REMEMBER_S), MAX_CALLERS)
        return caller


def _key_of(token: str | None) -> bytes:
    """A digest, so that neither the time of a comparison nor the table reveals a token."""
    return b"" if token is None else hashlib.blake2b(token.encode(), digest_size=16).digest()


def _remember(table: OrderedDict[bytes, Entry], key: bytes, entry: Entry, most: int) -> None:
    table.pop(key, None)
    table[key] = entry
    if len(table) > most:
        table.popitem(last=False)


def _note_error(check: asyncio.Task[Caller]) -> None:
    """Ignores an error for which no caller waits any more."""
    if not check.cancelled():
        check.exception()


# --- shutdown -------------------------------------------------------------------------------------------------
# The end of the gateway: it drains, and then ends each running request with an error that says why.


@final
class Shutdown:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self.is_draining = False  # new requests are rejected
        self._limits: dict[asyncio.Timeout, bool] = {}  # of the running requests; whether the drain waits for it
        self._answering = 0  # requests whose answer has not ended
        self._changed = asyncio.Event()

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Runs a request up to the end of its answer, so also the sending of the error that `interrupt` caused."""
        self._answering += 1
        try:
            yield
        finally:
            self._answering -= 1
            self._changed.set()

    @contextlib.asynccontextmanager
    async def interruptible(self, *, is_endless: bool) -> AsyncIterator[None]:
        """Runs a request, inside `answering`. Raises ShuttingDown if `interrupt` ends it. `is_endless`: the drain does
        not wait for it."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits[limit] = not is_endless
                try:
                    yield
                finally:
                    del self._limits[limit]
                    self._changed.set()
        except TimeoutError:
            if limit.expired():
                raise ShuttingDown from None
            raise

    async def drain(self, limit_s: float) -> None:
        """Rejects new requests, and returns when the running ones have ended, or after `limit_s`."""
        self.is_draining = True
        await self._wait(lambda: not any(self._limits.values()), limit_s)

    async def interrupt(self, limit_s: float) -> None:
        """Ends all requests, and returns when each has sent its error, or after `limit_s`."""
        self.is_draining = True
        now_s = asyncio.get_running_loop().time()
        for one in self._limits:
            if not one.expired():
                one.reschedule(now_s)
        await self._wait(lambda: not self._answering, limit_s)

    async def _wait(self, holds: Callable[[], bool], limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()
