"""A Sender to receivers of any shape: directly from the pool if the formats are equal, otherwise through a Reshaper.

A rule chooses the dtype that is sent. It learns how fast the link to each receiver is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, final

from kvtransfer.link.endpoint_config import EndpointConfig
from kvtransfer.link.sender import PlainSender
from kvtransfer.protocol.plan import arrival_of, host_view, pieces_of, ready_blocks
from kvtransfer.protocol.transfers import OnSent
from kvtransfer.protocol.transport import Link, SendOutcome, Sent, Text, TransferStats, total
from kvtransfer.reshape.convert import BlockArrays, StagingPool, pack
from pdserve.core.errors import ConfigError, InvalidRequest, Unavailable
from pdserve.core.kv.kv_shape import Grant, KvShape, TransferKey, check_convertible, is_same_bytes, wire_dtype
from pdserve.core.kv.stamps import BlockStamps

# --- reshaper -------------------------------------------------------------------------------------------------
# The prefill side for decode workers of another shape: converts blocks in a staging pool, and sends them from there.
#
# One Reshaper serves all receivers of one shape. Its thread fills staging blocks in the receivers' format, and a plain
# sender sends them like blocks of the engine, so transports, checksums and stamps need no changes. A staging block is
# free again when the sender no longer reads it. A small pool that stays in the cache therefore serves transfers of any
# length.
#
#     push(source blocks) -> [converting thread] -> staging blocks -> plain sender -> receiver
#                                    ^------- no longer read -----------'

log = logging.getLogger(__name__)

STAGING_BYTES: Final = 8 * 2**20
PUSH_BYTES: Final = 2**20  # converted at a time, so that the first blocks are sent while the others are packed
MIN_STAGING_BLOCKS: Final = 4
_JOIN_S: Final = 5.0


@dataclass(slots=True, eq=False)
class ReshapedTransfer:
    """One transfer."""

    grant: Grant
    text: Text
    on_end: OnSent
    groups: int  # groups of layers in which blocks are pushed; a block is converted when its last group was pushed
    sources: list[int] = field(default_factory=list)  # this side's blocks, from the first that contains a token to send
    epochs: list[int] = field(default_factory=list)  # epochs of these blocks when they were pushed
    last_pushed_at_s: float | None = None
    num_ready: int = 0  # number of granted blocks whose tokens have all been pushed
    num_packed: int = 0
    staged: set[int] = field(default_factory=set)  # staging blocks that the plain sender may read
    is_packing: bool = False
    error: str = ""  # why this side aborted
    ended: Sent | None = None  # how the plain sender's transfer ended


@final
class Reshaper:
    """A Sender to receivers of shape `target`, to which blocks are sent in `dtype`. Raises what arrival_of raises."""

    def __init__(self, config: EndpointConfig, target: KvShape, dtype: str) -> None:
        pool, source = config.pool, config.fingerprint.shape
        arrival = arrival_of(source, target, dtype)
        if not pool.is_on_host:
            raise ConfigError("kv_shape", target, f"{source}: blocks on a GPU cannot be converted")
        self._source, self._target, self._dtype = source, target, dtype
        self._window, self._form = arrival.out_of, arrival.form
        self._memory = BlockArrays(host_view(pool), source.form, pool.runs_per_block)
        self._num_blocks = pool.num_blocks
        self._stamps = config.stamps
        num_blocks = max(MIN_STAGING_BLOCKS, STAGING_BYTES // self._form.block_bytes)
        staging = StagingPool(self._form, num_blocks)
        self._out = BlockArrays(staging.buffer, self._form)
        self._limit = max(1, PUSH_BYTES // self._form.block_bytes)
        self._staging_stamps = BlockStamps(staging.num_blocks)
        self._lock = threading.Condition()  # guards all below
        self._free = deque(range(staging.num_blocks))
        self._transfers: dict[TransferKey, ReshapedTransfer] = {}
        self._turns: deque[ReshapedTransfer] = deque()  # transfers that may have blocks to pack
        self._is_closed = False
        self._own = TransferStats()  # counts in addition to the plain sender's
        self._inner = PlainSender(
            replace(config, pool=staging, stamps=self._staging_stamps, wire_dtype=dtype), self._read
        )
        self._thread = threading.Thread(target=self._run, name="kv-reshaper", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> TransferStats:
        return total([self._own, self._inner.stats])

    @property
    def moved_bytes(self) -> int:
        return self._inner.moved_bytes

    @property
    def links(self) -> list[Link]:
        return self._inner.links

    @property
    def open_keys(self) -> list[TransferKey]:
        """Transfers that have not ended."""
        with self._lock:
            return list(self._transfers)

    def __contains__(self, key: TransferKey) -> bool:
        with self._lock:
            return key in self._transfers

    @property
    def num_staged(self) -> int:
        """Staging blocks in use."""
        with self._lock:
            return self._out.num_blocks - len(self._free)

    def start(
        self,
        grant: Grant,
        on_end: OnSent,
        deadline_s: float | None = None,
        text: Text | None = None,
        groups: int = 1,
    ) -> None:
        """Raises InvalidRequest if `text` is missing or does not match the grant, and what a Sender raises."""
        size = self._target.block_size
        needed = None if text is None else -(-text.num_tokens // size) - grant.num_cached_blocks
        if text is None or needed != len(grant.blocks) or len(text.theirs) != len(grant.blocks):
            seen = "none" if text is None else f"{text.num_tokens} tokens"
            raise InvalidRequest(
                "text", seen, f"what fills {len(grant.blocks)} blocks of {size} after {grant.num_cached_blocks}"
            )
        transfer = ReshapedTransfer(grant, text, on_end, groups)
        with self._lock:
            if self._is_closed:
                raise Unavailable("the KV reshaper is closed")
            if grant.key in self._transfers:
                raise InvalidRequest("grant.key", grant.key, "one that has not been started already")
            self._transfers[grant.key] = transfer
        try:
            self._inner.start(grant, lambda sent: self._end(transfer, sent), deadline_s)
        except BaseException:
            with self._lock:
                del self._transfers[grant.key]
            raise

    def push(
        self, key: TransferKey, blocks: Sequence[tuple[int, int]], is_last: bool, groups: range | None = None
    ) -> None:
        """Blocks of this side's size, in order. Raises InvalidRequest on blocks outside the pool."""
        for _, source in blocks:
            if not 0 <= source < self._num_blocks:
                raise InvalidRequest("blocks", f"source block {source}", f"0..{self._num_blocks - 1}")
        with self._lock:
            transfer = self._transfers.get(key)
            if transfer is None or transfer.error or (groups is not None and groups.stop < transfer.groups):
                return
            for index, source in blocks:
                if index != len(transfer.sources):
                    transfer.error = f"source block {index} was pushed, expected {len(transfer.sources)}"
                    break
                transfer.sources.append(source)
                transfer.epochs.append(self._stamps.epoch(source))
            if is_last:
                transfer.last_pushed_at_s = time.monotonic()
            if not transfer.error:
                self._count_ready(transfer, is_last)
            error = transfer.error
        if error:
            self._inner.abort(key)
        elif is_last and not transfer.grant.blocks:
            self._inner.push(key, (), True)

    def abort(self, key: TransferKey) -> None:
        self._inner.abort(key)

    def fail(self, key: TransferKey, error: str) -> None:
        self._inner.fail(key, error)

    def close(self) -> None:
        """Ends every transfer that is open (FAILED) and every thread. Not from a callback."""
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        self._thread.join(_JOIN_S)
        self._inner.close()

    # Inside.

    def _count_ready(self, transfer: ReshapedTransfer, is_last: bool) -> None:
        """With the lock held."""
        text, grant = transfer.text, transfer.grant
        first = grant.num_cached_blocks * self._target.block_size // self._source.block_size
        final = min((first + len(transfer.sources)) * self._source.block_size, text.num_tokens)
        if is_last and final < text.num_tokens:
            transfer.error = f"the last push leaves {text.num_tokens - final} of {text.num_tokens} tokens out"
            return
        transfer.num_ready = ready_blocks(final, self._target.block_size, text.num_tokens) - grant.num_cached_blocks
        if transfer.num_ready > transfer.num_packed and transfer not in self._turns:
            self._turns.append(transfer)
            self._lock.notify_all()

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            transfer, first, blocks = taken
            try:
                error = self._pack(transfer, first, blocks)
            except Exception as failed:  # ends this transfer, not the others
                log.exception("converting KV failed", extra={"transfer_id": transfer.grant.key.transfer_id})
                error = f"converting KV failed: {failed}"
            self._packed(transfer, blocks, error)

    def _take(self) -> tuple[ReshapedTransfer, int, list[int]] | None:
        """The next transfer, the index of its first block to fill, and staging blocks. Transfers take turns. None:
        closed."""
        with self._lock:
            while not self._is_closed:
                if self._turns and self._free:
                    transfer = self._turns.popleft()
                    count = min(transfer.num_ready - transfer.num_packed, len(self._free), self._limit)
                    if transfer.ended is not None or transfer.error or count <= 0:
                        continue
                    blocks = [self._free.popleft() for _ in range(count)]
                    transfer.is_packing = True
                    return transfer, transfer.num_packed, blocks
                self._lock.wait()
        return None

    def _pack(self, transfer: ReshapedTransfer, first: int, blocks: list[int]) -> str:
        """Fills staging blocks for the granted blocks from `first` on. Returns the error of their sources, if any."""
        source_size, target_size = self._source.block_size, self._target.block_size
        held = transfer.grant.num_cached_blocks
        pieces = pieces_of(
            source_size,
            target_size,
            num_tokens=transfer.text.num_tokens,
            first_block=held + first,
            num_blocks=len(blocks),
        )
        begin = (held + first) * target_size // source_size - held * target_size // source_size
        end = begin + pieces[-1].source + 1
        sources, names = transfer.sources[begin:end], transfer.text.own[begin:end]
        self._staging_stamps.begin(blocks)
        pack(self._memory, sources, self._window, self._out, blocks, pieces)
        # Checked after the copy, so that a reassignment during the copy is seen, too.
        if self._stamps.epochs(sources) != tuple(transfer.epochs[begin:end]):
            self._own.stale_source += 1
            return "a source block was reassigned while it was being converted"
        if self._stamps.content_hashes(sources) != tuple(names):
            self._own.stamp_mismatches += 1
            return "a source block does not have the content hash of the prompt's block"
        for block, name in zip(blocks, transfer.text.theirs[first : first + len(blocks)], strict=True):
            self._staging_stamps.mark(block, name)
        return ""

    def _packed(self, transfer: ReshapedTransfer, blocks: list[int], error: str) -> None:
        key = transfer.grant.key
        with self._lock:
            transfer.is_packing = False
            first = transfer.num_packed
            transfer.error = transfer.error or error
            is_over = bool(transfer.error) or transfer.ended is not None
            if is_over:
                self._release(blocks)
            else:
                transfer.num_packed += len(blocks)
                transfer.staged.update(blocks)
                if transfer.num_ready > transfer.num_packed and transfer not in self._turns:
                    self._turns.append(transfer)
            is_last = transfer.num_packed == len(transfer.grant.blocks)
        if transfer.ended is not None:
            self._report(transfer)
        elif is_over:
            self._inner.abort(key)
        else:
            self._inner.push(key, list(enumerate(blocks, first)), is_last)

    def _read(self, key: TransferKey, blocks: Sequence[int]) -> None:
        with self._lock:
            transfer = self._transfers.get(key)
            if transfer is not None:
                done = transfer.staged.intersection(blocks)
                transfer.staged -= done
                self._release(sorted(done))

    def _end(self, transfer: ReshapedTransfer, sent: Sent) -> None:
        with self._lock:
            transfer.ended = sent
            self._release(sorted(transfer.staged))
            transfer.staged.clear()
            is_packing = transfer.is_packing
        if not is_packing:  # otherwise `_packed` reports: the source blocks are being read
            self._report(transfer)

    def _report(self, transfer: ReshapedTransfer) -> None:
        with self._lock:
            sent = transfer.ended
            if sent is None or self._transfers.pop(transfer.grant.key, None) is None:
                return
        if transfer.last_pushed_at_s is not None:  # the exposed time includes the conversion
            sent = replace(sent, exposed_s=time.monotonic() - transfer.last_pushed_at_s)
        if transfer.error and sent.outcome is SendOutcome.FAILED:
            sent = replace(sent, error=transfer.error)
        transfer.on_end(replace(sent, wire_dtype=self._dtype))

    def _release(self, blocks: Sequence[int]) -> None:
        """With the lock held."""
        self._free.extend(blocks)
        self._lock.notify_all()


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
        return self.plain.moved_bytes + sum(one.moved_bytes for one in self.reshapers)

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
