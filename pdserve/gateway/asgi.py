"""The ASGI application around the handlers: it runs the handler of each request, turns every error into an answer, and
measures the request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, final

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp

from pdserve.core.errors import InternalError, NotFound, PdserveError, ShuttingDown
from pdserve.gateway.api import errors, sse
from pdserve.gateway.api.errors import ErrorReply
from pdserve.gateway.api.field_support import Endpoint
from pdserve.gateway.api.openapi import OPERATIONS
from pdserve.gateway.door import Shutdown
from pdserve.gateway.respond import Sender, send_json
from pdserve.telemetry import metric_names
from pdserve.telemetry.metrics import Metrics
from pdserve.telemetry.trace_context import HEADER, trace_id_of

log = logging.getLogger(__name__)

OpenHandler = Callable[[Any, Any, Any, Headers], Awaitable[int]]  # scope, receive, send and headers
GENERATION_PATHS: Final[Mapping[str, Endpoint]] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}
ANTHROPIC_PATH: Final = "/v1/messages"  # at and below it, errors have Anthropic's form
HEALTH_PATHS: Final = ("/health", "/ping")  # answered while the gateway drains
ENDLESS_PATHS: Final = ("/ui/events",)  # a drain does not wait for their requests


def application(routes: Sequence[BaseRoute]) -> Starlette:
    app = _Application(routes=routes, exception_handlers={404: _no_such_path, 405: _wrong_method})
    app.direct = {one.path: one.app for one in app.routes if isinstance(one, Route) and one.path in GENERATION_PATHS}
    app.router.redirect_slashes = False  # to an address that the caller's host header would name
    return app


@final
class RequestRunner:
    """Runs the handler of one request: turns its errors into answers, counts it and measures it."""

    def __init__(self, shutdown: Shutdown, metrics: Metrics) -> None:
        self._shutdown, self._metrics = shutdown, metrics
        self._running = 0
        self.num_generating = 0

    def endpoint(self, path: str, handler: OpenHandler) -> ASGIApp:
        return _Endpoint(self, path, handler)

    async def run(self, path: str, handler: OpenHandler, scope: Any, receive: Any, send: Any) -> None:
        with self._shutdown.answering():
            await self._run(path, handler, scope, receive, send)

    async def _run(self, path: str, handler: OpenHandler, scope: Any, receive: Any, send: Any) -> None:
        """Turns every error into an answer, and measures the request."""
        began_s = time.perf_counter()
        sent, received, given = Sender(send, self._is_last), _Received(receive), Headers(scope=scope)
        has_body = "content-length" in given or "transfer-encoding" in given
        self._running += 1
        self._metrics.set(metric_names.HTTP_RUNNING, self._running)
        self.num_generating += path in GENERATION_PATHS
        status = 499
        try:
            if self._shutdown.is_draining and path not in HEALTH_PATHS:
                raise ShuttingDown
            async with self._shutdown.interruptible(is_endless=path in ENDLESS_PATHS):
                status = await handler(scope, received, sent, given)
        except asyncio.CancelledError:
            raise
        except PdserveError as error:
            status = await self._fail(path, sent, error, is_unread=has_body and not received.is_complete)
        except Exception:  # the traceback is logged, and the caller gets an error
            log.exception("a request crashed", extra={"trace_id": trace_id_of(given.get(HEADER, ""))})
            failure = InternalError("the gateway failed; its log has the reason")
            status = await self._fail(path, sent, failure, is_unread=has_body and not received.is_complete)
        finally:
            self._running -= 1
            self.num_generating -= path in GENERATION_PATHS
            self._metrics.set(metric_names.HTTP_RUNNING, self._running)
            self._metrics.add(metric_names.HTTP_REQUESTS, path=path, status=str(status))
            if sent.first_part_s is not None and path in GENERATION_PATHS:
                self._metrics.observe(metric_names.HTTP_TTFT, sent.first_part_s - began_s)

    def _is_last(self) -> bool:
        return self._shutdown.is_draining

    async def _fail(self, path: str, sent: Sender, error: PdserveError, *, is_unread: bool) -> int:
        found = error_reply(path, error)
        if sent.has_begun and not sent.has_ended and sent.error_frame is not None:
            await sent.fail(found)
            return found.status
        if sent.has_begun:
            raise error  # the server then closes the connection, so the client knows that the answer is incomplete
        pairs = [(name.encode(), value.encode()) for name, value in found.headers]
        if is_unread:
            pairs.append((b"connection", b"close"))  # the rest of the body is never read
        await send_json(sent, found.status, sse.to_json(found.body), tuple(pairs))
        return found.status


@final
class _Application(Starlette):
    """Calls the endpoints of `direct` itself: for an answer of many chunks, Starlette's routing and middleware take as
    long as the gateway's own work. Its middleware only turns errors into answers, which the endpoints do themselves."""

    direct: Mapping[str, ASGIApp] = {}  # by path; all are called by POST

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        found = self.direct.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if found is None:
            await super().__call__(scope, receive, send)
        else:
            await found(scope, receive, send)


@final
class _Endpoint:
    """An ASGI application, which Starlette calls without building a request object."""

    def __init__(self, runner: RequestRunner, path: str, handler: OpenHandler) -> None:
        self._runner, self._path, self._handler = runner, path, handler

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._runner.run(self._path, self._handler, scope, receive, send)


@final
class _Received:
    def __init__(self, receive: Any) -> None:
        self._receive = receive
        self.is_complete = False  # the whole body was read

    async def __call__(self) -> Any:
        message = await self._receive()
        if not message.get("more_body", False):
            self.is_complete = True
        return message


def error_reply(path: str, error: PdserveError) -> ErrorReply:
    return _in_form(path, errors.reply(error))


def _in_form(path: str, found: ErrorReply) -> ErrorReply:
    is_anthropic = path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")
    return errors.as_anthropic(found) if is_anthropic else found


async def _no_such_path(request: Any, error: Exception) -> Any:
    given: str = request.scope["path"]  # request.url would be made from the caller's host header
    path = given.rstrip("/")
    if given.endswith("/") and any(path == known for _, known in OPERATIONS):
        return Response(status_code=307, headers={"location": path})
    return _ErrorResponse(error_reply(given, NotFound("path", given)))


async def _wrong_method(request: Any, error: Any) -> Any:
    """A path may have one route for each method, and the error names only those of the first."""
    path: str = request.scope["path"]
    routes = [one for one in request.app.routes if isinstance(one, Route)]
    allowed = {name for one in routes if one.matches(request.scope)[0] is not Match.NONE for name in one.methods or ()}
    return _ErrorResponse(_in_form(path, errors.wrong_method(request.method, path, sorted(allowed))))


@final
class _ErrorResponse:
    """An ASGI response with an error."""

    def __init__(self, reply: ErrorReply) -> None:
        self._reply = reply

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        pairs = tuple((name.lower().encode(), value.encode()) for name, value in self._reply.headers)
        await send_json(send, self._reply.status, sse.to_json(self._reply.body), pairs)
