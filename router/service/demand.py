"""The demand at a router: arrivals, waiting and running requests, and the workers' capacity. A router reports it, and
asks other routers for theirs, for the controller of the number of workers.

A launcher asks with `ask_demand`, and executes what its controller decides. Where something else starts the workers,
such as KEDA, the routers ask each other, and their Advisor publishes its decision as a metric.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, final

import grpc
import grpc.aio

from pdserve.client.connect import CONNECT_S, GrpcTransport, Target, Tls
from pdserve.client.connect import target as target_of
from pdserve.config import RouterConfig, bounds_of
from pdserve.core.access.hosts import check_endpoint, join
from pdserve.core.errors import PdserveError, Unavailable
from pdserve.core.types import Role
from pdserve.outage_log import OutageLog
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc
from pdserve.wire import status
from pdserve.wire.codec import Codec
from pdserve.wire.protocol import COST
from router.scaling.controller import Controller
from router.scaling.demand import ArrivalLog
from router.scaling.interface import Decision, Interval, ScalingSettings, Size
from router.scaling.observing import DemandHistory, RouterDemand, WorkerCapacity, observe
from router.state.cluster_state import WorkerFacts
from router.state.interface import Command, Event
from router.state.state import RouterState

log = logging.getLogger(__name__)

EVERY_S: Final = 5.0  # between two decisions
ASK_S: Final = 2.0  # for the answers of all routers
MOST_ROUTERS: Final = 256  # of a name's addresses
_SUMS: Final = Codec(Interval, cluster_pb2.ArrivalSums, given=("begin_s", "end_s"), is_lenient=True)
_CAPACITY: Final = Codec(WorkerCapacity, cluster_pb2.WorkerCapacity, nested=(COST,))
_DEMAND: Final = Codec(
    RouterDemand, cluster_pb2.GetDemandResponse, nested=(_CAPACITY,), given=("sums",), ignored=("sums",)
)


@final
class OwnDemand:
    """Of this router, since its start."""

    def __init__(self, state: RouterState, incarnation: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._state, self._incarnation, self._clock = state, incarnation, clock
        self._log = ArrivalLog()

    def handled(self, event: Event, commands: list[Command]) -> None:
        """Called with each event of the state, and the commands that followed."""
        self._log.handled(event, commands)

    def now(self) -> RouterDemand:
        answers, tokens = self._log.running_tokens()
        return RouterDemand(
            incarnation=self._incarnation,
            sums=self._log.so_far(self._clock()),
            queued=self._state.num_queued,
            running=self._state.num_running,
            answers=answers,
            answer_tokens=tokens,
            workers=tuple(map(_capacity, self._state.snapshot().workers)),
        )


def _capacity(facts: WorkerFacts) -> WorkerCapacity:
    return WorkerCapacity(
        worker_id=facts.worker_id,
        role=facts.role,
        is_connected=facts.is_connected,
        is_draining=facts.is_draining,
        is_drained=facts.is_drained,
        rows=facts.report.running,
        kv_tokens=facts.kv_tokens,
        max_batch=facts.max_batch,
        max_batch_tokens=facts.max_batch_tokens,
        cost=facts.cost,
    )


def demand_response(found: RouterDemand) -> cluster_pb2.GetDemandResponse:
    response = _DEMAND.encode(found)
    response.sums.CopyFrom(_SUMS.encode(found.sums))
    return response


def read_demand(response: cluster_pb2.GetDemandResponse) -> RouterDemand:
    """Raises InvalidRequest."""
    return _DEMAND.decode(response, sums=_SUMS.decode(response.sums, begin_s=0.0, end_s=0.0))


async def ask_demand(targets: Mapping[str, Target]) -> tuple[dict[str, RouterDemand], dict[str, PdserveError]]:
    """The answers of routers by their names, and the errors of those without one."""
    found = await asyncio.gather(*map(_ask, targets.values()), return_exceptions=True)
    answers, failures = {}, {}
    for name, one in zip(targets, found, strict=True):
        if isinstance(one, PdserveError):
            failures[name] = one
        elif isinstance(one, BaseException):
            raise one
        else:
            answers[name] = one
    return answers, failures


async def _ask(target: Target) -> RouterDemand:
    """On a new channel, because the certificates may have changed."""
    async with GrpcTransport().open_aio(target) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        try:
            request = cluster_pb2.GetDemandRequest()
            return read_demand(await stub.GetDemand(request, timeout=ASK_S, metadata=target.metadata()))
        except grpc.RpcError as error:
            raise status.from_rpc_error(error) from None


# --- advice ---------------------------------------------------------------------------------------------------

Ask = Callable[[], Awaitable[Mapping[str, RouterDemand]]]


async def ask_addresses(config: RouterConfig) -> dict[str, RouterDemand]:
    """Of each router at the addresses of `scaling_routers` that answers. Raises Unavailable if none does."""
    where = config.scaling_routers
    host, port = check_endpoint("scaling_routers", where, "pdserve:50051")
    try:
        async with asyncio.timeout(ASK_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError):
        raise Unavailable(f"{host} has no address") from None
    tls = None
    if config.tls_cert:
        name = config.tls_peer_name or host
        tls = Tls.from_files(ca=config.tls_ca or None, cert=config.tls_cert, key=config.tls_key, server_name=name)
    token = config.token or None
    targets = {
        address: target_of(address, tls=tls, token=token, connect_timeout_s=CONNECT_S, insecure=config.insecure)
        for address in sorted({join(str(one[4][0]), port) for one in found})[:MOST_ROUTERS]
    }
    answers, failures = await ask_demand(targets)
    if not answers:
        raise Unavailable(next(iter(failures.values())).message)
    return answers


@final
class Advisor:
    """`run` until it is cancelled. What it decides is carried out by another program, if at all, so it counts on no
    change before it sees it."""

    def __init__(self, config: RouterConfig, ask: Ask, tell: Callable[[Role, int], None]) -> None:
        low, high = bounds_of("scaling", config.scaling)
        start_s = config.scaling_start_s
        self._settings = ScalingSettings(
            min_workers=low, max_workers=high, start_s=start_s, change_role_s=start_s, drain_s=min(config.drain_s, 10.0)
        )
        self._ask, self._tell = ask, tell
        self._controller, self._history = Controller(self._settings), DemandHistory()
        self._outages = OutageLog(log, "no advice about the number of workers", "advice is given again")

    async def run(self) -> None:
        while True:
            try:
                await self.step(time.monotonic())
                self._outages.recovered()
            except Exception as error:  # also a mistake: the router serves without advice
                self._outages.failed(why=f"{type(error).__name__}: {error}")
            await asyncio.sleep(EVERY_S)

    async def step(self, now_s: float) -> None:
        """Raises Unavailable if no router answers."""
        answers = await self._ask()
        interval = self._history.interval(answers, now_s)
        if interval is None:
            return
        observed = observe(interval, answers.values())
        # In a thread: with many workers it computes for tenths of a second, in which this router's answers would wait.
        decision = await asyncio.to_thread(self._controller.decide, observed, now_s)
        if decision.changes:
            log.info("another number of workers would cost less", extra={"why": decision.reason})
        wanted = self._wanted(decision)
        self._tell(Role.PREFILL, wanted.prefill)
        self._tell(Role.DECODE, wanted.decode)

    def _wanted(self, decision: Decision) -> Size:
        """At least the lower bound, also while no worker is ready."""
        size = decision.wanted
        return size._replace(decode=max(size.decode, self._settings.min_workers - size.prefill, 1))
