"""The decode side over sockets: a listening thread, a thread per prefill worker, and one transfer table with one lock.

The listening thread also proves new connections, and ends transfers at their deadline. Callbacks come from these
threads, in the order of the table's decisions, and never from inside `expect` or `abort`.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Final, Generic, TypeVar, final

from kvtransfer.link.channel import Gone, Waker
from kvtransfer.link.endpoint_config import EndpointConfig
from kvtransfer.link.gate import Gate, Peer, TransferServicer
from kvtransfer.link.inbound import Accepted, Inbound
from kvtransfer.protocol.frames import BadFrame, Frame, Greeting, Kind, Tag, encode_text
from kvtransfer.protocol.plan import DEFAULT_CHUNK_BYTES, Part, host_view
from kvtransfer.protocol.receive_transfers import Action, ReceiveTransfers, ReplyToSender, Sever
from kvtransfer.protocol.transfers import Claim
from kvtransfer.protocol.transport import OnOpen, Received, ReceiveOutcome, Sent, TransferStats
from kvtransfer.transports.common.interface import Transport
from kvtransfer.transports.common.registry import fence_of
from kvtransfer.transports.common.slots import host_id
from pdserve.core.access.shares import to_close
from pdserve.core.durations import clamped_s
from pdserve.core.errors import ConfigError, InvalidRequest, Unavailable
from pdserve.core.kv.kv_shape import Grant, TransferKey
from pdserve.outage_log import LogLimit, OutageLog, PeerLog

# --- reports of results ---------------------------------------------------------------------------------------
# They go to the owners of transfers, in the order of the table's decisions, without holding its lock.

log = logging.getLogger(__name__)

Result = TypeVar("Result", Received, Sent)


@final
class Reports(Generic[Result]):
    """`lock` guards the transfer table and this object."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._owners: dict[TransferKey, Callable[[Result], None]] = {}
        self._results: deque[Result] = deque()
        self._delivery = threading.Lock()  # held while ends are delivered, so that they stay in order

    def __len__(self) -> int:
        """Transfers that have an owner."""
        return len(self._owners)

    @property
    def is_waiting(self) -> bool:
        """Whether a result waits for `deliver`. With the lock held."""
        return bool(self._results)

    def own(self, key: TransferKey, owner: Callable[[Result], None]) -> None:
        """With the lock held."""
        self._owners[key] = owner

    def disown(self, key: TransferKey) -> None:
        """With the lock held."""
        self._owners.pop(key, None)

    def add(self, end: Result) -> None:
        """With the lock held."""
        self._results.append(end)

    def deliver(self) -> None:
        """Without the lock."""
        if not self._results:
            return
        with self._delivery:
            while True:
                with self._lock:
                    if not self._results:
                        return
                    end = self._results.popleft()
                    keeps = end.outcome is ReceiveOutcome.QUARANTINED
                    owner = self._owners[end.key] if keeps else self._owners.pop(end.key)
                try:
                    owner(end)
                except Exception:  # an error of one owner must not end the other owners' transfers
                    log.exception("on_end of a transfer raised", extra={"transfer_id": end.key.transfer_id})


# --- receiver -------------------------------------------------------------------------------------------------

MAX_CONNECTIONS: Final = 256  # connections of authenticated senders
MAX_PENDING: Final = 32  # connections that have not proven themselves; one more closes another one
_BACKLOG: Final = 128  # connections that wait in the kernel, all of which are accepted at once
_JOIN_S: Final = 5.0
_ACCEPT_PAUSE_S: Final = 0.05
_NO_ROOM: Final = "it was not authenticated when another connection needed its place"

OnReceived = Callable[[Received], None]


