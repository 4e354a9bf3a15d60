"""The secret of clusters that tests and benchmarks start without `pdserve up`, and proofs of it."""

from __future__ import annotations

import secrets
from typing import Any, Final

import grpc

from pdserve.config import SECRET_ENV
from pdserve.core.access.proof import NONCE_BYTES, CallChecker, ClusterSecret, Identity
from pdserve.core.errors import PdserveError, Unauthenticated
from pdserve.v1 import worker_pb2_grpc
from pdserve.wire import peers
from pdserve.wire.peers import OnRejected, ProofInterceptor

TEXT: Final = "only for tests and benchmarks"
SECRET: Final = ClusterSecret(TEXT)
ENVIRONMENT: Final = {SECRET_ENV: TEXT}
ROUTER: Final = Identity.of(SECRET, "router", "test-router", "1")


async def abort(context: Any, error: PdserveError) -> None:
    code = grpc.StatusCode.UNAUTHENTICATED if isinstance(error, Unauthenticated) else grpc.StatusCode.UNIMPLEMENTED
    await context.abort(code, error.message)


def proofs(on_rejected: OnRejected = lambda error: None) -> ProofInterceptor:
    return ProofInterceptor(abort, on_rejected)


def protect(server: Any, interceptor: ProofInterceptor, address: str) -> None:
    """Requires proofs on a grpc.aio server that was made with `interceptor`, as a worker does."""
    interceptor.serve(CallChecker(SECRET, address, lambda: secrets.token_bytes(NONCE_BYTES)), server)


async def attach(channel: Any, address: str, identity: Identity = ROUTER) -> Any:
    """A proven Attach stream to the worker at `address`, on a grpc.aio channel."""
    introduction = peers.introduce(identity, peers.ATTACH, address)
    stream = worker_pb2_grpc.WorkerServiceStub(channel).Attach(metadata=await peers.prove(channel, introduction))
    await peers.check_call(introduction, stream)
    return stream
