"""ClusterService: the router's methods for operators and launchers, and the frames that it sends to live views."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, Final, final

import grpc
import grpc.aio

from pdserve.build import FULL_VERSION
from pdserve.config import MAX_ROUTERS
from pdserve.core.durations import check_duration
from pdserve.core.errors import NotFound, Overloaded, PdserveError, ShuttingDown, Unavailable
from pdserve.core.live import PERIOD_S
from pdserve.core.types import request_id_of
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc, worker_pb2
from pdserve.wire import status
from pdserve.wire.codec import Codec, Special
from pdserve.wire.protocol import FRAME, LOAD
from router.policy.interface import Candidate, Decision
from router.service.adapters import ClusterAdapters
from router.service.demand import OwnDemand, demand_response
from router.service.router_group import RouterGroup
from router.service.runtime import Runtime
from router.service.worker_reports import KvLinks, WorkerLogs
from router.state.cluster_state import WorkerFacts
from router.state.history import DecisionRecord, is_chosen
from router.state.interface import DrainRequested, Outcome, UndrainRequested
from router.state.state import RouterState

# --- live view ------------------------------------------------------------------------------------------------
# A slow viewer gets fewer frames, each with all requests that ended meanwhile.

SHORTEST_S: Final = 0.1
LONGEST_S: Final = 60.0
MAX_VIEWERS: Final = 8  # for each router, because a viewer costs it some milliseconds per second


@final
class Watching:
    def __init__(
        self,
        state: RouterState,
        group: RouterGroup,
        clock: Callable[[], float] = time.monotonic,
        *,
        incarnation: str = "",
    ) -> None:
        self._state, self._group, self._clock, self._incarnation = state, group, clock, incarnation
        self._num_viewers = {True: 0, False: 0}  # other routers, for their viewers; viewers
        self._closing = asyncio.Event()

    async def frames(
        self, period_s: float, *, only_this_router: bool = False
    ) -> AsyncGenerator[cluster_pb2.WatchResponse, None]:
        """The first one contains recently ended requests. Raises InvalidRequest, Overloaded, and ShuttingDown after
        `close`."""
        period_s = period_s or PERIOD_S
        check_duration("period_s", period_s, SHORTEST_S, LONGEST_S)
        most = MAX_VIEWERS * (MAX_ROUTERS if only_this_router else 1)
        if self._num_viewers[only_this_router] >= most:
            raise Overloaded(f"the router already has {most} viewers", LONGEST_S)
        self._num_viewers[only_this_router] += 1
        others = None if only_this_router else self._group.watch(period_s)
        try:
            if others is not None:
                await others.begin()
            num_seen = 0
            while not self._closing.is_set():
                frame = self._state.live_frame(self._clock(), num_seen)
                num_seen = self._state.num_ended
                response = cluster_pb2.WatchResponse(frame=FRAME.encode(frame))
                response.frame.version, response.frame.incarnation = FULL_VERSION, self._incarnation
                if others is not None:
                    others.merge_into(response.frame)
                yield response
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), period_s)
            raise ShuttingDown
        finally:
            self._num_viewers[only_this_router] -= 1
            if others is not None:
                await others.close()

    def close(self) -> None:
        self._closing.set()


# --- launcher -------------------------------------------------------------------------------------------------


@final
class LauncherLink:
    """Passes changes of the workers to the launcher of this router, at a socket that only their user can reach."""

    def __init__(self, socket: str, token: str) -> None:
        """`socket` empty: this router has no launcher."""
        self._socket = socket
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    async def change(
        self, request: cluster_pb2.ChangeWorkersRequest
    ) -> AsyncGenerator[cluster_pb2.ChangeWorkersResponse, None]:
        """The steps, until the cluster is ready. Raises the launcher's errors, and Unavailable."""
        async with self._channel() as channel:
            call = cluster_pb2_grpc.ClusterServiceStub(channel).ChangeWorkers(request, metadata=self._metadata)
            with status.reading(call):
                async for step in call:
                    yield step

    async def scaling(self, request: cluster_pb2.GetScalingRequest) -> cluster_pb2.GetScalingResponse:
        """Raises the launcher's errors, and Unavailable."""
        async with self._channel() as channel:
            stub = cluster_pb2_grpc.ClusterServiceStub(channel)
            try:
                response: cluster_pb2.GetScalingResponse = await stub.GetScaling(
                    request, metadata=self._metadata, timeout=LAUNCHER_S
                )
                return response
            except grpc.RpcError as error:
                raise status.from_rpc_error(error) from None

    def _channel(self) -> Any:
        if not self._socket:
            raise Unavailable("this router has no launcher; call one that `pdserve up` has started")
        return grpc.aio.insecure_channel(f"unix:{self._socket}", _OWN_SUBCHANNEL)


