"""ClusterService: what operators ask of a router."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, final

from pdserve.core.errors import NotFound
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc, worker_pb2
from pdserve.wire import convert, status
from router import messages
from router.events import DrainRequested, UndrainRequested
from router.explaining import is_chosen
from router.links import KvLinks
from router.policy.interface import Candidate, Decision
from router.runtime import Runtime
from router.snapshot import WorkerFacts


@final
class ClusterServicer(cluster_pb2_grpc.ClusterServiceServicer):
    def __init__(self, runtime: Runtime, links: KvLinks, router_id: str) -> None:
        self._runtime, self._links = runtime, links
        self._router_id = router_id
        self._started_s = time.monotonic()

    async def GetTopology(
        self, request: cluster_pb2.GetTopologyRequest, context: Any
    ) -> cluster_pb2.GetTopologyResponse:
        topology = self._runtime.state.snapshot()
        return cluster_pb2.GetTopologyResponse(
            router_id=self._router_id,
            workers=[_worker(one, self._links.of(one.worker_id)) for one in topology.workers],
            queued_requests=topology.queued,
            running_requests=topology.running,
            uptime_s=time.monotonic() - self._started_s,
        )

    async def Explain(self, request: cluster_pb2.ExplainRequest, context: Any) -> cluster_pb2.ExplainResponse:
        found = self._runtime.state.explain(request.request_id)
        if found is None:
            return await status.abort(context, NotFound("recent request", request.request_id[:128]))
        decision = found.decision
        return cluster_pb2.ExplainResponse(
            request_id=found.request_id,
            candidates=[_candidate(one, decision) for one in decision.candidates],
            decision=decision.choice.value,
            reason=decision.reason,
            actual_ttft_s=found.actual_ttft_s,
            actual_tpot_s=found.actual_tpot_s,
            waited_s=found.waited_s,
            slo_ttft_s=found.slo.ttft_s,
            slo_tpot_s=found.slo.tpot_s,
            tenant=found.tenant,
            priority=found.priority,
            prompt_tokens=found.prompt_tokens,
            attempt=found.attempt,
            is_resumed=found.is_resumed,
            stage=found.stage,
            outcome=found.outcome.value if found.outcome is not None else "",
            ended_because=found.ended_because,
            retry_after_s=found.retry_after_s,
            router_id=self._router_id,
        )

    async def Drain(self, request: cluster_pb2.DrainRequest, context: Any) -> cluster_pb2.DrainResponse:
        await self._require(request.worker_id, context)
        self._runtime.hand(DrainRequested(worker_id=request.worker_id))
        return cluster_pb2.DrainResponse()

    async def Undrain(self, request: cluster_pb2.UndrainRequest, context: Any) -> cluster_pb2.UndrainResponse:
        await self._require(request.worker_id, context)
        self._runtime.hand(UndrainRequested(worker_id=request.worker_id))
        return cluster_pb2.UndrainResponse()

    async def _require(self, worker_id: str, context: Any) -> None:
        workers = self._runtime.state.snapshot().workers
        if not any(one.worker_id == worker_id and one.is_connected for one in workers):
            await status.abort(context, NotFound("worker", worker_id[:128]))


def _worker(facts: WorkerFacts, links: Sequence[worker_pb2.KvLink]) -> cluster_pb2.WorkerView:
    return cluster_pb2.WorkerView(
        kv_links=links,
        worker_id=facts.worker_id,
        incarnation=facts.incarnation,
        role=convert.role_to_proto(facts.role),
        endpoint=facts.endpoint,
        is_connected=facts.is_connected,
        is_draining=facts.is_draining,
        is_drained=facts.is_drained,
        load=messages.load_to_proto(facts.report),
        num_blocks=facts.num_blocks,
    )


def _candidate(candidate: Candidate, decision: Decision) -> cluster_pb2.Candidate:
    return cluster_pb2.Candidate(
        prefill_worker=candidate.prefill_worker,
        decode_worker=candidate.decode_worker,
        predicted_ttft_s=candidate.ttft_s,
        predicted_tpot_s=candidate.tpot_s,
        slack=candidate.slack if math.isfinite(candidate.slack) else None,
        is_feasible=candidate.is_feasible,
        is_chosen=is_chosen(candidate, decision),
    )
