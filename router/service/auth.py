"""Authorises calls before their messages are read. Every method of the router has a row in a table; a method without a
row is rejected.

Without a token and a key file, every caller is allowed; RouterConfig ensures that the port is then a loopback port. The
token belongs to the operator, and is valid for every method. With a key file, each key belongs to a tenant, and is
valid for the methods that serve requests. The token is compared in constant time, and keys are found by their hash.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from enum import Enum
from typing import Any, Final, final

import grpc
import grpc.aio

from pdserve.build import FULL_VERSION
from pdserve.core.access.key_file import DEFAULT_TENANT, KeyFile, Tenant, parse
from pdserve.core.errors import ConfigError, PdserveError, PermissionDenied, Unauthenticated, UnknownMethod
from pdserve.core.installation import MAX_CHARS, VERSION_KEY, is_compatible
from pdserve.key_file_access import FileVersion, read_bytes, version_of
from pdserve.wire import status
from router.service.tenants import Quotas

log = logging.getLogger(__name__)


class Access(Enum):
    OPEN = "open"  # everyone, because load balancers and kubelets have no token
    TOKEN = "token"  # callers with the token or a tenant's key
    OPERATOR = "operator"  # callers with the token; everyone if there are neither a token nor tenants


POLICY: Final[Mapping[str, Access]] = {
    "/grpc.health.v1.Health/Check": Access.OPEN,
    "/grpc.health.v1.Health/List": Access.OPEN,
    "/grpc.health.v1.Health/Watch": Access.OPEN,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Access.TOKEN,
    "/pdserve.v1.InferenceService/Generate": Access.TOKEN,
    "/pdserve.v1.InferenceService/GetModel": Access.TOKEN,
    "/pdserve.v1.InferenceService/Tokenize": Access.TOKEN,
    "/pdserve.v1.InferenceService/Detokenize": Access.TOKEN,
    "/pdserve.v1.InferenceService/GetTokenBytes": Access.TOKEN,
    "/pdserve.v1.InferenceService/ListSessions": Access.TOKEN,
    "/pdserve.v1.InferenceService/EndSession": Access.TOKEN,
    "/pdserve.v1.ClusterService/GetTopology": Access.OPERATOR,
    "/pdserve.v1.ClusterService/Explain": Access.OPERATOR,
    "/pdserve.v1.ClusterService/Drain": Access.OPERATOR,
    "/pdserve.v1.ClusterService/Undrain": Access.OPERATOR,
    "/pdserve.v1.ClusterService/Watch": Access.OPERATOR,
    "/pdserve.v1.ClusterService/GetWorkerLog": Access.OPERATOR,
    "/pdserve.v1.ClusterService/LoadAdapter": Access.OPERATOR,
    "/pdserve.v1.ClusterService/UnloadAdapter": Access.OPERATOR,
    "/pdserve.v1.ClusterService/ChangeWorkers": Access.OPERATOR,
    "/pdserve.v1.ClusterService/GetDemand": Access.OPERATOR,
    "/pdserve.v1.ClusterService/GetScaling": Access.OPERATOR,
    "/pdserve.v1.RouterGroupService/EndTenantSession": Access.OPERATOR,
    "/pdserve.v1.RouterGroupService/ListTenantSessions": Access.OPERATOR,
}
MAX_VERSIONS: Final = 64  # of clients, that are told apart
_SCHEME: Final = "bearer "
# It has no default, so a handler fails if its call was not authorised.
_authorise: ContextVar[Callable[[], Tenant]] = ContextVar("pdserve_authorise")


def current_tenant() -> Tenant:
    """The tenant whose call this task answers, by the current key file: a client may send its message long after its
    call began. Raises Unauthenticated if the key was removed in the meantime."""
    return _authorise.get()()


def authorised(method: str, metadata: Any, token: str, keys: KeyFile | None) -> Tenant:
    """The tenant of an allowed call. Raises UnknownMethod, Unauthenticated or PermissionDenied."""
    access = POLICY.get(method)
    if access is None:
        raise UnknownMethod(method)
    if access is Access.OPEN or (not token and keys is None):
        return DEFAULT_TENANT
    given = next((value for key, value in metadata or () if key == "authorization"), "")
    if not isinstance(given, str) or given[: len(_SCHEME)].lower() != _SCHEME:
        raise Unauthenticated("no bearer token in the authorization metadata")
    presented = given[len(_SCHEME) :]
    if token and hmac.compare_digest(presented.encode(), token.encode()):
        return DEFAULT_TENANT
    tenant = None if keys is None else keys.tenant_of(presented)
    if tenant is None:
        raise Unauthenticated("the bearer token is not valid")
    if access is Access.OPERATOR:
        raise PermissionDenied(f"{method[1:]} needs the operator's token (PDSERVE_TOKEN); got a key of a tenant")
    return tenant


@final
class ClientVersions:
    """Logs each version of clients that is not compatible once. Such a client is served: messages only gain fields."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, metadata: Any) -> None:
        version = next((str(value)[:MAX_CHARS] for key, value in metadata or () if key == VERSION_KEY), "")
        if version in self._seen or len(self._seen) >= MAX_VERSIONS:
            return
        self._seen.add(version)
        if not is_compatible(FULL_VERSION, version):
            extra = {"client_version": version, "router_version": FULL_VERSION}
            log.warning("a client has another version; fields that this router does not know are ignored", extra=extra)


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc,type-arg]
    def __init__(
        self,
        token: str,
        keys: Callable[[], KeyFile | None] = lambda: None,
        on_rejected: Callable[[PdserveError], None] = lambda error: None,
    ) -> None:
        """`keys` returns the current key file. `on_rejected` is called once for each rejected call."""
        self._token = token
        self._keys = keys
        self._on_rejected = on_rejected
        self._client_versions = ClientVersions()

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        details = handler_call_details

        def authorise() -> Tenant:
            return authorised(details.method, details.invocation_metadata, self._token, self._keys())

        try:
            authorise()
        except PdserveError as error:
            return self._refusal(error)
        if POLICY[details.method] is not Access.OPEN:  # without a token, anyone could use up the limit
            self._client_versions.note(details.invocation_metadata)
        _authorise.set(authorise)  # never reset: gRPC runs each call in its own task, whose context ends with it
        return await continuation(details)

    def _refusal(self, error: PdserveError) -> Any:
        self._on_rejected(error)

        async def refuse(requests: Any, context: Any) -> None:
            await status.abort(context, error)

        # One handler for every kind of call, because it reads no message.
        return grpc.stream_stream_rpc_method_handler(refuse)