class PlainReceiver:
    def __init__(self, config: EndpointConfig, host: str, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        """Listens at once, on `host` and free ports. Raises ConfigError."""
        pool, fingerprint, lease = config.pool, config.fingerprint, config.lease
        if pool.block_bytes != fingerprint.block_bytes:
            raise ConfigError("kv_shape.block_bytes", fingerprint.block_bytes, f"{pool.block_bytes}, as in the pool")
        self.pool, self.memory, self.block_bytes = pool, host_view(pool), pool.block_bytes
        self.shape = fingerprint.shape
        self.chunk_bytes = max(chunk_bytes, pool.block_bytes)
        self.clock, self.tls, self.lease = config.clock, config.tls, lease
        self._config = config
        self._table = ReceiveTransfers(
            config.stamps,
            grace_s=lease.grace_s,
            quarantine_s=lease.quarantine_s,
            stall_s=lease.stall_s,
            unclaimed_s=lease.unclaimed_s,
        )
        self._lock = threading.Lock()  # guards the table, the connections and the reports
        self._reports: Reports[Received] = Reports(self._lock)
        self._sleeps_until_s = 0.0  # when the listening thread looks for timeouts without being woken
        self._connections: dict[int, Inbound] = {}
        self._accepted: dict[int, Accepted] = {}  # by descriptor, oldest first; of the listening thread alone
        self._ending: list[Inbound] = []  # connections that write no more, but whose threads have not ended yet
        self._is_closed = False
        self._refusals = LogLimit()
        self._lines = PeerLog(log)
        self._senders = OutageLog(log, "kv sender disconnected", "kv connection taken", level=logging.INFO)
        self._number = 0
        self._thread = threading.Thread(target=self._run, name=f"kv-receiver-{config.worker_id}", daemon=True)
        with ExitStack() as opened:
            self._listeners = {one: opened.enter_context(_listen(one, host)) for one in config.transports}
            addresses = {one.kind: one.address(listener) for one, listener in self._listeners.items()}
            self._gate = Gate(config, host_id(), addresses, self.chunk_bytes, self._table.stats)
            self.servicer = TransferServicer(self._gate)
            self._waker = opened.enter_context(closing(Waker()))
            self._selector = opened.enter_context(selectors.DefaultSelector())  # of that thread, too
            self._thread.start()
            opened.pop_all()  # they are closed by `close`, and the selector by the thread

    # Called by the decode worker.

    @property
    def rank_endpoints(self) -> tuple[str, ...]:
        return ()

    @property
    def is_healthy(self) -> bool:
        """False after a required thread has died, and after close()."""
        return self._thread.is_alive() and not self._is_closed

    @property
    def stats(self) -> TransferStats:
        with self._lock:
            return dataclasses.replace(self._table.stats)

    @property
    def peers(self) -> list[str]:
        """Ids of the senders that are connected."""
        with self._lock:
            return [one.peer.sender_id for one in self._connections.values()]

    @property
    def open_keys(self) -> list[TransferKey]:
        """Transfers that have not ended."""
        with self._lock:
            return self._table.keys

    def expect(
        self,
        grant: Grant,
        on_end: OnReceived,
        deadline_s: float | None = None,
        content_hashes: Sequence[int] | None = None,
        on_open: OnOpen | None = None,
    ) -> bool:
        blocks = grant.blocks
        if blocks and not (min(blocks) >= 0 and max(blocks) < self.pool.num_blocks):
            raise InvalidRequest("grant.blocks", f"{min(blocks)}..{max(blocks)}", f"0..{self.pool.num_blocks - 1}")
        if len(set(blocks)) != len(blocks):
            raise InvalidRequest("grant.blocks", "a block twice", "each block once")
        now_s = self.clock()
        after = fence_of(self.pool, self._config.transports)  # work that is queued later does not use these blocks
        with self._lock:
            if self._is_closed or not self._thread.is_alive():
                raise Unavailable("the KV receiver is closed")
            deadline_at_s = None if deadline_s is None else now_s + deadline_s
            actions = self._table.expect(grant, now_s, deadline_at_s, content_hashes, after)
            self._reports.own(grant.key, on_end)
            self._do(actions)
            next_s = self._table.next_alarm_s
            # Otherwise the listening thread learns of the new deadline when it wakes up anyway.
            is_needed = self._reports.is_waiting or (next_s is not None and next_s < self._sleeps_until_s)
        if is_needed:
            self._waker.set()
        return True

    def abort(self, key: TransferKey) -> None:
        with self._lock:
            self._do(self._table.abort(key, self.clock()))
        self._waker.set()

    def fail(self, key: TransferKey, error: str) -> None:
        with self._lock:
            self._do(self._table.fail(key, error, self.clock()))
        self._waker.set()

    def close(self) -> None:
        """Ends every transfer that is open (FAILED) and every thread. Not from a callback."""
        with self._lock:
            self._is_closed = True  # from now on, no connection's thread starts
            connections = [*self._connections.values(), *self._ending]
        self._waker.set()
        for inbound in connections:
            inbound.stop()
        self._thread.join(_JOIN_S)  # first, because it starts the threads of connections
        for inbound in connections:
            if inbound.is_alive():
                inbound.join(_JOIN_S)
        self._decide(lambda now_s: self._table.fail_all("the receiver is closed", now_s))
        for listener in self._listeners.values():
            listener.close()
        self._waker.close()

    # Called by connections, on their threads.

    def connected(self, peer: Peer, transport: str) -> None:
        facts = {"sender_id": peer.sender_id, "transport": transport, "reason": peer.transport_reason}
        self._senders.recovered(_name_of(peer), **facts)

    def announce(self, tag: Tag, writer: int, part: Part, num_shards: int) -> None:
        with self._lock:
            self._do(self._table.announce(tag, writer, part.shard, part.groups, self.clock(), num_shards))

    def claim(self, frame: Frame, writer: int, stamps: bytes) -> Claim | None:
        with self._lock:
            claim = self._table.claim(frame.tag, writer, frame.first, stamps, self.clock(), frame.part)
            if claim is None:
                self._do(self._table.review(frame.tag, self.clock()))
        self._reports.deliver()
        return claim

    def enter(self, claim: Claim) -> bool:
        with self._lock:
            if self._table.enter(claim):
                return True
            self._do(self._table.review(claim.transfer.tag, self.clock()))
        self._reports.deliver()
        return False

    def leave(self, claim: Claim) -> None:
        self._decide(lambda now_s: self._table.leave(claim, now_s))

    def settle(self, claim: Claim, num_bytes: int, matches: bool, is_last: bool) -> None:
        self._decide(lambda now_s: self._table.settle(claim, num_bytes, matches, is_last, now_s))

    def retract(self, tag: Tag, writer: int, error: str, *, is_cancelled: bool) -> None:
        self._decide(lambda now_s: self._table.retract(tag, writer, error, now_s, is_cancelled=is_cancelled))

    def ended(self, inbound: Inbound, error: str, *, is_peers_fault: bool, is_silent: bool) -> None:
        who = inbound.peer.sender_id
        with self._lock:
            self._connections.pop(inbound.number, None)
            self._ending = [inbound, *(one for one in self._ending if one.is_alive() and one is not inbound)]
            self._table.stats.protocol_errors += is_peers_fault
            self._table.stats.silent += is_silent
            self._do(self._table.cut(inbound.number, f"sender {who}: {error}", self.clock()))
        if is_peers_fault:
            self._lines.warning("kv sender broke the protocol", who, sender_id=who, error=error)
        self._senders.failed(_name_of(inbound.peer), sender_id=who, error=error)
        self._reports.deliver()

    # Inside.

    def _decide(self, decide: Callable[[float], Sequence[Action]]) -> None:
        with self._lock:
            self._do(decide(self.clock()))
        self._reports.deliver()

    def _do(self, actions: Sequence[Action]) -> None:
        """With the lock held. The table makes each action once, so an error in one must not lose those after it."""
        for action in actions:
            if isinstance(action, ReplyToSender):
                inbound = self._connections.get(action.writer)
                if inbound is None:
                    continue
                try:
                    inbound.post(_encode(action))
                except Exception:  # the sender would wait for the answer for ever
                    log.exception(
                        "an answer to a kv sender could not be sent", extra={"sender": inbound.peer.sender_id}
                    )
                    inbound.stop("an answer could not be sent")
            elif isinstance(action, Sever):
                if (writer := self._connections.get(action.writer)) is not None:
                    writer.stop("one of its writes did not end in time after the transfer was abandoned")
            else:
                self._reports.add(action.received)

    def _run(self) -> None:
        try:
            with self._selector as selector:
                selector.register(self._waker, selectors.EVENT_READ, None)
                for transport, listener in self._listeners.items():
                    selector.register(listener, selectors.EVENT_READ, transport)
                while not self._is_closed:
                    self._tick()
        # without this thread there are no deadlines and no new connections, so the receiver must end
        except Exception:
            log.critical("the KV receiver's thread died", exc_info=True)
            with self._lock:
                self._is_closed = True
                self._do(self._table.fail_all("the receiver's thread died", self.clock()))
            self._reports.deliver()
        finally:
            for one in self._accepted.values():
                one.socket.close()

    def _tick(self) -> None:
        alarms_s = [one.ends_s for one in itertools.islice(self._accepted.values(), 1)]
        with self._lock:
            alarms_s += [one for one in (self._table.next_alarm_s,) if one is not None]
            self._sleeps_until_s = min(alarms_s, default=math.inf)
        timeout_s = clamped_s(self._sleeps_until_s - self.clock()) if alarms_s else None
        for transport in self._prove(timeout_s):
            self._accept(self._listeners[transport], transport)
        for one in [one for one in self._accepted.values() if one.ends_s <= self.clock()]:
            self._drop(one, one.missing)
        self._waker.clear()
        self._decide(self._table.expire)

    def _prove(self, timeout_s: float | None) -> list[Transport]:
        """Takes the next step of each connection that is ready. Returns the transports that have new ones."""
        ready = [key.data for key, _ in self._selector.select(timeout_s)]
        for one in ready:
            if isinstance(one, Accepted):
                self._advance(one)
        return [one for one in ready if one is not None and not isinstance(one, Accepted)]

    def _accept(self, listener: socket.socket, transport: Transport) -> None:
        """All that wait. The kernel's queue has no shares, so one host's connections would delay all others."""
        for _ in range(_BACKLOG):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # the peer has disconnected already, or the process has no more descriptors
                self._refused(str(error))
                time.sleep(_ACCEPT_PAUSE_S)  # the socket stays readable, so without a pause this thread would spin
                return
            try:
                if not transport.admits(sock):
                    raise OSError("it is another user's")
                accepted = Accepted(sock, transport, self.tls, self.clock())
                self._selector.register(accepted.fd, accepted.events, accepted)
            except OSError as error:
                self._refused(str(error))
                sock.close()
                continue
            self._accepted[accepted.fd] = accepted
            self._make_room()

    def _make_room(self) -> None:
        if len(self._accepted) > MAX_PENDING:
            self._prove(0.0)  # what has arrived since the last time counts
        if len(self._accepted) > MAX_PENDING:
            silent = {one: one.host for one in self._accepted.values() if not one.has_sent}
            active = [one for one in self._accepted.values() if one.has_sent]
            active.sort(key=lambda one: one.is_secured)  # bytes do not count, because anyone can send a few
            closed = to_close(silent, {one: one.host for one in active}, self._gate.expected())
            assert closed is not None
            self._drop(closed, _NO_ROOM)

    def _advance(self, accepted: Accepted) -> None:
        events = accepted.events
        try:
            greeting = accepted.advance()
        except Gone as gone:
            self._drop(accepted, str(gone))
        except BadFrame as bad:
            self._drop(accepted, f"protocol error: {bad}", is_peers_fault=True)
        except Exception:  # ends this connection, not the thread of all of them
            log.exception("a kv connection could not be authenticated")
            self._drop(accepted, "an error on this side")
        else:
            if greeting is not None:
                self._admit(accepted, greeting)
            elif accepted.events != events:
                self._selector.modify(accepted.fd, accepted.events, accepted)

    def _admit(self, accepted: Accepted, greeting: Greeting) -> None:
        """To a thread of its own. A sender's new connection replaces its old ones of the same kind, because a sender
        connects again only if those have failed."""
        if len(self._connections) >= MAX_CONNECTIONS:  # only this thread adds one
            self._drop(accepted, f"{MAX_CONNECTIONS} connections are open already")
            return
        admitted = self._gate.admit(greeting, accepted.transport.kind)
        if admitted is None:
            self._drop(accepted, "no valid ticket, or no proof of the cluster's secret")
            return
        peer, answer = admitted
        self._number += 1
        try:
            inbound = Inbound(self, accepted, peer, self._number)
        except OSError as error:  # the process has no more descriptors
            self._drop(accepted, str(error))
            return
        self._forget(accepted)
        inbound.post(answer)
        with self._lock:
            old = [one for one in self._connections.values() if one.peer.kind == peer.kind]
            self._connections[inbound.number] = inbound
        for one in old:
            one.stop("replaced by its newer connection")
        try:
            if self._is_closed:  # close() may not have seen this connection
                raise RuntimeError("the receiver is closed")
            inbound.start()  # without the lock, for which each chunk waits
        except RuntimeError as error:  # also if the process has no more threads
            with self._lock:
                del self._connections[inbound.number]
            inbound.channel.close()
            self._refused(str(error))

    def _drop(self, accepted: Accepted, why: str, *, is_peers_fault: bool = False) -> None:
        self._forget(accepted)
        accepted.socket.close()
        self._refused(why, is_peers_fault=is_peers_fault)

    def _forget(self, accepted: Accepted) -> None:
        del self._accepted[accepted.fd]
        self._selector.unregister(accepted.fd)

    def _refused(self, error: str, *, is_peers_fault: bool = False) -> None:
        with self._lock:
            self._table.stats.refused_connections += 1
            self._table.stats.protocol_errors += is_peers_fault
            if count := self._refusals.due(self.clock()):  # any process that reaches the port can cause refusals
                log.warning("kv connections were refused", extra={"connections": count, "error": error})


def _name_of(peer: Peer) -> str:
    return f"{peer.sender_id} {peer.transport}"


def _encode(answer: ReplyToSender) -> bytes:
    if answer.is_verified:
        return Frame(Kind.DONE, answer.tag, slot=min(round(answer.busy_s * 1e6), 2**32 - 1)).encode()
    return encode_text(Kind.REFUSE, answer.tag, answer.error, is_cancelled=answer.is_cancelled)


def _listen(transport: Transport, host: str) -> socket.socket:
    with ExitStack() as opened:
        listener = opened.enter_context(transport.listen(host))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        opened.pop_all()
    return listener
