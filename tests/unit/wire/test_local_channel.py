"""A local channel behaves as gRPC does: the same cases run over both, and clients and handlers see the same."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client.aio import AsyncClient
from pdserve.client.retries import Retries
from pdserve.client.sync import Client
from pdserve.core.access.key_file import KEY_RANDOM_BYTES, KeyFile, make_key, parse
from pdserve.core.errors import (
    InvalidRequest,
    NotFound,
    Overloaded,
    PdserveError,
    QuotaExceeded,
    ShuttingDown,
)
from pdserve.owned_folder import OwnedFolder
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from pdserve.wire import local_channel, status
from pdserve.wire.local_channel import MAX_AHEAD, MAX_BEGUN, LocalServer, LocalTransport
from pdserve.wire.peer_server import make_health_servicer
from pdserve.wire.requests import RequestCheck
from router.service.auth import AuthInterceptor, current_tenant

TOKEN = "operator-token-of-32-characters-"
KEY = make_key(bytes(KEY_RANDOM_BYTES))
MOST_BYTES = 4096
SOON_S = 60.0  # by which every condition holds; no test waits for it
NUM_MANY = 400
MANY_BYTES = 65_536  # of each of them: together more than a connection buffers
VARIABLE: ContextVar[str] = ContextVar("variable", default="unset")

Seen = list[Any]
Case = Callable[["Pair"], Awaitable[Seen]]


def message(text: str) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text=text, token_ids=[1]))


STARTED = inference_pb2.GenerateResponse(started=inference_pb2.Started(request_id="r", prompt_tokens=3, model="m"))
FINISHED = inference_pb2.GenerateResponse(
    finished=inference_pb2.Finished(reason=inference_pb2.FINISH_REASON_LENGTH, usage=inference_pb2.Usage())
)


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    """What Generate does is named by the request's prompt."""

    def __init__(self) -> None:
        self.seen: Seen = []
        self.ended = asyncio.Event()
        self.begun = asyncio.Event()
        self.num_written = 0

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        self.begun.set()
        try:
            await getattr(self, f"do_{request.text}")(request, context)
        except (asyncio.CancelledError, grpc.aio.InternalError):  # the second: of gRPC, while it writes
            self.seen.append("client left")
            raise asyncio.CancelledError from None
        finally:
            self.ended.set()

    async def do_stream(self, request: Any, context: Any) -> None:
        await context.write(STARTED)
        for text in "abc":
            await context.write(message(text))
        await context.write(FINISHED)

    async def do_facts(self, request: Any, context: Any) -> None:
        metadata = dict(context.invocation_metadata())
        self.seen += [metadata.get("authorization"), metadata.get("traceparent"), context.peer()]
        self.seen += [0.0 < context.time_remaining() < 6.0, current_tenant().name, VARIABLE.get()]
        VARIABLE.set("of the handler")
        await self.do_stream(request, context)

    async def do_refuse(self, request: Any, context: Any) -> None:
        status.end(context, Overloaded("too much", 2.5))

    async def do_refuse_late(self, request: Any, context: Any) -> None:
        await context.write(message("a"))
        status.end(context, QuotaExceeded("tokens", "used up", 7.0))

    async def do_abort(self, request: Any, context: Any) -> None:
        await status.abort(context, NotFound("thing", "x"))

    async def do_abort_late(self, request: Any, context: Any) -> None:
        await context.write(message("a"))
        await status.abort(context, InvalidRequest("field", "1", "2"))

    async def do_write_after_abort(self, request: Any, context: Any) -> None:
        with contextlib.suppress(grpc.aio.AbortError):
            await status.abort(context, NotFound("thing", "x"))
        try:
            await context.write(message("a"))
        except Exception as error:
            self.seen.append(isinstance(error, grpc.aio.BaseError | grpc.aio.AbortError))

    async def do_crash(self, request: Any, context: Any) -> None:
        raise ValueError("boom")

    async def do_crash_late(self, request: Any, context: Any) -> None:
        await context.write(message("a"))
        raise ValueError("boom")

    async def do_wrong_message(self, request: Any, context: Any) -> None:
        await context.write(request)

    async def do_wait(self, request: Any, context: Any) -> None:
        await context.write(message("a"))
        await asyncio.Event().wait()

    async def do_many(self, request: Any, context: Any) -> None:
        for _ in range(NUM_MANY):
            await context.write(message("x" * MANY_BYTES))
            self.num_written += 1

    async def GetModel(self, request: Any, context: Any) -> inference_pb2.GetModelResponse:
        self.seen.append(current_tenant().name)
        return inference_pb2.GetModelResponse(model="m", vocab_size=7, max_context_tokens=9)

    async def Tokenize(self, request: Any, context: Any) -> Any:
        if request.text == "none":
            return None
        if request.text == "crash":
            raise ValueError("boom")
        if request.text == "refuse":
            return await status.abort(context, Overloaded("too much", 2.5))
        if request.text == "code":
            context.set_code(grpc.StatusCode.ABORTED)
            context.set_details("discarded")
        if request.text == "wait":
            self.begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.ended.set()
        return inference_pb2.TokenizeResponse(token_ids=[len(request.text)])


