"""Combines the senders, or the receivers, of a worker's ranks into one, and opens those of the other ranks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final, Generic, TypeVar, final

from kvtransfer.link.endpoint_config import EndpointConfig
from kvtransfer.link.receiver import Reports
from kvtransfer.protocol.grants import check_movable
from kvtransfer.protocol.transfers import OnSent
from kvtransfer.protocol.transport import (
    Link,
    OnOpen,
    RankReceiver,
    RankSender,
    Received,
    ReceiveOutcome,
    Receiver,
    Sender,
    SendOutcome,
    Sent,
    Text,
    TransferSender,
    TransferStats,
    total,
)
from kvtransfer.ranks.joint import (
    EndPart,
    JointTransfers,
    Member,
    Opened,
    ReportJoint,
    Result,
    join_received,
    join_sent,
    rank_grant,
    rank_key,
    rank_pairs,
)
from kvtransfer.ranks.rank_link import RankLink, RemoteReceiver, RemoteSender
from pdserve.core.access.proof import Identity
from pdserve.core.errors import ConfigError, InvalidRequest, PdserveError, Unavailable
from pdserve.core.kv.kv_shape import Grant, KvShape, TransferKey, check_convertible
from pdserve.core.kv.stamps import BlockStamps
from pdserve.engine.interface import Engine
from pdserve.v1 import rank_pb2

log = logging.getLogger(__name__)

# --- joined senders and receivers -----------------------------------------------------------------------------
# Each passes calls on to those of all ranks, which have separate pools. joint.py decides how a transfer ends.
# `ranks[0]` is the sender or receiver of this process. The others are in the ranks' processes (rank_link.py), or in
# tests in this process too.

Rank = TypeVar("Rank", RankReceiver, RankSender)
_CLOSED: Final = "the KV endpoints of the worker's ranks are closed"
OnReceived = Callable[[Received], None]


class _Joined(Generic[Rank, Member, Result]):
    """The transfer table with its lock, and the reports in the order of the table's decisions."""

    def __init__(self, ranks: Sequence[Rank], table: JointTransfers[Member, Result]) -> None:
        self._ranks: Sequence[Rank] = ranks
        self._table: JointTransfers[Member, Result] = table
        self._lock = threading.Lock()  # guards the table and the reports
        self._reports: Reports[Result] = Reports(self._lock)
        self._is_closed = False

    @property
    def is_healthy(self) -> bool:
        """False after a rank was lost."""
        return all(getattr(rank, "is_healthy", True) for rank in self._ranks)

    @property
    def stats(self) -> TransferStats:
        """Sums over all ranks: a transfer counts once for each of its parts."""
        return total(rank.stats for rank in self._ranks)

    @property
    def open_keys(self) -> list[TransferKey]:
        """Transfers that have not ended."""
        with self._lock:
            return self._table.keys

    def abort(self, key: TransferKey) -> None:
        with self._lock:
            actions = self._table.abort(key)
        self._act(actions)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        for rank in self._ranks:
            rank.close()

    def _open(self, key: TransferKey, members: Sequence[Member], on_end: Callable[[Result], None]) -> None:
        """Raises Unavailable after close(), and InvalidRequest on a key in use."""
        with self._lock:
            if self._is_closed:
                raise Unavailable(_CLOSED)
            self._table.open(key, members, members)
            self._reports.own(key, on_end)

    def _forget(self, key: TransferKey) -> None:
        with self._lock:
            self._table.forget(key)
            self._reports.disown(key)

    def _ended(self, key: TransferKey, member: Member, end: Result) -> None:
        with self._lock:
            actions = self._table.ended(key, member, end)
            for report in actions:
                if isinstance(report, ReportJoint):
                    self._reports.add(report.end)
        self._act([action for action in actions if isinstance(action, EndPart)])
        self._reports.deliver()

    def _act(self, actions: Sequence[EndPart[Member]]) -> None:
        for action in actions:
            self._end_part(action)

    def _repeat(self, key: TransferKey) -> None:
        """Repeats the order to give up, for parts that had not begun when another part failed."""
        with self._lock:
            actions = self._table.given_up(key)
        self._act(actions)

    def _end_part(self, action: EndPart[Member]) -> None:
        raise NotImplementedError


def _end_rank(rank: RankReceiver | RankSender, key: TransferKey, error: str) -> None:
    if error:
        rank.fail(key, error)
    else:
        rank.abort(key)


