"""The KV endpoint of a follower rank: executes the leader's orders on the rank's pool, and reports to the leader.

    gRPC thread                      orders thread                        transfer threads
    Follow: orders in, one by one -> expect, start, push, give up ->      sender or receiver over this rank's pool
            reports out           <- opened, expected         <-          ended

A process has one leader. If the stream ends, so does the endpoint.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, final

import grpc
import grpc.aio

from kvtransfer.faults.injector import FaultInjector, make_fault_injector
from kvtransfer.link.endpoint import config_of, make_receiver, make_sender
from kvtransfer.link.receiver import PlainReceiver
from kvtransfer.protocol.grants import grant_from_proto
from kvtransfer.protocol.transport import Received, ReceiveOutcome, SendOutcome, Sent
from kvtransfer.ranks.rank_link import MAX_MESSAGE_BYTES
from kvtransfer.ranks.rank_messages import (
    KEY,
    ended_report,
    read_expect,
    read_push,
    read_text,
)
from kvtransfer.reshape.sender import ShapedSender
from pdserve.config import WorkerConfig
from pdserve.core.access.proof import NONCE_BYTES, CallChecker, ClusterSecret, caller_name
from pdserve.core.errors import PdserveError
from pdserve.core.kv.kv_shape import TransferKey
from pdserve.core.kv.stamps import BlockStamps
from pdserve.engine.interface import EngineSpec, KvPool
from pdserve.loop_thread import LoopThread
from pdserve.outage_log import LogLimit
from pdserve.tls.certificates import ReloadingCertificates, certificates_of
from pdserve.v1 import rank_pb2, rank_pb2_grpc
from pdserve.v1.transfer_pb2_grpc import add_TransferServiceServicer_to_server
from pdserve.wire.peer_server import listen, make_peer_server, server_options
from pdserve.wire.peers import proven_caller

log = logging.getLogger(__name__)

EOF: Final[object] = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in its stubs
MAX_CONNECTIONS: Final = 256  # connections of prefill workers' ranks, and the leader's
IDLE_S: Final = 120.0
OPTIONS: Final = server_options(max_message_bytes=MAX_MESSAGE_BYTES, max_connections=MAX_CONNECTIONS, idle_s=IDLE_S)
OPEN_S: Final = 10.0  # until the first order after the leader has connected
_JOIN_S: Final = 5.0
_REASSIGNED: Final = "a source block was reassigned before this rank was ordered to send it"

ReportFollow = Callable[[rank_pb2.FollowResponse], None]


@final
class Endpoint:
    """A rank's sender or receiver, driven by orders. Methods are called on one thread; `report` from any."""

    def __init__(
        self,
        pool: KvPool,
        spec: EngineSpec,
        stamps: BlockStamps,
        config: WorkerConfig,
        incarnation: str,
        fault_injector: FaultInjector | None = None,
        tls: ReloadingCertificates | None = None,
    ) -> None:
        self._tls = tls
        self._pool, self._spec, self._stamps, self._config = pool, spec, stamps, config
        self._fault_injector = fault_injector
        self._incarnation = incarnation
        self.report: ReportFollow = lambda report: None
        self.receiver: PlainReceiver | None = None
        self._sender: ShapedSender | None = None

    def open(self, *, is_sender: bool) -> None:
        """Raises ConfigError."""
        config = config_of(
            self._config, self._spec, self._pool, self._incarnation, self._stamps, self._tls, self._fault_injector
        )
        if is_sender:
            self._sender = make_sender(config, self._config.kv_wire)
        else:
            self.receiver = make_receiver(config, self._config.host)

    def execute(self, order: rank_pb2.FollowRequest) -> None:
        """Raises InvalidRequest on an invalid order."""
        match order.WhichOneof("order"):
            case "expect" if self.receiver is not None:
                self._expect(self.receiver, order.expect)
            case "start" if self._sender is not None:
                self._start(self._sender, order.start)
            case "push" if self._sender is not None:
                self._push(self._sender, order.push)
            case "give_up" if (end := self.receiver or self._sender) is not None:
                key, error = KEY.decode(order.give_up.key), order.give_up.error
                if error:
                    end.fail(key, error)
                else:
                    end.abort(key)
            case other:
                log.error("an order for another kind of rank", extra={"order": other})

    def close(self) -> None:
        """Ends every transfer, each with a report."""
        for end in (self.receiver, self._sender):
            if end is not None:
                end.close()

    def _expect(self, receiver: PlainReceiver, order: rank_pb2.ExpectTransfer) -> None:
        try:
            grant, content_hashes = read_expect(order, self._pool.num_blocks)
            for block, epoch in zip(grant.blocks, order.epochs, strict=True):
                self._stamps.reach(block, epoch)
            receiver.expect(
                grant, self._ended, order.deadline_s if order.HasField("deadline_s") else None, content_hashes
            )
        except PdserveError as error:
            key = TransferKey(
                transfer_id=order.grant.transfer_id, attempt=order.grant.attempt, generation=order.grant.generation
            )
            self._ended(Received(key=key, outcome=ReceiveOutcome.FAILED, error=error.message))
            return
        expected = rank_pb2.TransferExpected(key=KEY.encode(grant.key))
        self.report(rank_pb2.FollowResponse(expected=expected))

    def _start(self, sender: ShapedSender, order: rank_pb2.StartTransfer) -> None:
        grant = grant_from_proto(order.grant)
        try:
            deadline_s = order.deadline_s if order.HasField("deadline_s") else None
            sender.start(grant, self._ended, deadline_s, read_text(order), max(1, order.groups))
        except PdserveError as error:
            self._ended(Sent(key=grant.key, outcome=SendOutcome.FAILED, error=error.message))

    def _push(self, sender: ShapedSender, order: rank_pb2.PushBlocks) -> None:
        key = KEY.decode(order.key)
        blocks, groups = read_push(order, self._pool.num_blocks)
        if self._stamps.epochs(order.blocks) != tuple(order.epochs):
            sender.fail(key, _REASSIGNED)
            return
        for block, content_hash in zip(order.blocks, order.content_hashes, strict=True):
            self._stamps.mark(block, content_hash)
        try:
            sender.push(key, blocks, order.is_last, groups)
        except PdserveError as error:
            sender.fail(key, error.message)

    def _ended(self, end: Received | Sent) -> None:
        side = self.receiver or self._sender
        assert side is not None
        self.report(ended_report(end, side.stats))