# --- key file -------------------------------------------------------------------------------------------------
# It is read again when it changes. If the new version is invalid, the old one stays valid.

CHECK_EVERY_S: Final = 0.5


@final
class Tenants:
    def __init__(self, path: str, quotas: Quotas | None = None) -> None:
        """Without a path there is only the default tenant. Raises ConfigError if the file is invalid."""
        self._path = path
        self.quotas = quotas or Quotas()
        self.file: KeyFile | None = None
        self._tried: FileVersion | None = None  # version of the last file that was read, valid or not
        self._error = ""  # error of the last read
        if path:
            data, self._tried = read_bytes(path)
            self.file = parse(data)

    async def watch(self) -> None:
        while self._path:
            await asyncio.sleep(CHECK_EVERY_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Reads the file again if it has changed. Reads in a thread, because a large file takes a while."""
        version = await asyncio.to_thread(version_of, self._path)
        if version is not None and version == self._tried:
            return
        try:
            # A file that cannot be opened is tried again: the reason may be this process, such as too many open files.
            data, self._tried = await asyncio.to_thread(read_bytes, self._path)
            file = await asyncio.to_thread(parse, data)
        except ConfigError as error:
            if error.message != self._error:
                self._error = error.message
                log.error("the key file is invalid; the old one stays valid", extra={"why": error.message})
            return
        self.file, self._error = file, ""
        self.quotas.forget_all_but(file.tenants)
        log.info("the key file was read", extra={"tenants": len(file.tenants), "keys": len(file.keys)})