class Cluster(cluster_pb2_grpc.ClusterServiceServicer):
    async def GetTopology(self, request: Any, context: Any) -> cluster_pb2.GetTopologyResponse:
        return cluster_pb2.GetTopologyResponse(router_id="r0")

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[cluster_pb2.WatchResponse]:
        for number in range(3):
            frame = cluster_pb2.WatchResponse()
            frame.frame.version = str(number)
            yield frame
        await status.abort(context, ShuttingDown())


class Pair:
    """One of the two: a server, its servicers and a channel to it."""

    def __init__(self, server: Any, address: str, transport: Any, inference: Inference) -> None:
        self.server, self.inference = server, inference
        self._address, self._transport = address, transport
        self.clients: list[AsyncClient] = []
        self.channel = self.client()._connection()

    def client(self, token: str | None = TOKEN, timeout_s: float = SOON_S, limit: int = 0) -> AsyncClient:
        retries = Retries(limit=limit, first_backoff_s=0.01)
        client = AsyncClient(
            self._address, token=token, transport=self._transport, timeout_s=timeout_s, retries=retries
        )
        self.clients.append(client)
        return client

    def generate(self, text: str, timeout_s: float | None = SOON_S, token: str = TOKEN, **fields: Any) -> Any:
        stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        request = inference_pb2.GenerateRequest(text=text, **fields)
        return stub.Generate(request, timeout=timeout_s, metadata=(("authorization", f"Bearer {token}"),))

    def tokenize(self, text: str, timeout_s: float | None = SOON_S) -> Any:
        stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        metadata = (("authorization", f"Bearer {TOKEN}"),)
        return stub.Tokenize(inference_pb2.TokenizeRequest(text=text), timeout=timeout_s, metadata=metadata)

    async def ended(self) -> None:
        async with asyncio.timeout(SOON_S):
            await self.inference.ended.wait()


def keys() -> KeyFile:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    return parse(json.dumps({"tenants": {"acme": {"keys": [{"sha256": digest}]}}}))


