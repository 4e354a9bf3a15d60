"""Authorises calls. Every method of the router has a row; others are rejected.

A token is compared in constant time. Without a configured token the port is on the loopback (RouterConfig ensures
that), and every caller is allowed.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from typing import Any, Final

import grpc
import grpc.aio

from pdserve.core.errors import PdserveError, Unauthenticated
from pdserve.wire import status
from pdserve.wire.requests import unknown_method


class Access(Enum):
    OPEN = "open"  # everyone, because load balancers and kubelets have no token
    TOKEN = "token"  # callers with the token


POLICY: Final[Mapping[str, Access]] = {
    "/grpc.health.v1.Health/Check": Access.OPEN,
    "/grpc.health.v1.Health/Watch": Access.OPEN,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Access.TOKEN,
    "/pdserve.v1.InferenceService/Generate": Access.TOKEN,
    "/pdserve.v1.InferenceService/GetModel": Access.TOKEN,
    "/pdserve.v1.InferenceService/Tokenize": Access.TOKEN,
    "/pdserve.v1.InferenceService/Detokenize": Access.TOKEN,
    "/pdserve.v1.InferenceService/GetTokenBytes": Access.TOKEN,
    "/pdserve.v1.ClusterService/GetTopology": Access.TOKEN,
    "/pdserve.v1.ClusterService/Explain": Access.TOKEN,
    "/pdserve.v1.ClusterService/Drain": Access.TOKEN,
    "/pdserve.v1.ClusterService/Undrain": Access.TOKEN,
}
_SCHEME: Final = "bearer "


def access_error(method: str, metadata: Any, token: str) -> PdserveError | None:
    """Why a call is rejected; None if it is allowed."""
    access = POLICY.get(method)
    if access is None:
        return unknown_method(method)
    if access is Access.OPEN or not token:
        return None
    given = next((value for key, value in metadata or () if key == "authorization"), "")
    if not isinstance(given, str) or given[: len(_SCHEME)].lower() != _SCHEME:
        return Unauthenticated("no bearer token in the authorization metadata")
    if not hmac.compare_digest(given[len(_SCHEME) :].encode(), token.encode()):
        return Unauthenticated("the bearer token is not valid")
    return None


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc,type-arg]
    def __init__(self, token: str, on_rejected: Callable[[PdserveError], None] = lambda error: None) -> None:
        """`on_rejected` is called once for each call that is rejected, to count it."""
        self._token = token
        self._on_rejected = on_rejected

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        error = access_error(handler_call_details.method, handler_call_details.invocation_metadata, self._token)
        if error is None:
            return await continuation(handler_call_details)
        self._on_rejected(error)

        async def refuse(requests: Any, context: Any) -> None:
            await status.abort(context, error)

        # Suits every kind of call, because it reads nothing.
        return grpc.stream_stream_rpc_method_handler(refuse)
