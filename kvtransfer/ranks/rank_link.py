"""The leader's side of a rank's stream: sends orders, receives reports.

Orders are queued, so that an engine step does not wait for another process. A rank that is lost may still be writing.
Its transfers are then never reported as ended, their blocks stay reserved, and the worker exits.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final, final

import grpc

from kvtransfer.protocol.transfers import OnSent
from kvtransfer.protocol.transport import Link, OnOpen, Received, ReceiveOutcome, Text, TransferStats
from kvtransfer.ranks.rank_messages import (
    KEY,
    RECEIVED,
    SENT,
    expect_order,
    give_up_order,
    push_order,
    read_stats,
    start_order,
)
from pdserve.core.access.proof import Identity
from pdserve.core.errors import ConfigError, InvalidRequest, PdserveError, Unauthenticated, Unavailable
from pdserve.core.kv.kv_shape import Grant, TransferKey
from pdserve.core.kv.stamps import BlockStamps
from pdserve.tls.certificates import ReloadingCertificates
from pdserve.v1 import rank_pb2, rank_pb2_grpc
from pdserve.wire import peers
from pdserve.wire.peer_server import channel_options, peer_channel

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 64 * 2**20  # the blocks of a prompt of a million tokens
OPTIONS: Final = channel_options(MAX_MESSAGE_BYTES)
DIAL_S: Final = 10.0
_JOIN_S: Final = 5.0

OnReport = Callable[[rank_pb2.FollowResponse], None]


@final
class RankLink:
    """Raises ConfigError if the rank cannot be reached, does not belong to the cluster, or cannot open its endpoint."""

    def __init__(
        self,
        rank: int,
        address: str,
        identity: Identity,
        opening: rank_pb2.OpenEndpoint,
        open_s: float,
        tls: ReloadingCertificates | None = None,
    ):
        """`open_s`: time limit for opening the endpoint."""
        self.rank = rank
        self.endpoint = ""
        self.stats = TransferStats()  # as of the last report
        self._thread: threading.Thread | None = None
        self.on_report: OnReport = lambda report: None
        self._orders: queue.SimpleQueue[rank_pb2.FollowRequest | None] = queue.SimpleQueue()
        self._is_gone = self._is_closed = False
        self._has_opened = threading.Event()
        self._error = ""
        introduction = peers.introduce(identity, peers.FOLLOW, address)
        self._channel = peer_channel(introduction.target, tls, OPTIONS)
        with ExitStack() as opened:
            opened.callback(self.close)
            try:
                metadata = peers.prove_blocking(self._channel, introduction, DIAL_S)
                stub = rank_pb2_grpc.RankServiceStub(self._channel)
                self._call: Any = stub.Follow(self._outgoing(), metadata=metadata)
                peers.check_call_blocking(introduction, self._call, DIAL_S)
            except (Unauthenticated, grpc.RpcError) as error:
                why = error.message if isinstance(error, PdserveError) else f"{error.code().name}: {error.details()}"  # type: ignore[attr-defined]
                expected = "a rank that answers"
                raise ConfigError("tensor_parallel", f"rank {rank} at {address}: {why}", expected) from error
            thread = threading.Thread(target=self._listen, name=f"kv-rank-{rank}", daemon=True)
            thread.start()
            self._thread = thread
            self.order(rank_pb2.FollowRequest(open=opening))
            if not self._has_opened.wait(open_s) or self._error:
                seen = f"rank {rank}: {self._error or f'no endpoint after {open_s:.0f} s'}"
                raise ConfigError("tensor_parallel", seen, "a rank that opens its KV endpoint")
            opened.pop_all()

    @property
    def is_alive(self) -> bool:
        return not self._is_gone

    def order(self, order: rank_pb2.FollowRequest) -> None:
        self._orders.put(order)

    def close(self) -> None:
        """Ends the stream, and with it the rank's endpoint. Do not call it from `on_report`."""
        self._is_closed = True
        self._orders.put(None)
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        self._channel.close()

    def _outgoing(self) -> Iterator[rank_pb2.FollowRequest]:
        while (order := self._orders.get()) is not None:
            yield order

    def _listen(self) -> None:
        error = "its stream ended"
        try:
            for report in self._call:
                if report.stats:
                    self.stats = read_stats(report)
                if report.WhichOneof("report") == "opened":
                    self.endpoint, self._error = report.opened.endpoint, report.opened.error
                    self._has_opened.set()
                else:
                    self.on_report(report)
        except grpc.RpcError as failed:
            error = f"{failed.code().name}: {failed.details()}"  # type: ignore[attr-defined]
        except Exception as failed:  # the thread ends, so the rank's transfers must end
            log.exception("a report of a tensor-parallel rank failed", extra={"rank": self.rank})
            error = str(failed)
        self._is_gone = True
        self._error = self._error or error
        self._has_opened.set()
        if not self._is_closed:
            log.error("a tensor-parallel rank is gone", extra={"rank": self.rank, "error": error})