@final
class RankServer:
    """Listens immediately. The engine's thread calls `reached` before it computes. All other work is done on other
    threads."""

    def __init__(
        self,
        pool: KvPool,
        spec: EngineSpec,
        config: WorkerConfig,
        use_device: Callable[[], None] = lambda: None,
        fault_injector: FaultInjector | None = None,
    ) -> None:
        """`use_device` is called on each thread that may queue work on a device. Raises ConfigError."""
        self._fault_injector = fault_injector or make_fault_injector(config.inject_faults)
        self._pool, self._spec, self._config = pool, spec, config
        self._secret = ClusterSecret(config.cluster_secret)
        self._tls = certificates_of(config, is_mutual=True)
        self._stamps = BlockStamps(pool.num_blocks)
        self._orders = ThreadPoolExecutor(1, "kv-orders", use_device)
        self._is_led, self._is_over = False, asyncio.Event()
        self._servers: list[Any] = []
        self._rejections = LogLimit()
        self._host = config.advertise or config.host
        self._thread = LoopThread("grpc-rank")
        try:
            self._thread.start()
            self.address = self._thread.result_of(self._serve(partial(_add_rank_service, self)))
        except BaseException:
            self.close()
            raise

    def reached(self, blocks: Sequence[tuple[int, int]]) -> None:
        """The leader has reassigned these blocks: (block, epoch)."""
        for block, epoch in blocks:
            self._stamps.reach(block, epoch)

    def close(self) -> None:
        """Idempotent."""
        try:
            if self._thread.is_running:
                self._thread.result_of(self._stop())
        finally:
            self._orders.shutdown(wait=False)
            self._thread.close()

    async def follow(self, context: Any) -> None:
        """The leader's stream."""
        caller = proven_caller(context)
        worker_id, _, incarnation = caller.rpartition("/")
        if self._is_led or worker_id != self._config.worker_id:
            seen = "a second leader" if self._is_led else f"a leader of {worker_id[:64]!r}"
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"this rank is of {self._config.worker_id}: {seen}"
            )
        first = await asyncio.wait_for(context.read(), OPEN_S)
        if self._is_led:  # while the stream is open
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a second leader")
        if (
            first is EOF
            or first.WhichOneof("order") != "open"
            or caller_name(worker_id, first.open.incarnation) != caller
        ):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "open: expected first, with the caller's incarnation")
        self._is_led = True
        endpoint = Endpoint(
            self._pool, self._spec, self._stamps, self._config, incarnation, self._fault_injector, self._tls
        )
        reports: asyncio.Queue[rank_pb2.FollowResponse | None] = asyncio.Queue()
        endpoint.report = lambda report: _put(self._thread.loop, reports, report)
        writer = asyncio.create_task(_write(context, reports))
        try:
            opened = await self._open(endpoint, is_sender=first.open.is_sender)
            await reports.put(rank_pb2.FollowResponse(opened=opened))
            while not opened.error and (order := await context.read()) is not EOF:
                await self._in_order(endpoint.execute, order)
        finally:
            # A separate task, because the call may be cancelled again while its transfers end.
            self._closing = asyncio.create_task(self._end(endpoint, reports))
        await asyncio.shield(self._closing)
        await writer

    async def _end(self, endpoint: Endpoint, reports: asyncio.Queue[rank_pb2.FollowResponse | None]) -> None:
        try:
            await self._in_order(endpoint.close)
        finally:
            _put(self._thread.loop, reports, None)
            self._is_over.set()

    async def _open(self, endpoint: Endpoint, *, is_sender: bool) -> rank_pb2.EndpointOpened:
        try:
            await self._in_order(partial(endpoint.open, is_sender=is_sender))
            if endpoint.receiver is None:
                return rank_pb2.EndpointOpened()
            add = partial(add_TransferServiceServicer_to_server, endpoint.receiver.servicer)
            return rank_pb2.EndpointOpened(endpoint=await self._serve(add))
        except PdserveError as error:
            return rank_pb2.EndpointOpened(error=error.message)

    async def _in_order(self, call: Callable[..., None], *arguments: Any) -> None:
        """Runs the call on the thread for orders. The caller reads the next order when it is done."""
        await self._thread.loop.run_in_executor(self._orders, call, *arguments)

    async def _serve(self, add: Callable[[Any], None]) -> str:
        """HOST:PORT of a server that requires a proof from every caller. Raises ConfigError."""
        server, proofs = make_peer_server(OPTIONS, self._rejected)
        address = f"{self._host}:{listen(server, self._config.host, 0, 'host', self._tls)}"
        proofs.serve(CallChecker(self._secret, address, partial(secrets.token_bytes, NONCE_BYTES)), server)
        add(server)
        await server.start()
        self._servers.append(server)
        return address

    async def _stop(self) -> None:
        for server in self._servers:
            await server.stop(None)
        if self._is_led:
            async with asyncio.timeout(_JOIN_S):
                await self._is_over.wait()

    def _rejected(self, error: PdserveError) -> None:
        if count := self._rejections.due(time.monotonic()):
            log.warning("calls to a tensor-parallel rank were rejected", extra={"reason": error.reason, "calls": count})


class _Servicer(rank_pb2_grpc.RankServiceServicer):
    def __init__(self, server: RankServer) -> None:
        self._server = server

    async def Follow(self, request_iterator: Any, context: Any) -> None:
        await self._server.follow(context)


def _add_rank_service(rank: RankServer, server: Any) -> None:
    rank_pb2_grpc.add_RankServiceServicer_to_server(_Servicer(rank), server)


async def _write(context: Any, reports: asyncio.Queue[rank_pb2.FollowResponse | None]) -> None:
    while (report := await reports.get()) is not None:
        await context.write(report)


def _put(
    loop: asyncio.AbstractEventLoop,
    reports: asyncio.Queue[rank_pb2.FollowResponse | None],
    report: rank_pb2.FollowResponse | None,
) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(reports.put_nowait, report)
