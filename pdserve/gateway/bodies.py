"""The body of a request: read with limits on its size, on the time that it takes and on what its caller holds.

The declared size is checked first, then the body, then its fields. A part is read only if the previous check has
passed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar, final

from starlette.datastructures import Headers

from pdserve.client.results import Model
from pdserve.config import GatewayConfig
from pdserve.core.access.shares import HeldBody
from pdserve.core.errors import Cancelled, DeadlineExceeded, InvalidRequest, UnknownModel, shortened
from pdserve.gateway.api import http_input
from pdserve.gateway.api.errors import BodyTooLarge
from pdserve.gateway.door import Caller, Door

QUICK_BYTES: Final = 65_536  # a smaller body is validated on the event loop: a thread would take longer
LEAST_ANSWER_BYTES: Final = 2**20  # allowed whatever the limit
AnyRequest = TypeVar("AnyRequest")

# After a time of grace, a body arrives at this rate or faster. Without it, a few bytes would keep a connection.
GRACE_S: Final = 5.0
LEAST_RATE: Final = 1024  # bytes per second


def check_declared(content_length: str | None, most: int) -> None:
    """Raises BodyTooLarge before a byte is read."""
    if content_length is None:
        return
    if not (content_length.isascii() and content_length.isdecimal() and len(content_length) <= 18):
        raise InvalidRequest("content-length", shortened(repr(content_length)), "a number of bytes")
    num_bytes = int(content_length)
    if num_bytes > most:
        raise BodyTooLarge("body", f"{num_bytes} bytes", f"at most {most} bytes")


def time_for(num_bytes: int, limit_s: float) -> float:
    """The time after its headers at which a body of which so much has arrived is late."""
    return min(limit_s, GRACE_S + num_bytes / LEAST_RATE)


async def read_body(receive: Any, most: int, limit_s: float, held: HeldBody) -> bytes:
    """Raises BodyTooLarge, DeadlineExceeded, Overloaded, and Cancelled if the client has left."""
    body = bytearray()
    began_s = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(time_for(0, limit_s)) as timeout:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Cancelled("the client has disconnected")
                part = message.get("body", b"")
                if len(body) + len(part) > most:
                    raise BodyTooLarge("body", f"over {most} bytes", f"at most {most} bytes")
                held.add(len(part))
                body += part
                if not message.get("more_body", False):
                    return bytes(body)
                timeout.reschedule(began_s + time_for(len(body), limit_s))
    except TimeoutError:
        raise DeadlineExceeded("sending its body") from None


@final
class Bodies:
    """Belongs to one event loop."""

    def __init__(self, config: GatewayConfig, door: Door) -> None:
        self.config, self._door = config, door
        # One thread: each call of the parser keeps the interpreter to itself, so several would add up.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gateway-bodies")

    def check(self, given: Headers) -> None:
        """Before a byte of the body is read. Raises InvalidRequest."""
        # Without permission, pages of other origins can send other types only.
        kind = given.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            expected = "application/json; with curl, add -H 'content-type: application/json'"
            raise InvalidRequest("content-type", shortened(repr(kind)) if kind else "no such header", expected)
        if given.get("content-encoding", "identity").lower() != "identity":
            raise InvalidRequest("content-encoding", "a compressed body", "a body as it is")
        check_declared(given.get("content-length"), self.config.max_body_bytes)

    def hold_answer(self, held: HeldBody, num_bytes: int, field: str = "logprobs") -> None:
        """Before any work for the answer. Raises InvalidRequest about `field` if it could never fit, and Overloaded."""
        most = max(self.config.max_held_bytes, LEAST_ANSWER_BYTES)
        if num_bytes > most:
            expected = f"at most {most} bytes: fewer answers, tokens or logprobs"
            raise InvalidRequest(field, f"an answer of up to {num_bytes} bytes", expected)
        held.add(num_bytes)

    async def read(
        self, receive: Any, held: HeldBody, caller: Caller, make: Callable[[Mapping[str, Any], Model], AnyRequest]
    ) -> tuple[AnyRequest, Caller]:
        """Parses and validates the body. Also returns the caller, whose model is read again if the body names an
        unknown one, because an adapter may have been loaded."""
        body = await read_body(receive, self.config.max_body_bytes, self.config.body_s, held)
        try:
            return await self._parsed(body, caller, make), caller
        except UnknownModel:
            caller = await self._door.renewed(caller)
            return await self._parsed(body, caller, make), caller

    async def _parsed(
        self, body: bytes, caller: Caller, make: Callable[[Mapping[str, Any], Model], AnyRequest]
    ) -> AnyRequest:
        """A large body is read in a thread, so that others do not wait for it."""
        if len(body) <= QUICK_BYTES:
            return _make(body, caller.model, make)
        return await self.in_thread(partial(_make, body, caller.model, make))

    async def in_thread(self, work: Callable[[], AnyRequest]) -> AnyRequest:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _make(body: bytes, model: Model, make: Callable[[Mapping[str, Any], Model], AnyRequest]) -> AnyRequest:
    return make(http_input.parse(body, model.max_context_tokens), model)