@contextlib.asynccontextmanager
async def pair(is_local: bool) -> AsyncIterator[Pair]:
    folder = OwnedFolder.for_socket("test", "s.sock")
    interceptors = (RequestCheck(status.abort), AuthInterceptor(TOKEN, keys))
    options = [("grpc.max_receive_message_length", MOST_BYTES)]
    server: Any = (
        LocalServer(interceptors, MOST_BYTES)
        if is_local
        else grpc.aio.server(interceptors=interceptors, options=options)
    )
    inference, health = Inference(), make_health_servicer()
    await health.set("pdserve.v1.InferenceService", health_pb2.HealthCheckResponse.SERVING)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server)
    cluster_pb2_grpc.add_ClusterServiceServicer_to_server(Cluster(), server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    address = f"unix:{folder.path / 's.sock'}"
    if not is_local:
        server.add_insecure_port(address)
        await server.start()
    made = Pair(server, address, LocalTransport(server) if is_local else None, inference)
    try:
        yield made
    finally:
        for client in made.clients:
            await client.close()
        await server.stop(0)
        folder.remove()


async def outcome(work: Awaitable[Any]) -> Any:
    """A value, or what an error is for its reader."""
    try:
        return await work
    except grpc.RpcError as error:
        found = status.from_rpc_error(error)
        return ["rpc", error.code(), error.details(), *told(found)]
    except PdserveError as error:
        return told(error)
    except asyncio.CancelledError:
        return "CancelledError"


def told(error: PdserveError) -> list[Any]:
    return [type(error).__name__, error.message, getattr(error, "retry_after_s", None), dict(vars(error))]


async def read_all(call: Any) -> Seen:
    seen: Seen = []
    while True:
        found = await outcome(call.read())
        seen.append(found)
        if found is grpc.aio.EOF:  # type: ignore[attr-defined]
            seen[-1] = "EOF"
        if not isinstance(found, inference_pb2.GenerateResponse):
            return seen


# --- cases ----------------------------------------------------------------------------------------------------


def read_of(text: str) -> Case:
    async def case(two: Pair) -> Seen:
        seen = await read_all(two.generate(text))
        await two.ended()
        return seen

    return case


async def unary(two: Pair) -> Seen:
    client = two.client()
    return [await client.tokenize("abcd"), (await client.model()).name, (await client.topology()).router_id]


async def unary_errors(two: Pair) -> Seen:
    return [await outcome(two.tokenize(text)) for text in ("crash", "refuse", "code")]


async def sdk_stream(two: Pair) -> Seen:
    async with two.client().stream("stream", traceparent=f"00-{'a' * 32}-{'b' * 16}-01") as stream:
        pieces = [piece.text async for piece in stream]
        return [pieces, stream.request_id, stream.prompt_tokens, stream.completion.text]


async def facts(two: Pair) -> Seen:
    VARIABLE.set("of the client")
    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    completion = await two.client().generate("facts", traceparent=traceparent, timeout_s=5.0)
    return [completion.text, VARIABLE.get()]


async def sdk_errors(two: Pair) -> Seen:
    client = two.client()
    return [await outcome(client.generate(text)) for text in ("refuse", "abort", "refuse_late", "crash")]


async def retries(two: Pair) -> Seen:
    """Each attempt sends the same message."""
    seen: Seen = []

    async def refuse_twice(request: Any, context: Any) -> None:
        seen.append(request.SerializeToString(deterministic=True))
        if len(seen) < 3:
            status.end(context, Overloaded("too much", 0.001))
        else:
            await two.inference.do_stream(request, context)

    two.inference.do_retry = refuse_twice  # type: ignore[attr-defined]
    completion = await two.client(limit=3).generate("retry", request_id="same", max_tokens=3)
    return [completion.text, len(seen), len(set(seen))]


async def auth(two: Pair) -> Seen:
    client = two.client()
    seen: Seen = [await outcome(client.with_token(token).model()) for token in (None, "x" * 20)]
    seen += [(await client.with_token(KEY).model()).name, await outcome(client.with_token(KEY).topology())]
    seen += [await client.with_token(None).is_serving(), await outcome(client.with_token(None).generate("stream"))]
    return seen


async def unknown_method(two: Pair) -> Seen:
    kind = inference_pb2.GetModelRequest
    seen: Seen = []
    for method in (
        "/pdserve.v1.InferenceService/Nothing",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ):
        for make in (two.channel.unary_unary, two.channel.unary_stream):
            begin = make(method, request_serializer=kind.SerializeToString, response_deserializer=kind.FromString)
            call = begin(kind(), metadata=(("authorization", f"Bearer {TOKEN}"),))
            seen.append(await outcome(call if make == two.channel.unary_unary else call.read()))
    return seen


async def too_large(two: Pair) -> Seen:
    big = "x" * (2 * MOST_BYTES)
    return [await outcome(two.client().tokenize(big)), await outcome(two.client(token=None).tokenize(big))]


async def deadline(two: Pair) -> Seen:
    """gRPC's text has two forms."""
    seen = await read_all(two.generate("wait", timeout_s=0.2))
    seen[-1][2] = seen[-1][2].removeprefix("Stream removed (").removesuffix(")")
    await two.ended()
    unary = await outcome(two.tokenize("wait", timeout_s=0.2))
    none_left = await outcome(two.tokenize("abc", timeout_s=-1.0))
    return [seen[-1], unary, none_left, await outcome(two.client().generate("wait", timeout_s=0.2))]


async def cancel_by_client(two: Pair) -> Seen:
    call = two.generate("wait")
    first = await call.read()
    seen: Seen = [first, call.cancel(), call.cancel(), await outcome(call.read()), call.cancelled()]
    await two.ended()
    return seen


async def cancel_of_reader(two: Pair) -> Seen:
    call = two.generate("wait")
    await call.read()
    reader = asyncio.create_task(call.read())
    await asyncio.sleep(0)
    reader.cancel()
    seen = [await outcome(reader), call.cancelled()]
    await two.ended()
    return seen


async def cancel_of_unary(two: Pair) -> Seen:
    waiting = asyncio.ensure_future(outcome(two.tokenize("wait")))
    async with asyncio.timeout(SOON_S):
        await two.inference.begun.wait()
    waiting.cancel()
    seen = [await waiting]
    await two.ended()
    return seen


async def cancel_while_writing(two: Pair) -> Seen:
    call = two.generate("many")
    await call.read()
    await settled(two)
    call.cancel()
    await two.ended()
    return [two.inference.num_written < NUM_MANY]


async def slow_reader(two: Pair) -> Seen:
    call = two.generate("many")
    await call.read()
    await settled(two)
    has_waited = two.inference.num_written < NUM_MANY
    return [has_waited, len(await read_all(call))]


async def settled(two: Pair) -> None:
    """Until the handler writes nothing more."""
    before = -1
    while two.inference.num_written != before:
        before = two.inference.num_written
        await asyncio.sleep(0.05)


async def cancel_after_end(two: Pair) -> Seen:
    call = two.generate("refuse")
    return [await read_all(call), call.cancel(), call.cancelled(), await read_all(call)]


async def watch(two: Pair) -> Seen:
    seen: Seen = []

    async def read() -> None:
        async for frame in two.client().watch():
            seen.append(frame.version)

    return [await outcome(read()), seen]


async def stop_of_server(two: Pair) -> Seen:
    call = two.generate("wait")
    await call.read()
    await two.server.stop(0.1)
    seen = [await outcome(call.read())]
    await two.ended()
    return seen


async def close_of_channel(two: Pair) -> Seen:
    call = two.generate("wait")
    await call.read()
    reader = asyncio.ensure_future(outcome(call.read()))
    await asyncio.sleep(0)
    await two.channel.close(None)
    seen = [await reader]
    await two.ended()
    with pytest.raises(grpc.aio.UsageError):
        two.generate("stream")
    return seen


NAMED = (
    "stream", "refuse", "refuse_late", "abort", "abort_late", "write_after_abort", "crash", "crash_late",
)  # fmt: skip
CASES: dict[str, Case] = {
    **{f"read {name}": read_of(name) for name in NAMED},
    **{
        one.__name__: one
        for one in (
            unary, unary_errors, sdk_stream, facts, sdk_errors, retries, auth, unknown_method, too_large, deadline,
            cancel_by_client, cancel_of_reader, cancel_of_unary, cancel_while_writing, slow_reader,
            cancel_after_end, watch, stop_of_server, close_of_channel,
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_like_grpc(name: str) -> None:
    async def run(*, is_local: bool) -> tuple[Seen, Seen]:
        async with asyncio.timeout(3 * SOON_S), pair(is_local) as two:
            return await CASES[name](two), two.inference.seen

    remote = asyncio.run(run(is_local=False))
    assert asyncio.run(run(is_local=True)) == remote


# --- the local channel alone ----------------------------------------------------------------------------------


def local(case: Case) -> Seen:
    async def run() -> Seen:
        async with asyncio.timeout(3 * SOON_S), pair(is_local=True) as two:
            return await case(two)

    return asyncio.run(run())


def test_a_dropped_call_ends() -> None:
    async def case(two: Pair) -> Seen:
        call = two.generate("wait")
        await call.read()
        del call
        await two.ended()
        return two.inference.seen

    assert local(case) == ["client left"]


def test_another_message_than_the_client_expects() -> None:
    """Over gRPC, the client could not parse it."""

    async def case(two: Pair) -> Seen:
        return [*await read_all(two.generate("wrong_message")), await outcome(two.tokenize("none"))]

    assert [[*one[:2], one[2].partition(":")[0]] for one in local(case)] == [
        ["rpc", grpc.StatusCode.UNKNOWN, "Unexpected <class 'TypeError'>"]
    ] * 2


def test_a_writer_is_never_far_ahead() -> None:
    async def case(two: Pair) -> Seen:
        call, inference, num_read, seen = two.generate("many"), two.inference, 0, []
        while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
            num_read += 1
            if num_read % 50 == 0:
                await asyncio.sleep(0.001)
            seen.append(inference.num_written - num_read <= MAX_AHEAD)
        return [num_read, all(seen)]

    assert local(case) == [NUM_MANY, True]


def test_a_waiting_reader_is_woken_by_its_message_alone() -> None:
    """Per message: one turn of the loop for the writer, one for the reader."""

    async def case(two: Pair) -> Seen:
        async def each_turn(request: Any, context: Any) -> None:
            for _ in range(10):
                await context.write(message("a"))
                await asyncio.sleep(0)

        two.inference.do_turns = each_turn  # type: ignore[attr-defined]
        call, turns = two.generate("turns"), 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        await call.read()
        counting = asyncio.create_task(count())
        for _ in range(9):
            await call.read()
        counting.cancel()
        return [turns <= 11]

    assert local(case) == [True]


def test_a_message_is_passed_by_reference() -> None:
    async def case(two: Pair) -> Seen:
        call = two.generate("stream")
        return [await call.read() is STARTED]

    assert local(case) == [True]


def test_a_blocking_client_is_rejected() -> None:
    with pytest.raises(TypeError, match="AsyncClient"):
        Client("localhost:1", transport=LocalTransport(LocalServer((), MOST_BYTES)))


async def test_a_call_inherits_the_variables_that_its_server_names_and_no_others():
    named: ContextVar[str] = ContextVar("named", default="unset")
    seen: list[str] = []

    class Servicer(inference_pb2_grpc.InferenceServiceServicer):
        async def Detokenize(self, request: Any, context: Any) -> Any:
            seen.extend((named.get(), VARIABLE.get()))
            return inference_pb2.DetokenizeResponse()

    server = LocalServer((), MOST_BYTES, inherited=(named,))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Servicer(), server)
    named.set("of the client")
    VARIABLE.set("of the client")
    async with AsyncClient("localhost:1", transport=LocalTransport(server)) as client:
        await client.detokenize([1])
    assert seen == ["of the client", "unset"]


class Order(inference_pb2_grpc.InferenceServiceServicer):
    """Which calls have begun. None of them ends by itself."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    async def Generate(self, request: Any, context: Any) -> None:
        self.begun.append(request.text)
        await asyncio.Event().wait()

    async def Tokenize(self, request: Any, context: Any) -> Any:
        self.begun.append(request.text)
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def ordered() -> AsyncIterator[tuple[Order, LocalServer, inference_pb2_grpc.InferenceServiceStub]]:
    order, server = Order(), LocalServer((), MOST_BYTES)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(order, server)
    yield order, server, inference_pb2_grpc.InferenceServiceStub(LocalTransport(server).open_aio(None))
    await server.stop(0)


async def turns_until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not holds():
            await asyncio.sleep(0)


def metadata_of(caller: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {caller}")] if caller else []


@pytest.mark.parametrize("callers", [("", ""), ("a", "b")], ids=["two tasks of a caller", "two callers"])
async def test_a_request_does_not_wait_for_all_prompts_of_others(callers: tuple[str, str]) -> None:
    async with ordered() as (order, _, stub):
        calls = []

        async def ask(text: str, num: int, caller: str) -> None:
            request = inference_pb2.GenerateRequest(text=text)
            calls.extend([stub.Generate(request, metadata=metadata_of(caller)) for _ in range(num)])

        for _ in range(3):
            await asyncio.create_task(ask("many", 128, callers[0]))
        before = len(order.begun)
        await asyncio.create_task(ask("one", 1, callers[1]))
        await turns_until(lambda: "one" in order.begun)
        assert len(order.begun) - before <= 4 * MAX_BEGUN
        await turns_until(lambda: len(order.begun) == len(calls))


async def test_each_caller_has_its_turn_however_many_tasks_another_has() -> None:
    async with ordered() as (order, _, stub):
        calls = []

        async def ask(caller: str) -> None:
            request = inference_pb2.GenerateRequest(text=caller)
            calls.append(stub.Generate(request, metadata=metadata_of(caller)))

        await asyncio.gather(*map(ask, ["a"] * 100 + ["b"] * 10))
        before = len(order.begun)
        await turns_until(lambda: order.begun.count("b") == 10)
        assert len(order.begun) - before <= 2 * 10 + 2 * MAX_BEGUN
        await turns_until(lambda: len(order.begun) == len(calls))


async def test_a_call_with_one_answer_begins_before_streams_and_does_not_stop_them() -> None:
    async with ordered() as (order, _, stub):
        stream, whole = inference_pb2.GenerateRequest(text="stream"), inference_pb2.TokenizeRequest(text="whole")
        calls = [stub.Generate(stream) for _ in range(10 * MAX_BEGUN)]
        calls += [stub.Tokenize(whole) for _ in range(3 * MAX_BEGUN)]
        await turns_until(lambda: len(order.begun) >= 3 * MAX_BEGUN)
        later = order.begun[MAX_BEGUN : 3 * MAX_BEGUN]
        assert later == (["whole"] * (MAX_BEGUN - 1) + ["stream"]) * 2
        await turns_until(lambda: len(order.begun) == len(calls))


async def test_the_end_of_a_server_does_not_wait_for_calls_that_have_not_begun() -> None:
    async with ordered() as (order, server, stub):
        calls = [stub.Generate(inference_pb2.GenerateRequest(text="x")) for _ in range(10 * MAX_BEGUN)]
        stopping = asyncio.create_task(server.stop(SOON_S))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await calls[-1].read()
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not stopping.done()
        for call in calls:
            call.cancel()
        await stopping
        assert len(order.begun) <= 2 * MAX_BEGUN  # of the turns before it
        assert not server._running


async def test_the_end_of_a_server_does_not_wait_for_a_handler_that_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_channel, "STOP_S", 0.01)
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    class Deaf(inference_pb2_grpc.InferenceServiceServicer):
        async def Generate(self, request: Any, context: Any) -> None:
            has_begun.set()
            while not may_end.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await may_end.wait()

    server = LocalServer((), MOST_BYTES)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Deaf(), server)
    channel = LocalTransport(server).open_aio(None)
    call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest())
    await has_begun.wait()
    async with asyncio.timeout(SOON_S):
        await server.stop(0)
    may_end.set()
    await turns_until(lambda: not server._running)
    assert call.cancel() is False
