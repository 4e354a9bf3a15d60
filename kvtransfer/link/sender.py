"""The prefill side over sockets: one connection and one thread for each decode worker, made when first needed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final

from kvtransfer.link.endpoint_config import EndpointConfig
from kvtransfer.link.outbound import Outbound
from kvtransfer.protocol.grants import compare
from kvtransfer.protocol.plan import Part, PartLayout, host_view
from kvtransfer.protocol.transfers import Abort, OnRead, OnSent, Push, Start
from kvtransfer.protocol.transport import Link, Sent, Text, TransferStats, total
from kvtransfer.transports.common.registry import fence_of
from pdserve.core.errors import ConfigError, InvalidRequest, Unavailable
from pdserve.core.kv.kv_shape import Grant, KvShape, TransferKey, is_same_bytes
from pdserve.outage_log import OutageLog

log = logging.getLogger(__name__)

_JOIN_S: Final = 5.0
Pair = tuple[str, str, str]  # endpoint, worker id, incarnation


class PlainSender:
    """`on_read` is called on the connections' threads, before a transfer ends, with the source blocks that are no
    longer read."""

    def __init__(self, config: EndpointConfig, on_read: OnRead | None = None) -> None:
        self.config, self._on_read = config, on_read
        self._memory = host_view(config.pool).toreadonly()
        self._lock = threading.Lock()  # guards all below
        self._pairs: dict[Pair, Outbound] = {}
        self._transfers: dict[TransferKey, tuple[Outbound, int]] = {}  # its connection, number of blocks
        self._ending: list[Outbound] = []  # they accept no more transfers, but may still read the pool
        self._past = TransferStats()  # statistics of connections that ended
        self._is_closed = False
        self._ends = OutageLog(log, "kv connection ended", "kv connection up", level=logging.INFO)

    @property
    def stats(self) -> TransferStats:
        with self._lock:
            return total([self._past, *(outbound.stats for outbound in self._all())])

    @property
    def moved_bytes(self) -> int:
        """That of `stats`, which costs more."""
        with self._lock:
            return self._past.moved_bytes + sum(outbound.stats.moved_bytes for outbound in self._all())

    @property
    def links(self) -> list[Link]:
        """The decode workers that are connected."""
        with self._lock:
            outbounds = list(self._pairs.values())
        return [link for link in (outbound.link for outbound in outbounds) if link is not None]

    @property
    def open_keys(self) -> list[TransferKey]:
        """Transfers that have not ended."""
        with self._lock:
            return list(self._transfers)

    def start(
        self,
        grant: Grant,
        on_end: OnSent,
        deadline_s: float | None = None,
        text: Text | None = None,
        groups: int = 1,
    ) -> None:
        """Raises Unavailable after close(), or if descriptors or threads for a connection are exhausted.

        Raises InvalidRequest if the transfer was started already. All other errors are passed to `on_end`.
        """
        error, layout = "", None
        try:
            compare(grant.fingerprint, self.config.fingerprint)
            layout = self._layout(grant.fingerprint.shape)
            if self.config.pool.block_bytes != layout.block_bytes:
                raise ConfigError("kv_shape.block_bytes", self.config.pool.block_bytes, f"{layout.block_bytes}")
            if layout.extent(Part(groups=groups)) is None and not self.config.pool.is_on_host:
                if groups == 1:
                    expected = "the receiver's: int8 and fp8 blocks on a GPU are not divided by heads"
                    raise ConfigError("tensor_parallel", self.config.fingerprint.shape.tp_degree, expected)
                expected = "1: layer groups of these blocks are not runs of bytes, as pools on GPUs require"
                raise ConfigError("groups", groups, expected)
        except ConfigError as differs:
            error = differs.message
        deadline_at_s = None if deadline_s is None else self.config.clock() + deadline_s
        command = Start(grant, self._forgetting(grant.key, on_end), deadline_at_s, groups, layout, error)
        pair = (grant.endpoint, grant.worker_id, grant.incarnation)
        with self._lock:
            if self._is_closed:
                raise Unavailable("the KV sender is closed")
            if grant.key in self._transfers:
                raise InvalidRequest("grant.key", grant.key, "one that has not been started already")
            outbound = self._pairs.get(pair)
            if outbound is None or not outbound.post(command):
                outbound = self._connect(pair)
                outbound.post(command)
            self._transfers[grant.key] = (outbound, len(grant.blocks))

    def push(
        self, key: TransferKey, blocks: Sequence[tuple[int, int]], is_last: bool, groups: range | None = None
    ) -> None:
        """Raises InvalidRequest on indices outside the grant or blocks outside the pool."""
        found = self._transfers.get(key)  # one look-up needs no lock
        if found is None:  # it has ended; the report to its owner was made or is being made
            return
        outbound, size = found
        sources = [source for _, source in blocks]
        for name, numbers, limit in (
            ("grant index", [index for index, _ in blocks], size),
            ("source block", sources, self.config.pool.num_blocks),
        ):
            for odd in (min(numbers, default=0), max(numbers, default=0)):
                if numbers and not 0 <= odd < limit:
                    raise InvalidRequest("blocks", f"{name} {odd}", f"0..{limit - 1}")
        epochs = self.config.stamps.epochs(sources)
        after = fence_of(self.config.pool, self.config.transports)
        outbound.post(Push(key, tuple(blocks), epochs, is_last, groups, after))

    def sender_of(self, key: TransferKey) -> PlainSender:
        return self

    def abort(self, key: TransferKey) -> None:
        self._give_up(Abort(key))

    def fail(self, key: TransferKey, error: str) -> None:
        self._give_up(Abort(key, error))

    def _give_up(self, command: Abort) -> None:
        found = self._transfers.get(command.key)
        if found is not None:
            found[0].post(command)

    def close(self) -> None:
        """Ends every transfer that is open (FAILED) and every thread. Not from a callback."""
        with self._lock:
            self._is_closed = True
            outbounds = self._all()
        for outbound in outbounds:
            outbound.stop()
        for outbound in outbounds:
            outbound.join(_JOIN_S)

    def _layout(self, target: KvShape) -> PartLayout:
        """Raises ConfigError."""
        source = self.config.fingerprint.shape
        if self.config.pool.is_on_host or is_same_bytes(source, target):
            return PartLayout.to_send(source, target, self.config.wire_dtype)
        return PartLayout.to_cut(source, target)

    def _connect(self, pair: Pair) -> Outbound:
        """With the lock held. Drops the connections that have ended."""
        over = [one for one, outbound in self._pairs.items() if outbound.is_over]
        self._ending += [self._pairs.pop(one) for one in over]
        self._past = total([self._past, *(one.stats for one in self._ending if not one.is_alive())])
        self._ending = [one for one in self._ending if one.is_alive()]
        try:
            outbound = Outbound(self.config, self._memory, *pair, self._ends, self._on_read).started()
        except (OSError, RuntimeError) as error:
            raise Unavailable(f"no KV connection to {pair[0]} can be made: {error}") from error
        self._pairs[pair] = outbound
        return outbound

    def _all(self) -> list[Outbound]:
        return [*self._pairs.values(), *self._ending]

    def _forgetting(self, key: TransferKey, on_end: OnSent) -> OnSent:
        def end(sent: Sent) -> None:
            with self._lock:
                self._transfers.pop(key, None)
            on_end(sent)

        return end
