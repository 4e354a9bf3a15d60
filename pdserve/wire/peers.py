"""Proofs of the cluster's secret on gRPC: the checks of a worker's server, and the calls of its clients.

pdserve/core/access/proof.py defines the contents of a proof. A method without a row in POLICY is rejected.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import secrets
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Literal, final

import grpc
import grpc.aio

from pdserve.core.access.proof import (
    NONCE_BYTES,
    CallChecker,
    CallProof,
    Identity,
    Introduction,
    Role,
    canonical_address,
)
from pdserve.core.errors import PdserveError, Unauthenticated, UnknownMethod
from pdserve.v1 import peer_pb2, peer_pb2_grpc
from pdserve.wire.requests import Abort

PROOF_KEY: Final = "pdserve-proof-bin"
ANSWER_KEY: Final = "pdserve-answer-bin"
MAX_PROOF_BYTES: Final = 2048
STATUS_S: Final = 1.0  # time in which a rejected call can report the reason

ATTACH: Final = "/pdserve.v1.WorkerService/Attach"
CHANGE_ROLE: Final = "/pdserve.v1.WorkerService/ChangeRole"
OPEN: Final = "/pdserve.v1.TransferService/Open"
PULL: Final = "/pdserve.v1.TransferService/Pull"
FOLLOW: Final = "/pdserve.v1.RankService/Follow"
JOIN: Final = "/pdserve.v1.RendezvousService/Join"
REACH_STORE: Final = "/pdserve.v1.RendezvousService/ReachStore"
ANYONE: Final = "anyone"
POLICY: Final[Mapping[str, Role | Literal["anyone"]]] = {
    "/grpc.health.v1.Health/Check": ANYONE,
    "/grpc.health.v1.Health/List": ANYONE,
    "/grpc.health.v1.Health/Watch": ANYONE,
    "/pdserve.v1.PeerService/GetChallenge": ANYONE,
    ATTACH: "router",
    CHANGE_ROLE: "launcher",
    OPEN: "worker",
    PULL: "worker",
    FOLLOW: "leader",
    JOIN: "rank",
    REACH_STORE: "rank",
}
OnRejected = Callable[[PdserveError], None]  # to count it


# --- the worker's side ------------------------------------------------------------------------------------------


@final
class ProofInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc,type-arg]
    """Checks a call before any message of it is read. Rejects every call until `checker` is set."""

    def __init__(self, abort: Abort, on_rejected: OnRejected = lambda error: None) -> None:
        self.checker: CallChecker | None = None
        self._abort, self._on_rejected = abort, on_rejected

    def serve(self, checker: CallChecker, server: Any) -> None:
        """Accepts proven calls, and tells callers what to prove. Call it before the server starts."""
        self.checker = checker
        peer_pb2_grpc.add_PeerServiceServicer_to_server(_PeerServicer(checker, self._abort, self._on_rejected), server)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        method = handler_call_details.method
        access = POLICY.get(method)
        if access is None:
            return self._rejecting(UnknownMethod(method))
        if access == "anyone":
            return await continuation(handler_call_details)
        try:
            if self.checker is None:
                raise Unauthenticated("the worker is still starting")
            answer = self.checker.check(method, access, read_proof(handler_call_details.invocation_metadata))
        except Unauthenticated as error:
            return self._rejecting(error)
        return _answering(await continuation(handler_call_details), answer)

    def _rejecting(self, error: PdserveError) -> Any:
        self._on_rejected(error)

        async def reject(requests: Any, context: Any) -> None:
            await self._abort(context, error)

        return grpc.stream_stream_rpc_method_handler(reject)  # suits every kind of call, because it reads nothing


@final
class _PeerServicer(peer_pb2_grpc.PeerServiceServicer):
    def __init__(self, checker: CallChecker, abort: Abort, on_rejected: OnRejected) -> None:
        self._checker, self._abort, self._on_rejected = checker, abort, on_rejected

    async def GetChallenge(self, request: peer_pb2.GetChallengeRequest, context: Any) -> peer_pb2.GetChallengeResponse:
        try:
            challenge, mac = self._checker.greet(request.target, request.nonce)
        except Unauthenticated as error:
            self._on_rejected(error)
            await self._abort(context, error)
        return peer_pb2.GetChallengeResponse(challenge=challenge, mac=mac)


def read_proof(metadata: Any) -> CallProof | None:
    """The proof in a call's metadata; None if there is no valid one."""
    data = next((value for key, value in metadata or () if key == PROOF_KEY), None)
    if not isinstance(data, bytes) or len(data) > MAX_PROOF_BYTES:
        return None
    message = peer_pb2.CallProof()
    try:
        message.ParseFromString(data)
    except Exception:  # the C and Python parsers raise different classes; either way there is no proof
        return None
    return CallProof(
        role=message.role,
        caller=message.caller,
        target=message.target,
        challenge=message.challenge,
        nonce=message.nonce,
        mac=message.mac,
    )


