"""Reads the body of a request, with limits on its size, on the time that it takes and on what its caller holds."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from pdserve.core.errors import Cancelled, DeadlineExceeded, InvalidRequest, shortened
from pdserve.core.shares import HeldBody
from pdserve.gateway.errors import BodyTooLarge

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