@final
class JoinedReceiver(_Joined[RankReceiver, int, Received]):
    """A Receiver. Members are ranks."""

    def __init__(self, ranks: Sequence[RankReceiver], rank_endpoints: Sequence[str], degree: int) -> None:
        """`rank_endpoints` are those of all ranks but the first. Raises ConfigError unless there are `degree` ranks."""
        check_movable(degree, len(ranks))
        super().__init__(ranks, JointTransfers(join_received))
        self.rank_endpoints = tuple(rank_endpoints)

    def expect(
        self,
        grant: Grant,
        on_end: OnReceived,
        deadline_s: float | None = None,
        content_hashes: Sequence[int] | None = None,
        on_open: OnOpen | None = None,
    ) -> bool:
        """Raises what the first rank raises. An error of another rank ends the transfer."""
        key = grant.key
        self._open(key, range(len(self._ranks)), on_end)
        is_open = False
        for index, rank in enumerate(self._ranks):
            try:
                has_opened = rank.expect(
                    rank_grant(grant, index),
                    partial(self._ended, key, index),
                    deadline_s,
                    content_hashes,
                    partial(self._opened_later, key, index, on_open),
                )
            except PdserveError as error:
                if index == 0:
                    self._forget(key)
                    raise
                self._ended(key, index, Received(key=key, outcome=ReceiveOutcome.FAILED, error=error.message))
                continue
            is_open = (has_opened and self._is_open(key, index)) or is_open
        self._repeat(key)
        return is_open

    def _is_open(self, key: TransferKey, rank: int) -> bool:
        """True if this rank was the last to open its part."""
        with self._lock:
            return self._table.opened(key, rank) == [Opened(key)]

    def _opened_later(self, key: TransferKey, rank: int, on_open: OnOpen | None) -> None:
        if self._is_open(key, rank) and on_open is not None:
            on_open()

    def _end_part(self, action: EndPart[int]) -> None:
        key = action.key if len(self._ranks) == 1 else rank_key(action.key, action.member)
        _end_rank(self._ranks[action.member], key, action.error)


@final
class JoinedSender(_Joined[RankSender, tuple[int, int], Sent]):
    """A Sender. Members are pairs of a rank of this worker and one of the receiving worker.

    Also for a worker of one rank, because a decode worker may have several. If neither has, blocks go directly to the
    sender of the transfer.
    """

    def __init__(self, ranks: Sequence[RankSender], shape: KvShape, *, is_on_host: bool) -> None:
        """`shape` is the shape of any rank. Raises ConfigError if a rank is missing."""
        check_movable(shape.tp_degree, len(ranks))
        super().__init__(ranks, JointTransfers(join_sent))
        self._shape, self._is_on_host = shape, is_on_host
        self._keys: dict[TransferKey, dict[tuple[int, int], TransferKey]] = {}  # keys of the parts
        self._undivided: dict[TransferKey, TransferSender] = {}  # transfers of one part, which need no table

    @property
    def links(self) -> list[Link]:
        """The connections of this process. Other ranks use the same transports to the same workers."""
        return list(self._ranks[0].links)

    @property
    def open_keys(self) -> list[TransferKey]:
        return [*super().open_keys, *list(self._undivided)]

    @property
    def divides_blocks(self) -> bool:
        """On devices, only the leader's launches are reported by layer, not those of other ranks."""
        return (self._is_on_host or len(self._ranks) == 1) and self._ranks[0].divides_blocks

    @property
    def moved_bytes(self) -> int:
        return sum(rank.moved_bytes for rank in self._ranks)

    def start(
        self,
        grant: Grant,
        on_end: OnSent,
        deadline_s: float | None = None,
        text: Text | None = None,
        groups: int = 1,
    ) -> None:
        """Like PlainSender.start. An error of a rank ends the transfer.

        One thread calls start, push and abort for a key: an abort before start has returned is forgotten.
        """
        target = grant.fingerprint.shape
        try:
            check_convertible(self._shape, target)
            check_grant(grant)
        except ConfigError as error:
            on_end(Sent(key=grant.key, outcome=SendOutcome.FAILED, error=error.message))
            return
        if len(self._ranks) == target.tp_degree == 1:
            self._start_undivided(grant, on_end, deadline_s, text, groups)
            return
        pairs = rank_pairs(self._shape, target)
        self._open(grant.key, pairs, on_end)
        grants = [rank_grant(grant, theirs) for _, theirs in pairs]
        with self._lock:
            self._keys[grant.key] = {pair: one.key for pair, one in zip(pairs, grants, strict=True)}
        for pair, one in zip(pairs, grants, strict=True):
            ended = partial(self._part_ended, grant.key, pair)
            try:
                self._ranks[pair[0]].start(one, ended, deadline_s, text, groups)
            except PdserveError as error:
                ended(Sent(key=grant.key, outcome=SendOutcome.FAILED, error=error.message))
        self._repeat(grant.key)

    def push(
        self, key: TransferKey, blocks: Sequence[tuple[int, int]], is_last: bool, groups: range | None = None
    ) -> None:
        if (sender := self._undivided.get(key)) is not None:  # one look-up needs no lock
            sender.push(key, blocks, is_last, groups)
            return
        with self._lock:
            parts = list(self._keys.get(key, {}).items())
        for (rank, _), part_key in parts:
            self._ranks[rank].push(part_key, blocks, is_last, groups)

    def abort(self, key: TransferKey) -> None:
        if (sender := self._undivided.get(key)) is not None:
            sender.abort(key)
        else:
            super().abort(key)

    def _start_undivided(
        self, grant: Grant, on_end: OnSent, deadline_s: float | None, text: Text | None, groups: int
    ) -> None:
        """From one rank to one rank: blocks are pushed to the sender that has the transfer."""
        key, rank = grant.key, self._ranks[0]
        with self._lock:
            if self._is_closed:
                raise Unavailable(_CLOSED)
            if key in self._undivided:
                raise InvalidRequest("grant.key", key, "one that is not open already")
            self._undivided[key] = rank

        def end(sent: Sent) -> None:
            with self._lock:
                has_ended = self._undivided.pop(key, None) is None
            if not has_ended:
                try:
                    on_end(sent)
                except Exception:  # an error of one owner must not end the thread of the others' transfers
                    log.exception("on_end of a transfer raised", extra={"transfer_id": key.transfer_id})

        try:
            rank.start(grant, end, deadline_s, text, groups)
        except PdserveError as error:
            end(Sent(key=key, outcome=SendOutcome.FAILED, error=error.message))
        with self._lock:
            if key in self._undivided:  # it has not ended
                self._undivided[key] = rank.sender_of(key)

    def _part_ended(self, key: TransferKey, pair: tuple[int, int], end: Sent) -> None:
        with self._lock:
            if self._table.members(key) == [pair]:  # the last
                self._keys.pop(key, None)
        self._ended(key, pair, end)

    def _end_part(self, action: EndPart[tuple[int, int]]) -> None:
        with self._lock:
            part_key = self._keys.get(action.key, {}).get(action.member)
        if part_key is not None:
            _end_rank(self._ranks[action.member[0]], part_key, action.error)


