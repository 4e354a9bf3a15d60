"""Reads the body of a request, with limits on its size and on the time that it takes."""

from __future__ import annotations

import asyncio
from typing import Any

from pdserve.core.errors import Cancelled, DeadlineExceeded, InvalidRequest, shortened
from pdserve.gateway.errors import BodyTooLarge


def declared_bytes(content_length: str | None, most: int) -> int:
    """The size that the client declares, or `most` if it declares none. Raises BodyTooLarge before a byte is read."""
    if content_length is None:
        return most
    if not (content_length.isascii() and content_length.isdecimal() and len(content_length) <= 18):
        raise InvalidRequest("content-length", shortened(repr(content_length)), "a number of bytes")
    num_bytes = int(content_length)
    if num_bytes > most:
        raise BodyTooLarge("body", f"{num_bytes} bytes", f"at most {most} bytes")
    return num_bytes


async def read_body(receive: Any, most: int, limit_s: float) -> bytes:
    """Raises BodyTooLarge, DeadlineExceeded, and Cancelled if the client has left."""
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(limit_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Cancelled("the client has disconnected")
                chunks.append(message.get("body", b""))
                num_bytes += len(chunks[-1])
                if num_bytes > most:
                    raise BodyTooLarge("body", f"over {most} bytes", f"at most {most} bytes")
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        raise DeadlineExceeded("sending its body") from None
