"""TransferService on a decode worker's gRPC server. Prefill workers call it first."""

from __future__ import annotations

from typing import Any, Final, cast

import grpc

from kvtransfer.gate import Gate
from pdserve.core.errors import ConfigError, Overloaded, PdserveError, Unauthenticated
from pdserve.v1 import transfer_pb2, transfer_pb2_grpc
from pdserve.wire.peers import proven_caller

STATUS: Final[dict[type[PdserveError], grpc.StatusCode]] = {
    ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
}


class TransferServicer(transfer_pb2_grpc.TransferServiceServicer):
    """For a grpc.aio server with a ProofInterceptor; add it with add_TransferServiceServicer_to_server."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def Open(self, request: transfer_pb2.OpenRequest, context: Any) -> transfer_pb2.OpenResponse:
        try:
            return self._gate.open(request, proven_caller(context))
        except (ConfigError, Overloaded, Unauthenticated) as error:
            return cast(transfer_pb2.OpenResponse, await context.abort(STATUS[type(error)], error.message))  # raises
