"""A Sender to receivers of any shape: directly from the pool if the formats are equal, otherwise through a Reshaper.

The dtype that is sent is chosen by a rule, which learns how fast the link to each receiver is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, final

from kvtransfer.link.endpoint_config import EndpointConfig
from kvtransfer.link.sender import PlainSender
from kvtransfer.protocol.transfers import OnSent
from kvtransfer.protocol.transport import Link, SendOutcome, Sent, Text, TransferStats, total
from kvtransfer.reshape.reshaper import Reshaper
from pdserve.core.errors import ConfigError, Unavailable
from pdserve.core.kv.kv_shape import Grant, KvShape, TransferKey, check_convertible, is_same_bytes, wire_dtype

# --- wire rule ------------------------------------------------------------------------------------------------
# Chooses the dtype in which KV is sent between pools of floats: unchanged, or int8 if the link is the bottleneck.

# Bytes of floats per second that both sides can convert on one core (docs/transfer.md#speed). A faster link is not the
# bottleneck.
CONVERTED_BYTES_S: Final = 1.0e9
LEAST_BYTES: Final = 1 << 20  # smaller transfers do not measure a link's bandwidth
REVISIT: Final = 64  # one in this many transfers is exact, to measure whether the link is still slow
MAX_PAIRS: Final = 256
_WEIGHT: Final = 0.3  # weight of the newest transfer


@final
class WireRule:
    """The rule of one prefill worker. It learns from exact transfers."""

    def __init__(self, choice: str) -> None:
        self._choice = choice
        self._bandwidth: OrderedDict[str, float] = OrderedDict()
        self._num_quantised = 0

    def is_quantised(self, receiver: str) -> bool:
        """Whether the next transfer to that endpoint is sent as int8."""
        if self._choice != "auto":
            return self._choice == "int8"
        if self._bandwidth.get(receiver, CONVERTED_BYTES_S) >= CONVERTED_BYTES_S:
            return False
        self._num_quantised += 1
        return self._num_quantised % REVISIT != 0

    def sent(self, receiver: str, num_bytes: int, busy_s: float) -> None:
        """Learns that an exact transfer was busy for `busy_s`."""
        if num_bytes < LEAST_BYTES or busy_s <= 0.0:
            return
        seen = num_bytes / busy_s
        self._bandwidth[receiver] = seen + (1.0 - _WEIGHT) * (self._bandwidth.get(receiver, seen) - seen)
        self._bandwidth.move_to_end(receiver)
        if len(self._bandwidth) > MAX_PAIRS:
            self._bandwidth.popitem(last=False)


# --- sender ---------------------------------------------------------------------------------------------------


@final
class ShapedSender:
    def __init__(self, config: EndpointConfig, kv_wire: str = "exact") -> None:
        pool, fingerprint = config.pool, config.fingerprint
        if pool.block_bytes != fingerprint.block_bytes:
            raise ConfigError("kv_shape.block_bytes", fingerprint.block_bytes, f"{pool.block_bytes}, as in the pool")
        self.config, self._shape = config, fingerprint.shape
        self.plain = PlainSender(replace(config, wire_dtype=self._shape.dtype))
        self._kv_wire, self._rule = kv_wire, WireRule(kv_wire)
        self._lock = threading.Lock()  # guards all below
        self._reshapers: dict[tuple[KvShape, str], Reshaper] = {}
        self._is_closed = False

    @property
    def stats(self) -> TransferStats:
        return total([self.plain.stats, *(one.stats for one in self.reshapers)])

    @property
    def links(self) -> list[Link]:
        """The connected decode workers, and how KV is sent to each."""
        return [*self.plain.links, *(link for one in self.reshapers for link in one.links)]

    @property
    def divides_blocks(self) -> bool:
        return all(one.divides_blocks for one in self.config.transports)

    @property
    def moved_bytes(self) -> int:
        return self.stats.moved_bytes

    @property
    def open_keys(self) -> list[TransferKey]:
        """Transfers that have not ended."""
        return [*self.plain.open_keys, *(key for one in self.reshapers for key in one.open_keys)]

    @property
    def reshapers(self) -> list[Reshaper]:
        """One for each shape and wire dtype that differs from this side's."""
        return list(self._reshapers.values())

    def start(
        self,
        grant: Grant,
        on_end: OnSent,
        deadline_s: float | None = None,
        text: Text | None = None,
        groups: int = 1,
    ) -> None:
        """Like PlainSender.start; also raises InvalidRequest if the shapes differ and `text` is missing."""
        theirs = grant.fingerprint.shape
        is_quantised = text is not None and self._rule.is_quantised(grant.endpoint)
        dtype = wire_dtype(self._shape, theirs, is_quantised=is_quantised)
        has_same_hashes = text is None or text.own == text.theirs
        on_end = self._observed(grant, dtype, on_end)
        # a sender on a device sends heads directly out of its blocks, or fails
        is_alike = is_same_bytes(self._shape, theirs) or not self.config.pool.is_on_host
        if is_alike and dtype == self._shape.dtype and has_same_hashes:
            self.plain.start(grant, on_end, deadline_s, groups=groups)
            return
        try:
            check_convertible(self._shape, theirs)
            reshaper = self._reshaper(theirs, dtype)
        except ConfigError as error:
            on_end(Sent(key=grant.key, outcome=SendOutcome.FAILED, error=error.message))
            return
        reshaper.start(grant, on_end, deadline_s, text, groups)

    def push(
        self, key: TransferKey, blocks: Sequence[tuple[int, int]], is_last: bool, groups: range | None = None
    ) -> None:
        self.sender_of(key).push(key, blocks, is_last, groups)

    def sender_of(self, key: TransferKey) -> Reshaper | PlainSender:
        return next((one for one in self.reshapers if key in one), self.plain)

    def abort(self, key: TransferKey) -> None:
        self.sender_of(key).abort(key)

    def fail(self, key: TransferKey, error: str) -> None:
        self.sender_of(key).fail(key, error)

    def close(self) -> None:
        """Ends every transfer that is open (FAILED) and every thread. Not from a callback."""
        with self._lock:
            self._is_closed = True
        for reshaper in self.reshapers:
            reshaper.close()
        self.plain.close()

    def _observed(self, grant: Grant, dtype: str, on_end: OnSent) -> OnSent:
        """Uses an exact transfer to measure the link, if that decides the dtype of the next one."""
        if self._kv_wire != "auto" or dtype == "int8":
            return on_end

        def end(sent: Sent) -> None:
            if sent.outcome is SendOutcome.SENT:
                self._rule.sent(grant.endpoint, sent.num_bytes, sent.busy_s)
            on_end(sent)

        return end

    def _reshaper(self, target: KvShape, dtype: str) -> Reshaper:
        with self._lock:
            if self._is_closed:
                raise Unavailable("the KV sender is closed")
            found = self._reshapers.get((target, dtype))
            if found is None:
                found = Reshaper(self.config, target, dtype)
                self._reshapers[target, dtype] = found
            return found