def check_grant(grant: Grant) -> None:
    """Raises ConfigError if the grant lacks the endpoint of a rank of the receiving worker."""
    degree, seen = grant.fingerprint.shape.tp_degree, 1 + len(grant.rank_endpoints)
    if seen != degree:
        raise ConfigError("grant.rank_endpoints", seen - 1, f"{degree - 1}: of each rank but the first")


# --- opening them ---------------------------------------------------------------------------------------------

OPEN_S: Final = 120.0  # the kernels for device copies are compiled in this time


def joined_receiver(
    local: RankReceiver,
    engine: Engine,
    config: EndpointConfig,
) -> Receiver:
    """`local` is this process's receiver. Raises ConfigError, and closes `local`, if a rank cannot be reached."""
    with ExitStack() as opened:
        links = _links(local, engine, config, opened, is_sender=False)
        ranks: list[RankReceiver] = [local, *(RemoteReceiver(link, config.stamps) for link in links)]
        endpoints = [link.endpoint for link in links]
        joined = JoinedReceiver(ranks, endpoints, engine.spec.tp_degree) if links else local
        opened.pop_all()
    return joined


def joined_sender(
    local: RankSender,
    engine: Engine,
    config: EndpointConfig,
) -> Sender:
    """`local` is this process's sender. Raises ConfigError, and closes `local`, if a rank cannot be reached."""
    with ExitStack() as opened:
        links = _links(local, engine, config, opened, is_sender=True)
        ranks: list[RankSender] = [local, *(RemoteSender(link, config.stamps) for link in links)]
        joined = JoinedSender(ranks, config.fingerprint.shape, is_on_host=config.pool.is_on_host)
        opened.pop_all()
    return joined


def _links(
    local: RankReceiver | RankSender, engine: Engine, config: EndpointConfig, opened: ExitStack, *, is_sender: bool
) -> list[RankLink]:
    opened.callback(local.close)
    links: list[RankLink] = []
    leader = Identity.of(config.secret, "leader", config.worker_id, config.incarnation)
    opening = rank_pb2.OpenEndpoint(incarnation=config.incarnation, is_sender=is_sender)
    for rank, address in enumerate(getattr(engine, "rank_addresses", ()), 1):
        links.append(RankLink(rank, address, leader, opening, OPEN_S, config.tls))
        opened.callback(links[-1].close)
    if links:
        _send_epochs(engine, config.stamps)
    return links


def _send_epochs(engine: Any, stamps: BlockStamps) -> None:
    send_epochs: Callable[[BlockStamps], None] = engine.send_epochs
    send_epochs(stamps)
