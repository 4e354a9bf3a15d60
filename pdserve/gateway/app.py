"""The routes and their handlers: admission, limits and answer of each request."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, final

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Route

from pdserve.build import FULL_VERSION
from pdserve.client.aio import AsyncClient
from pdserve.client.options import Options
from pdserve.client.results import Model
from pdserve.config import GatewayConfig
from pdserve.core.access.shares import BYTES_WEIGHT, CONTROL, COUNT_WEIGHT, OPERATOR, HeldBody, Shares, kept_of
from pdserve.core.errors import (
    InvalidRequest,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
    UnknownModel,
)
from pdserve.core.types import RESPONSE_ID_PREFIX
from pdserve.gateway import endpoints, storage
from pdserve.gateway.api import http_input, openapi, replies
from pdserve.gateway.api.errors import ErrorReply
from pdserve.gateway.api.field_support import Endpoint
from pdserve.gateway.api.messages import messages_call
from pdserve.gateway.api.openapi import OPERATIONS, docs_page
from pdserve.gateway.api.responses import responses_call
from pdserve.gateway.api.sdk_call import SdkCall, chat_call, check_model, text_call
from pdserve.gateway.asgi import GENERATION_PATHS, OpenHandler, RequestRunner, application, error_reply
from pdserve.gateway.bodies import QUICK_BYTES, AnyRequest, Bodies
from pdserve.gateway.conversations import Stores
from pdserve.gateway.door import Caller, Door, Shutdown
from pdserve.gateway.endpoints import Stored
from pdserve.gateway.respond import Keep, Responder, encoded, send_json, send_whole
from pdserve.gateway.storage import tenant_of
from pdserve.gateway.stored import turn_of
from pdserve.gateway.ui.page import page
from pdserve.load_gate import LoadGate
from pdserve.telemetry import metric_names
from pdserve.telemetry.metrics import Metrics

Handler = Callable[[Any, Any, Any, Headers, Caller], Awaitable[int]]  # as OpenHandler, of an admitted caller
_CALLS: Final[Mapping[Endpoint, Callable[[Mapping[str, Any], Model, Options], SdkCall]]] = {
    "chat": chat_call,
    "text": text_call,
    "responses": responses_call,
    "messages": messages_call,
}
_TOKENS: Final = (b"authorization", http_input.API_KEY.encode())
_SHED_URLS: Final = {path.encode(): path for path in GENERATION_PATHS}
METRICS_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"


@final
class Gateway:
    """The handlers. Each returns the status of its answer, or raises: before its answer has begun, or within a
    stream."""

    def __init__(
        self,
        config: GatewayConfig,
        client: AsyncClient,
        metrics: Metrics,
        shutdown: Shutdown,
        *,
        needs_token: bool,
        gate: LoadGate | None = None,
    ) -> None:
        """`gate`: the router's, in a process with it; by default one of its own."""
        self.gate = LoadGate() if gate is None else gate
        self._owns_gate = gate is None  # a router in this process tells its gate itself how the cluster decided
        self._shutdown = shutdown
        self._door = Door(client, needs_token=needs_token)
        self._health = endpoints.Health(client)
        self._held = Shares(config.max_held_bytes, BYTES_WEIGHT)
        # Some connections are kept for /health and other endpoints without a token.
        most = config.max_connections - kept_of(config.max_connections)
        self._connections = Shares(most, COUNT_WEIGHT, is_controlled=True)
        self._responder = Responder()
        self._stores = Stores(config, storage.TIMEOUT_S) if config.store_bytes else None
        self.bodies = Bodies(config, self._door)
        self._metrics = metrics
        self._created_s = int(time.time())
        self._runner = RequestRunner(shutdown, metrics)

    def app(self) -> Starlette:
        routes = [
            *(self._route(path, "POST", self._generation(kind)) for path, kind in GENERATION_PATHS.items()),
            *(self._route(path, method, self._stored(*work)) for (method, path), work in endpoints.STORED.items()),
            self._route("/v1/models", "GET", self._models),
            self._route("/v1/sessions", "GET", self._sessions),
            self._route("/v1/sessions/{session_id:path}", "DELETE", self._end_session),
            self._route(
                "/v1/load_lora_adapter",
                "POST",
                self._adapter_command(endpoints.load_lora_request, endpoints.load_lora),
            ),
            self._route(
                "/v1/unload_lora_adapter",
                "POST",
                self._adapter_command(endpoints.unload_lora_request, endpoints.unload_lora),
            ),
            self._route("/v1/models/{name:path}", "GET", self._model),
            self._route(
                "/tokenize",
                "POST",
                self._unary(endpoints.tokenize_request, endpoints.tokenize, endpoints.tokenize_bytes),
            ),
            self._route(
                "/detokenize",
                "POST",
                self._unary(endpoints.detokenize_request, endpoints.detokenize, endpoints.detokenize_bytes),
            ),
            self._route(
                "/v1/messages/count_tokens",
                "POST",
                self._unary(endpoints.count_request, endpoints.count, endpoints.count_bytes),
            ),
            self._route("/version", "GET", self._version),
            self._route("/load", "GET", self._load),
            self._route("/ui/events", "GET", self._live_events),
            self._route("/ui/requests/{request_id:path}", "GET", self._live_request),  # TENANT/ID
            self._route("/ui/workers/{worker_id}/drain", "POST", self._live_command(AsyncClient.drain)),
            self._route("/ui/workers/{worker_id}/undrain", "POST", self._live_command(AsyncClient.undrain)),
            self._route("/ui/workers/{worker_id}/log", "GET", self._live_worker_log),
            self._route("/metrics", "GET", self._metrics_text),
            self._open_route("/health", self._answer_health),
            self._open_route("/ping", self._answer_health, "POST"),
            self._open_route("/openapi.json", self._openapi),
            self._open_route("/docs", self._page(docs_page)),
            self._open_route("/ui", self._page(page)),
            self._open_route("/", self._root),
        ]
        return application(routes)

    # --- endpoints

    def _generation(self, endpoint: Endpoint) -> Handler:
        make_call = _CALLS[endpoint]

        async def handle(scope: Any, receive: Any, send: Any, given: Headers, caller: Caller) -> int:
            self._check_gate(caller, None)
            self.bodies.check(given)
            with self._held.body(caller.share) as held:
                options, keep = http_input.options(given), None
                if endpoint == "responses" and self._stores is not None:
                    call, caller, keep = await self._stored_call(self._stores, receive, held, caller, options)
                else:
                    call, caller = await self.bodies.read(
                        receive, held, caller, lambda fields, model: make_call(fields, model, options)
                    )
                self.bodies.hold_answer(held, call.answer_bytes(caller.model))
                priority = call.options.get("priority") or 0
                self._check_gate(caller, priority)
                with self.gate.enter(caller.share, priority) as entered:
                    if self._owns_gate:
                        send.on_success = entered.accepted
                    try:
                        return await self._responder.respond(
                            endpoint, call, caller.client, caller.model, receive, send, keep
                        )
                    except InvalidRequest as error:
                        raise call.renamed(error) from None
                    except Overloaded as error:
                        if self._owns_gate and not isinstance(error, QuotaExceeded):
                            entered.rejected(error.retry_after_s)
                        raise

        return handle

    async def _stored_call(
        self, stores: Stores, receive: Any, held: HeldBody, caller: Caller, options: Options
    ) -> tuple[SdkCall, Caller, Keep | None]:
        fields, caller = await self.bodies.read(receive, held, caller, lambda fields, model: fields)
        turn, rest = turn_of(fields, caller, held.num_bytes, options.get("request_id"))
        if turn.conversation:
            options.setdefault("session_id", turn.conversation)
        history = await stores.history(turn, held.add)
        if turn.is_stored and (turn.is_required or "request_id" in options):
            await stores.responses.check_unused(turn, f"{RESPONSE_ID_PREFIX}{options.get('request_id', '')}")

        async def make(model: Model) -> SdkCall:
            work = partial(responses_call, rest, model, options, history=history, stored=turn.shown)
            return work() if held.num_bytes <= QUICK_BYTES else await self.bodies.in_thread(work)

        try:
            call = await make(caller.model)
        except UnknownModel:
            caller = await self._door.renewed(caller)
            call = await make(caller.model)
        return call, caller, stores.keep(turn)

    def _stored(
        self,
        work: Callable[[Stored], Awaitable[dict[str, Any]]],
        make_request: Callable[[Mapping[str, Any]], Any] | None = None,
    ) -> Handler:
        """`make_request`: from the body, where there is one."""

        async def handle(scope: Any, receive: Any, send: Any, given: Headers, caller: Caller) -> int:
            if self._stores is None:
                raise endpoints.nothing_stored(scope)
            with self._held.body(caller.share) as held:
                request = None
                if make_request is not None:
                    self.bodies.check(given)
                    request, caller = await self.bodies.read(
                        receive, held, caller, lambda fields, model: make_request(fields)
                    )
                call = Stored(self._stores, tenant_of(caller), scope, held.add, request)
                return await _send(send, 200, await work(call))

        return handle

    def _unary(
        self,
        make_request: Callable[[Mapping[str, Any], Model], AnyRequest],
        work: Callable[[AnyRequest, Caller], Awaitable[dict[str, Any]]],
        answer_bytes: Callable[[AnyRequest, int], int],
    ) -> Handler:
        async def handle(scope: Any, receive: Any, send: Any, given: Headers, caller: Caller) -> int:
            self.bodies.check(given)
            with self._held.body(caller.share) as held:
                request, caller = await self.bodies.read(receive, held, caller, make_request)
                self.bodies.hold_answer(held, answer_bytes(request, held.num_bytes), "body")
                return await _send(send, 200, await work(request, caller))

        return handle

    async def _models(self, scope: Any, receive: Any, send: Any, given: Headers, caller: Caller) -> int:
        caller = await self._door.renewed(caller)
        return await _send(send, 200, replies.models(caller.model, self._created_s))

    async def _sessions(self, scope: Any, receive: Any, send: Any, given: Headers, caller: Caller) -> int:
        return await _send(send, 200, await endpoints.sessions(caller.client, scope.get("query_string", b"")))

    async def _end_session(self, scope: Any, receive: Any, send: Any, given: Headers, caller: Caller) -> int:
        return await _send(send, 200, await endpoints.end_session(caller.client, scope["path_params"]["session_id"]))

    async def _model(self, scope: Any, receive: Any, send: Any, given: Headers, caller: Caller) -> int:
        model = (await self._door.renewed(caller)).model
        name = scope["path_params"]["name"]
        check_model(name, model)
        return await _send(send, 200, replies.model(name, model, self._created_s))

    def _adapter_command(
        self,
        make_request: Callable[[Mapping[str, Any], Model], AnyRequest],
        work: Callable[[AnyRequest, Caller], Awaitable[str]],
    ) -> Handler:
        async def handle(scope: Any, receive: Any, send: Any, given: Headers, caller: Caller) -> int:
            await caller.client.topology()  # raises PermissionDenied for the key of a tenant, before its body is read
            self.bodies.check(given)
            with self._held.body(caller.share) as held:
                request, caller = await self.bodies.read(receive, held, caller, make_request)
                try:
                    text = await work(request, caller)
                finally:
                    self._door.renew_all()
            await send_whole(send, 200, text.encode(), ((b"content-type", b"text/plain; charset=utf-8"),))
            return 200

        return handle

    async def _metrics_text(self, scope: Any, receive: Any, send: Any, given: Headers, caller: Caller) -> int:
        await caller.client.topology()  # raises PermissionDenied for the key of a tenant
        text = self._metrics.text().encode()
        await send_whole(send, 200, text, ((b"content-type", METRICS_TYPE),))
        return 200

    async def _version(self, scope: Any, receive: Any, send: Any, given: Headers, caller: Caller) -> int:
        return await _send(send, 200, {"version": FULL_VERSION})

    async def _load(self, scope: Any, receive: Any, send: Any, given: Headers, caller: Caller) -> int:
        await caller.client.topology()  # as for metrics
        return await _send(send, 200, {"server_load": self._runner.num_generating})

    async def _openapi(self, scope: Any, receive: Any, send: Any, given: Headers) -> int:
        await send_json(send, 200, openapi.body())
        return 200

    def _page(self, make: Callable[[], tuple[bytes, Mapping[str, str]]]) -> OpenHandler:
        """Needs no token: a page contains no data, and the viewer enters the token in it."""

        async def handle(scope: Any, receive: Any, send: Any, given: Headers) -> int:
            body, pairs = make()
            await send_whole(send, 200, body, ((name.encode(), value.encode()) for name, value in pairs.items()))
            return 200

        return handle

    async def _root(self, scope: Any, receive: Any, send: Any, given: Headers) -> int:
        await send_whole(send, 307, b"", ((b"location", b"/ui"),))
        return 307

    async def _answer_health(self, scope: Any, receive: Any, send: Any, given: Headers) -> int:
        """Needs no token, because load balancers have none."""
        if self._shutdown.is_draining:  # load balancers then send no more requests
            return await _send(send, 503, {"status": "shutting down"})
        is_serving = await self._health.is_serving()
        return await _send(send, 200 if is_serving else 503, {"status": "ok" if is_serving else "unavailable"})

    async def _live_events(self, scope: Any, receive: Any, send: Any, given: Headers, caller: Caller) -> int:
        if scope["method"] == "HEAD":
            return await endpoints.send_head(caller, send)
        return await endpoints.stream_frames(caller, receive, send)

    async def _live_request(self, scope: Any, receive: Any, send: Any, given: Headers, caller: Caller) -> int:
        found = await endpoints.explanation(caller.client, scope["path_params"]["request_id"])
        return await _send(send, 200, found)

    async def _live_worker_log(self, scope: Any, receive: Any, send: Any, given: Headers, caller: Caller) -> int:
        return await _send(send, 200, await endpoints.worker_log(caller.client, scope["path_params"]["worker_id"]))

    def _live_command(self, command: Callable[[AsyncClient, str], Awaitable[None]]) -> Handler:
        async def handle(scope: Any, receive: Any, send: Any, given: Headers, caller: Caller) -> int:
            endpoints.check_own(given)
            await command(caller.client, scope["path_params"]["worker_id"])
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return 204

        return handle

    # --- what they share

    async def close(self) -> None:
        """Ends what it runs on the event loop."""
        if self._owns_gate:
            self.gate.close()
        if self._stores is not None:
            await self._stores.close()

    def _check_gate(self, caller: Caller, priority: int | None) -> None:
        """Raises LoadShed. `priority` None: before the body was read."""
        if (error := self.gate.check(caller.share, priority)) is not None:
            self._metrics.add(metric_names.HTTP_SHED, cause=error.cause)
            raise error

    def shed(self, url: bytes, headers: Iterable[tuple[bytes, bytes]]) -> ErrorReply | None:
        """The answer to a request that the gate rejects, from its head alone; None: it is served as usual. Only callers
        that were admitted lately are rejected here, because an unknown token must be checked first."""
        path = _SHED_URLS.get(url.partition(b"?")[0])
        if path is None or self._shutdown.is_draining:
            return None
        given: dict[str, str] = {}
        for name, value in headers:
            if name in _TOKENS:
                given.setdefault(name.decode(), value.decode("latin-1"))  # the first counts, as in Starlette
        try:
            caller = self._door.known(http_input.token_of(given))
        except Unauthenticated:
            return None
        error = None if caller is None else self.gate.check(caller.share)
        if error is None:
            return None
        found = error_reply(path, error)
        self._metrics.add(metric_names.HTTP_SHED, cause=error.cause)
        self._metrics.add(metric_names.HTTP_REQUESTS, path=path, status=str(found.status))
        return found

    async def _admitted(self, scope: Any, given: Headers) -> Caller:
        caller = await self._door.admit(http_input.token_of(given))
        if (why := http_input.foreign(given, scope["scheme"])) and await self._door.is_open():
            expected = "call it by its address or as localhost, or give the cluster a token (PDSERVE_TOKEN)"
            raise PermissionDenied(f"{why}, and the cluster needs no token: {expected}")
        return caller

    def _route(self, path: str, method: str, handler: Handler) -> BaseRoute:
        """The handler runs only for callers that are admitted."""

        operation = OPERATIONS[method, path]
        assert not operation.is_open

        async def admit(scope: Any, receive: Any, send: Any, given: Headers) -> int:
            caller = await self._admitted(scope, given)
            is_control = operation.is_control and caller.share == OPERATOR
            with self._connections.connection(CONTROL if is_control else caller.share):
                return await handler(scope, receive, send, given, caller)

        return Route(path, self._runner.endpoint(path, admit), methods=[method])

    def _open_route(self, path: str, handler: OpenHandler, *more_methods: str) -> BaseRoute:
        methods = ["GET", *more_methods]
        assert all(OPERATIONS[one, path].is_open for one in methods)
        return Route(path, self._runner.endpoint(path, handler), methods=methods)


async def _send(send: Any, status: int, value: dict[str, Any]) -> int:
    await send_json(send, status, await encoded(value))
    return status