class _RemoteEndpoint:
    """What the sender and the receiver of a rank in another process share. `stamps`: the leader's table of the blocks'
    epochs and content hashes."""

    def __init__(self, link: RankLink, stamps: BlockStamps) -> None:
        self._link, self._stamps = link, stamps
        self._lock = threading.Lock()  # guards the owners
        link.on_report = self._report

    @property
    def is_healthy(self) -> bool:
        return self._link.is_alive

    @property
    def stats(self) -> TransferStats:
        return self._link.stats

    def abort(self, key: TransferKey) -> None:
        self._link.order(give_up_order(key))

    def fail(self, key: TransferKey, error: str) -> None:
        self._link.order(give_up_order(key, error))

    def close(self) -> None:
        self._link.close()

    def _report(self, report: rank_pb2.FollowResponse) -> None:
        raise NotImplementedError


@final
class RemoteReceiver(_RemoteEndpoint):
    """A RankReceiver in another process."""

    def __init__(self, link: RankLink, stamps: BlockStamps) -> None:
        self._owners: dict[TransferKey, tuple[Callable[[Received], None], OnOpen | None]] = {}
        super().__init__(link, stamps)

    @property
    def rank_endpoints(self) -> tuple[str, ...]:
        return ()

    def expect(
        self,
        grant: Grant,
        on_end: Callable[[Received], None],
        deadline_s: float | None = None,
        content_hashes: Sequence[int] | None = None,
        on_open: OnOpen | None = None,
    ) -> bool:
        with self._lock:
            if not self._link.is_alive:
                raise Unavailable(f"rank {self._link.rank} is gone")
            if grant.key in self._owners:
                raise InvalidRequest("grant.key", grant.key, "one that is not expected already")
            self._owners[grant.key] = on_end, on_open
        self._link.order(expect_order(grant, self._stamps.epochs(grant.blocks), content_hashes, deadline_s))
        return False

    def _report(self, report: rank_pb2.FollowResponse) -> None:
        if report.WhichOneof("report") == "expected":
            with self._lock:
                _, on_open = self._owners.get(KEY.decode(report.expected.key), (None, None))
            if on_open is not None:
                on_open()
            return
        end = RECEIVED.decode(report.ended)
        with self._lock:
            keeps = end.outcome is ReceiveOutcome.QUARANTINED
            found = self._owners.get(end.key) if keeps else self._owners.pop(end.key, None)
        if found is not None:
            found[0](end)


@final
class RemoteSender(_RemoteEndpoint):
    """A RankSender in another process."""

    divides_blocks = True  # the leader's own sender decides whether this is allowed

    def __init__(self, link: RankLink, stamps: BlockStamps) -> None:
        self._owners: dict[TransferKey, OnSent] = {}
        super().__init__(link, stamps)

    @property
    def links(self) -> tuple[Link, ...]:
        """Known only to the rank's process; the leader's own links are shown instead."""
        return ()

    @property
    def moved_bytes(self) -> int:
        return self._link.stats.moved_bytes

    def sender_of(self, key: TransferKey) -> RemoteSender:
        return self

    def start(
        self,
        grant: Grant,
        on_end: OnSent,
        deadline_s: float | None = None,
        text: Text | None = None,
        groups: int = 1,
    ) -> None:
        with self._lock:
            if not self._link.is_alive:
                raise Unavailable(f"rank {self._link.rank} is gone")
            if grant.key in self._owners:
                raise InvalidRequest("grant.key", grant.key, "one that has not been started already")
            self._owners[grant.key] = on_end
        self._link.order(start_order(grant, deadline_s, text, groups))

    def push(
        self, key: TransferKey, blocks: Sequence[tuple[int, int]], is_last: bool, groups: range | None = None
    ) -> None:
        self._link.order(push_order(key, blocks, self._stamps, is_last, groups))

    def _report(self, report: rank_pb2.FollowResponse) -> None:
        end = SENT.decode(report.ended)
        with self._lock:
            on_end = self._owners.pop(end.key, None)
        if on_end is not None:
            on_end(end)