LAUNCHER_S: Final = 5.0  # of a question to it
_OWN_SUBCHANNEL: Final = (("grpc.use_local_subchannel_pool", 1),)  # a shared one would remember earlier failures


# --- service --------------------------------------------------------------------------------------------------

# `given`: dataclass fields that are not sent, or are sent in another form. `ignored`: message fields filled by hand.
_WORKER: Final = Codec(
    WorkerFacts,
    cluster_pb2.WorkerView,
    renamed={"report": "load"},
    nested=(LOAD,),
    given=(
        "is_usable",
        "silent_s",
        "booked_requests",
        "booked_blocks",
        "cost",
        "prefill_error",
        "decode_error",
        "kv_tokens",
        "max_batch",
        "max_batch_tokens",
    ),
    ignored=("kv_links",),
)
_EXPLANATION: Final = Codec(
    DecisionRecord,
    cluster_pb2.ExplainResponse,
    special={"outcome": Special(lambda outcome: outcome.value, Outcome)},
    given=("decision", "slo"),
    ignored=("decision", "reason", "candidates", "slo_ttft_s", "slo_tpot_s", "router_id"),
)


@final
class ClusterServicer(cluster_pb2_grpc.ClusterServiceServicer):
    def __init__(
        self,
        runtime: Runtime,
        watching: Watching,
        links: KvLinks,
        logs: WorkerLogs,
        adapters: ClusterAdapters,
        group: RouterGroup,
        launcher: LauncherLink,
        router_id: str,
        demand: OwnDemand,
    ) -> None:
        self._launcher = launcher
        self._demand = demand
        self._runtime, self._watching, self._links, self._logs = runtime, watching, links, logs
        self._adapters, self._group = adapters, group
        self._router_id = router_id
        self._started_s = time.monotonic()

    async def GetTopology(
        self, request: cluster_pb2.GetTopologyRequest, context: Any
    ) -> cluster_pb2.GetTopologyResponse:
        queued, running, answered = (0, 0, 0) if request.only_this_router else await self._group.counts()
        topology = self._runtime.state.snapshot()
        return cluster_pb2.GetTopologyResponse(
            router_id=self._router_id,
            workers=[_worker(one, self._links.of(one.worker_id)) for one in topology.workers],
            queued_requests=topology.queued + queued,
            running_requests=topology.running + running,
            uptime_s=time.monotonic() - self._started_s,
            version=FULL_VERSION,
            num_routers=1 + self._group.num_others,
            num_answered=1 + answered,
        )

    async def Explain(self, request: cluster_pb2.ExplainRequest, context: Any) -> cluster_pb2.ExplainResponse:
        asked = request.request_id
        found = self._runtime.state.explain(asked) or self._runtime.state.explain(request_id_of(asked))
        if found is not None:
            return explain_response(found, self._router_id)
        if not request.only_this_router:
            response, have_all_answered = await self._group.explain(asked)
            if response is not None:
                return response
            if not have_all_answered:
                message = f"this router does not know request {asked}, and another router does not answer"
                return await status.abort(context, Unavailable(message))
        return await status.abort(context, NotFound("recent request", asked))

    async def Drain(self, request: cluster_pb2.DrainRequest, context: Any) -> cluster_pb2.DrainResponse:
        await self._require(request.worker_id, context)
        self._runtime.submit(DrainRequested(worker_id=request.worker_id))
        return cluster_pb2.DrainResponse()

    async def Undrain(self, request: cluster_pb2.UndrainRequest, context: Any) -> cluster_pb2.UndrainResponse:
        await self._require(request.worker_id, context)
        self._runtime.submit(UndrainRequested(worker_id=request.worker_id))
        return cluster_pb2.UndrainResponse()

    async def Watch(self, request: cluster_pb2.WatchRequest, context: Any) -> AsyncIterator[cluster_pb2.WatchResponse]:
        try:
            watching = self._watching.frames(request.period_s, only_this_router=request.only_this_router)
            async with contextlib.aclosing(watching) as frames:
                async for frame in frames:
                    yield frame
        except PdserveError as error:
            await status.abort(context, error)

    async def GetWorkerLog(
        self, request: cluster_pb2.GetWorkerLogRequest, context: Any
    ) -> cluster_pb2.GetWorkerLogResponse:
        await self._require(request.worker_id, context)
        try:
            return cluster_pb2.GetWorkerLogResponse(lines=await self._logs.read(request.worker_id))
        except PdserveError as error:
            return await status.abort(context, error)

    async def LoadAdapter(
        self, request: cluster_pb2.LoadAdapterRequest, context: Any
    ) -> cluster_pb2.LoadAdapterResponse:
        try:
            fingerprint = await self._adapters.load(request.name, request.folder)
        except PdserveError as error:
            return await status.abort(context, error)
        return cluster_pb2.LoadAdapterResponse(fingerprint=fingerprint)

    async def UnloadAdapter(
        self, request: cluster_pb2.UnloadAdapterRequest, context: Any
    ) -> cluster_pb2.UnloadAdapterResponse:
        try:
            await self._adapters.unload(request.name)
        except PdserveError as error:
            return await status.abort(context, error)
        return cluster_pb2.UnloadAdapterResponse()

    async def ChangeWorkers(
        self, request: cluster_pb2.ChangeWorkersRequest, context: Any
    ) -> AsyncIterator[cluster_pb2.ChangeWorkersResponse]:
        try:
            async with contextlib.aclosing(self._launcher.change(request)) as steps:
                async for step in steps:
                    yield step
        except PdserveError as error:
            await status.abort(context, error)

    async def GetDemand(self, request: cluster_pb2.GetDemandRequest, context: Any) -> cluster_pb2.GetDemandResponse:
        return demand_response(self._demand.now())

    async def GetScaling(self, request: cluster_pb2.GetScalingRequest, context: Any) -> cluster_pb2.GetScalingResponse:
        try:
            return await self._launcher.scaling(request)
        except PdserveError as error:
            return await status.abort(context, error)

    async def _require(self, worker_id: str, context: Any) -> None:
        workers = self._runtime.state.snapshot().workers
        if not any(one.worker_id == worker_id and one.is_connected for one in workers):
            await status.abort(context, NotFound("worker", worker_id))


