"""The launcher's server for changes of its cluster, which routers call for operators.

A router passes the call to a unix socket in a folder that only this user can enter. One change is made at a time. It
goes on if its caller leaves, and ends with the launcher.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, final

import grpc.aio

from pdserve.core.errors import (
    ChangeFailed,
    ConfigError,
    InternalError,
    InvalidRequest,
    PdserveError,
    Unauthenticated,
    Unavailable,
)
from pdserve.core.types import Role
from pdserve.launch.changes.plans import why_failed
from pdserve.launch.child import StartFailed
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc
from pdserve.wire import status
from pdserve.wire.convert import role_from_proto

if TYPE_CHECKING:
    from pdserve.launch.changes.autoscale import Autoscaler

log = logging.getLogger(__name__)

Say = Callable[[str, str], None]  # (worker or empty, text)


class Changeable(Protocol):
    """A cluster whose workers can change. Its methods raise PdserveError."""

    @property
    def autoscaler(self) -> Autoscaler | None: ...

    async def scale(self, prefill: int | None, decode: int | None, say: Say) -> None: ...

    async def set_role(self, worker_id: str, role: Role, say: Say) -> None: ...

    async def roll(
        self, worker_ids: Sequence[str], surge: int, settings: str, model: str, *, is_undo: bool, say: Say
    ) -> None: ...

    def say(self, name: str, text: str) -> None: ...


GRACE_S: Final = 0.5  # for the last answers
UNLINK_S, UNLINK_TRIES = 0.01, 100
Steps = asyncio.Queue[cluster_pb2.ChangeWorkersResponse | None]


@final
class ChangeServer(cluster_pb2_grpc.ClusterServiceServicer):
    """Serves ChangeWorkers and GetScaling on a unix socket. `start`, then `close`."""

    def __init__(self, cluster: Changeable, socket: Path, token: str) -> None:
        self._cluster, self._socket, self._token = cluster, socket, token
        self._server: Any = None
        self._task: asyncio.Task[None] | None = None
        self._what = ""
        self.is_ready = False  # the cluster has started

    async def start(self) -> None:
        self._socket.unlink(missing_ok=True)  # of a launcher that was killed
        self._server = grpc.aio.server()
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(self, self._server)
        if not self._server.add_insecure_port(f"unix:{self._socket}"):
            raise ConfigError("launcher_socket", self._socket, "a path of at most 107 bytes")
        self._socket.chmod(0o600)
        await self._server.start()

    async def close(self) -> None:
        """Ends the change that runs. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(GRACE_S)
            self._server = None
            for _ in range(
                UNLINK_TRIES
            ):  # gRPC removes the file a little later, and could meet that of another launcher
                if not self._socket.exists():
                    break
                await asyncio.sleep(UNLINK_S)

    async def ChangeWorkers(
        self, request: cluster_pb2.ChangeWorkersRequest, context: Any
    ) -> AsyncIterator[cluster_pb2.ChangeWorkersResponse]:
        steps: Steps = asyncio.Queue()
        try:
            self._check(context.invocation_metadata())
            change = self._change(request, lambda name, text: self._say(steps, name, text))
            task = self.begin(request.WhichOneof("change") or "", change, steps)
            while (step := await steps.get()) is not None:
                yield step
            await task  # it has ended
        except PdserveError as error:
            await status.abort(context, error)

    async def GetScaling(self, request: cluster_pb2.GetScalingRequest, context: Any) -> cluster_pb2.GetScalingResponse:
        try:
            self._check(context.invocation_metadata())
            if (autoscaler := self._cluster.autoscaler) is None:
                raise Unavailable(
                    "nothing decides about the number of workers; `up --autoscale` or `--roles auto` does"
                )
            return autoscaler.explain(request.limit)
        except PdserveError as error:
            return await status.abort(context, error)

    @property
    def running(self) -> str:
        """What the change is that is made now; empty while there is none."""
        return "" if self._task is None or self._task.done() else self._what

    def begin(
        self, what: str, change: Callable[[], Coroutine[Any, Any, None]], steps: Steps | None = None
    ) -> asyncio.Task[None]:
        """None is put into `steps` at its end. Raises Unavailable while another change is made."""
        if running := self.running:
            raise Unavailable(f"the launcher makes another change ({running}); try again when it has ended")
        self._what = what
        self._task = task = asyncio.create_task(self._run(change, steps), name="change")
        task.add_done_callback(_observe)
        return task

    def _check(self, metadata: Any) -> None:
        given = next((str(value) for key, value in metadata or () if key == "authorization"), "")
        if self._token and not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise Unauthenticated("the launcher needs the operator's token")
        if not self.is_ready:
            raise Unavailable("the cluster is still starting", 1.0)

    def _change(self, request: cluster_pb2.ChangeWorkersRequest, say: Say) -> Callable[[], Coroutine[Any, Any, None]]:
        """Raises InvalidRequest."""
        cluster = self._cluster
        match request.WhichOneof("change"):
            case "scale":
                scale = request.scale
                prefill = scale.prefill if scale.HasField("prefill") else None
                decode = scale.decode if scale.HasField("decode") else None
                return lambda: cluster.scale(prefill, decode, say)
            case "roll":
                roll = request.roll
                names = list(dict.fromkeys(roll.worker_ids))
                return lambda: cluster.roll(names, roll.surge, roll.settings, roll.model, is_undo=roll.is_undo, say=say)
            case "role":
                role = role_from_proto(request.role.role)
                return lambda: cluster.set_role(request.role.worker_id, role, say)
        raise InvalidRequest("change", "nothing", "scale, roll or role")

    async def _run(self, change: Callable[[], Coroutine[Any, Any, None]], steps: Steps | None) -> None:
        try:
            await change()
        except PdserveError as error:
            self._cluster.say("launcher", f"{self._what}: {error.message}")
            if isinstance(error, StartFailed):  # which is for the operator of `up`
                raise ChangeFailed(error.message) from None
            raise
        except asyncio.CancelledError:
            raise Unavailable("the launcher ends") from None
        except Exception as error:
            log.exception("a change failed")
            raise InternalError(f"the change failed: {why_failed(error)}") from error
        finally:
            if steps is not None:
                steps.put_nowait(None)

    def _say(self, steps: Steps, worker_id: str, text: str) -> None:
        self._cluster.say(worker_id or "launcher", text)
        steps.put_nowait(cluster_pb2.ChangeWorkersResponse(worker_id=worker_id, text=text))


def _observe(task: asyncio.Task[None]) -> None:
    """Its error is told by `_run`, also if the caller has left."""
    if not task.cancelled():
        task.exception()