def proven_caller(context: Any) -> str:
    """The caller's name by its proof, which the interceptor has checked; empty without a proof."""
    proof = read_proof(context.invocation_metadata())
    return "" if proof is None else proof.caller


def _answering(handler: Any, answer: bytes) -> Any:
    """Wraps the handler so that it first sends the worker's proof."""
    if handler is None:
        return None
    inner = handler.stream_stream if handler.request_streaming else handler.unary_unary
    make = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
    assert inspect.iscoroutinefunction(inner), "a method with a proof is a coroutine: both streams, or neither"

    async def serve(request: Any, context: Any) -> Any:
        await context.send_initial_metadata(((ANSWER_KEY, answer),))
        return await inner(request, context)

    return make(
        serve, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
    )


# --- the caller's side ------------------------------------------------------------------------------------------


def introduce(identity: Identity, method: str, address: str) -> Introduction:
    """Connect only to `target` of the result."""
    return Introduction(identity, method, canonical_address(address), secrets.token_bytes(NONCE_BYTES))


async def prove(channel: Any, introduction: Introduction) -> tuple[tuple[str, bytes], ...]:
    """The metadata of the call, over a grpc.aio channel. Raises Unauthenticated if the callee has no valid proof, and
    grpc.RpcError."""
    answer = await peer_pb2_grpc.PeerServiceStub(channel).GetChallenge(_request(introduction))
    return _metadata(introduction, answer)


def prove_blocking(
    channel: Any, introduction: Introduction, timeout_s: float, wait: Callable[[Any], Any] | None = None
) -> tuple[tuple[str, bytes], ...]:
    """`prove` over a blocking channel. `wait` returns the answer of the started call; it may be cancelled meanwhile."""
    method, request = peer_pb2_grpc.PeerServiceStub(channel).GetChallenge, _request(introduction)
    if wait is None:
        return _metadata(introduction, method(request, timeout=timeout_s))
    return _metadata(introduction, wait(method.future(request, timeout=timeout_s)))


async def check_call(introduction: Introduction, call: Any) -> None:
    """`check_answer` for a started call of grpc.aio. If the callee rejects the call, its error contains the reason."""
    try:
        check_answer(introduction, await call.initial_metadata())
    except Unauthenticated as error:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STATUS_S):
                if await call.code() is grpc.StatusCode.UNAUTHENTICATED:
                    raise Unauthenticated(str(await call.details())) from error
        raise


def check_call_blocking(introduction: Introduction, call: Any, timeout_s: float) -> None:
    """`check_call` over a blocking channel; a callee that is silent for `timeout_s` is not authenticated."""
    late = threading.Timer(timeout_s, call.cancel)
    late.start()
    try:
        check_answer(introduction, call.initial_metadata())
    except Unauthenticated as error:
        has_ended = threading.Event()
        if call.add_callback(has_ended.set) and not has_ended.wait(STATUS_S):
            raise
        if call.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise Unauthenticated(call.details()) from error
        if call.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise call from error
        raise
    finally:
        late.cancel()


def check_answer(introduction: Introduction, initial_metadata: Any) -> None:
    """Raises Unauthenticated unless the callee is authenticated. Call it before the first message is sent."""
    mac = next((value for key, value in initial_metadata or () if key == ANSWER_KEY), b"")
    introduction.answered(mac if isinstance(mac, bytes) else b"")


def _request(introduction: Introduction) -> peer_pb2.GetChallengeRequest:
    return peer_pb2.GetChallengeRequest(target=introduction.target, nonce=introduction.nonce)


def _metadata(introduction: Introduction, answer: peer_pb2.GetChallengeResponse) -> tuple[tuple[str, bytes], ...]:
    proof = introduction.greeted(answer.challenge, answer.mac)
    message = peer_pb2.CallProof(
        role=proof.role,
        caller=proof.caller,
        target=proof.target,
        challenge=proof.challenge,
        nonce=proof.nonce,
        mac=proof.mac,
    )
    return ((PROOF_KEY, message.SerializeToString()),)