def explain_response(record: DecisionRecord, router_id: str) -> cluster_pb2.ExplainResponse:
    response = _EXPLANATION.encode(record)
    response.router_id = router_id
    response.slo_ttft_s, response.slo_tpot_s = record.slo.ttft_s, record.slo.tpot_s
    response.decision, response.reason = record.decision.choice.value, record.decision.reason
    response.candidates.extend(_candidate(one, record.decision) for one in record.decision.candidates)
    return response


def _worker(facts: WorkerFacts, links: Sequence[worker_pb2.KvLink]) -> cluster_pb2.WorkerView:
    view = _WORKER.encode(facts)
    view.kv_links.extend(links)
    return view


def _candidate(candidate: Candidate, decision: Decision) -> cluster_pb2.Candidate:
    pull, reads = candidate.pull, candidate.reads
    return cluster_pb2.Candidate(
        prefill_worker=candidate.prefill_worker,
        decode_worker=candidate.decode_worker,
        predicted_ttft_s=candidate.ttft_s,
        predicted_tpot_s=candidate.tpot_s,
        slack=candidate.slack if math.isfinite(candidate.slack) else None,
        is_feasible=candidate.is_feasible,
        is_chosen=is_chosen(candidate, decision),
        cost=candidate.cost if candidate.cost is not None and math.isfinite(candidate.cost) else None,
        preference=candidate.preference,
        pull=pull
        and cluster_pb2.PullChoice(
            source=pull.source,
            num_tokens=pull.num_tokens,
            pull_s=pull.pull_s,
            recompute_s=pull.recompute_s,
            is_pulled=pull.is_pulled,
            source_read_s=pull.source_read_s,
        ),
        reads=reads
        and cluster_pb2.ReadChoice(num_tokens=reads.num_tokens, read_s=reads.read_s, recompute_s=reads.recompute_s),
    )
