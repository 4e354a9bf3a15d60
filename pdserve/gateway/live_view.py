"""The live view's endpoints: the event stream of frames, explanations, and the operator's commands.

Frames come from the router's Watch with the viewer's own token, so the router decides who may see them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from pdserve.client.aio import AsyncClient
from pdserve.core.errors import Cancelled, PermissionDenied
from pdserve.core.live import PERIOD_S, LiveFrame
from pdserve.core.live_json import frame_to_json
from pdserve.gateway import sse
from pdserve.gateway.door import Caller
from pdserve.gateway.respond import EVENT_STREAM, Sender, disconnected

#: A page of another site cannot set this header without the gateway's permission (CORS), which it never gives.
OWN_HEADER: Final = "x-pdserve-ui"


async def stream_frames(caller: Caller, receive: Any, send: Sender) -> int:
    """Sends frames until the viewer leaves or the router ends the stream. Raises PdserveError."""
    gone = asyncio.create_task(disconnected(receive))
    frames = caller.client.watch(PERIOD_S)
    try:
        first = await _next(frames, gone)
        topology = await caller.client.topology()
        await send.begin_stream(lambda reply: [sse.frame(reply.body)])
        hello = {"model": caller.model.name, "router_id": topology.router_id, "period_s": PERIOD_S, "is_operator": True}
        data = sse.frame({"hello": hello})
        frame: LiveFrame | None = first
        while frame is not None:
            data += sse.frame(frame_to_json(frame))
            await send({"type": "http.response.body", "body": data, "more_body": True})
            data = b""
            frame = await _next(frames, gone)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return 200
    except Cancelled:
        return 499
    finally:
        gone.cancel()
        await frames.aclose()


async def send_head(caller: Caller, send: Any) -> int:
    """Answers HEAD without becoming a viewer, whose number is limited. Raises PermissionDenied."""
    await caller.client.topology()
    await send({"type": "http.response.start", "status": 200, "headers": list(EVENT_STREAM)})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    return 200


async def explanation(client: AsyncClient, request_id: str) -> dict[str, Any]:
    """Raises NotFound after the router has forgotten the request."""
    return asdict(await client.explain(request_id))


async def worker_log(client: AsyncClient, worker_id: str) -> dict[str, Any]:
    """Raises NotFound, and Unavailable if the worker does not answer."""
    return {"lines": [asdict(one) for one in await client.worker_log(worker_id)]}


def check_own(given: Mapping[str, str]) -> None:
    """Raises PermissionDenied if the request may come from a page of another site."""
    if OWN_HEADER not in given:
        raise PermissionDenied(f"no header {OWN_HEADER}, which pages of other sites cannot send")


async def _next(frames: Any, gone: asyncio.Task[None]) -> LiveFrame | None:
    """None at the end. Raises Cancelled if the viewer has left."""
    waiting = asyncio.ensure_future(anext(frames, None))
    try:
        await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise Cancelled("the viewer has left")
        found: LiveFrame | None = waiting.result()
        return found
    finally:
        if not waiting.done():
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
