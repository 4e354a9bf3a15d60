"""Failures on this side: no more threads, a bug in our code, a missing package or kernel file."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvtransfer.devices import fused
from kvtransfer.link import outbound, receiver
from kvtransfer.link.channel import MAX_OUTBOX, Channel, Gone, Writer
from kvtransfer.link.dial import DataConnection, dial
from kvtransfer.link.inbound import Inbound
from kvtransfer.link.outbound import Outbound
from kvtransfer.link.sender import PlainSender
from kvtransfer.protocol.frames import Checksum, available_checksums, tag_of
from kvtransfer.protocol.send_transfers import SendTransfers
from kvtransfer.protocol.transport import ReceiveOutcome, SendOutcome
from kvtransfer.transports.common import slots
from kvtransfer.transports.shm import Shm, ShmReceive
from kvtransfer.transports.tcp import TcpReceive
from pdserve.core.errors import TransferFailed, Unavailable
from tests.support.transfer_ends import endpoint_config
from tests.unit.kvtransfer.harness import WAIT_S, Heard, HostPool, Pair, fingerprint, wait_for
from tests.unit.kvtransfer.raw import RawSender, assert_still_serves

MakePair = Callable[..., Pair]


def no_more_threads(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


# Threads.


def test_a_receiver_without_threads_refuses_connections(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Inbound, "start", no_more_threads)
        received, sent = pair.begin(pair.grant((1,)))
        assert sent.wait().outcome is SendOutcome.FAILED
        wait_for(lambda: pair.receiver.stats.refused_connections >= 1, "the count")
        assert not pair.receiver.peers
        pair.receiver.abort(pair.receiver.open_keys[0])
        assert received.wait().outcome is ReceiveOutcome.DRAINED
    assert_still_serves(pair)


def open_files() -> set[str]:
    """The open files of this process by inode, because descriptor numbers are reused."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # Closed in the meantime.
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return found


def test_a_sender_without_threads_reports_the_error(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(Outbound, "start", no_more_threads)
        for _ in range(3):
            with pytest.raises(Unavailable, match=r"no KV connection to .* can be made: can't start new thread"):
                pair.sender.start(pair.grant((1,)), Heard())
    assert pair.sender.open_keys == []
    assert open_files() <= before
    assert_still_serves(pair)


def test_a_bug_in_a_connection_fails_only_its_transfers(
    pair: Pair, transport: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    with monkeypatch.context() as patch:
        patch.setattr(ShmReceive if transport == "shm" else TcpReceive, "receive", broken)
        received, sent = pair.move(pair.grant((1, 2)), (5, 6))
    assert (received.outcome, sent.outcome) == (ReceiveOutcome.FAILED, SendOutcome.FAILED)
    assert received.error == "sender p0: the connection's thread died"
    assert "a bug of ours" in caplog.text
    assert_still_serves(pair)


def test_an_answer_that_cannot_be_sent_loses_no_report(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> bytes:
        raise ZeroDivisionError("a bug of ours")

    with monkeypatch.context() as patch:
        patch.setattr(receiver, "_encode", broken)
        received, sent = pair.move(pair.grant((1, 2)), (5, 6))
    assert (received.outcome, sent.outcome) == (ReceiveOutcome.VERIFIED, SendOutcome.FAILED)
    assert "a bug of ours" in caplog.text
    assert_still_serves(pair)


def test_a_bug_in_a_senders_connection_fails_its_transfers(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    received, sent = pair.begin(grant := pair.grant((1, 2)))
    wait_for(lambda: bool(pair.receiver._table._open[tag_of(grant.key)].shards), "the announcement")
    with monkeypatch.context() as patch:
        patch.setattr(SendTransfers, "take", broken)
        pair.sender.push(grant.key, [(0, 5), (1, 6)], True)
        assert (received.wait().outcome, sent.wait().outcome) == (ReceiveOutcome.FAILED, SendOutcome.FAILED)
    assert sent.all[0].error == f"{pair.host.endpoint}: the connection's thread died"
    assert "a bug of ours" in caplog.text
    assert_still_serves(pair)


def test_a_bug_while_dialling_fails_the_transfers_that_wait_for_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    with monkeypatch.context() as patch:
        patch.setattr("kvtransfer.link.dial.dial", broken)
        sent = Heard()
        pair.sender.start(pair.grant((1,)), sent)
        assert sent.wait().error == f"{pair.host.endpoint}: dialling failed: a bug of ours"
    assert_still_serves(pair)


@pytest.mark.parametrize("is_heard", [False, True], ids=["after the end", "just before it"])
def test_a_connection_that_is_made_too_late_is_closed_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, is_heard: bool
) -> None:
    """Its transfers have ended when it connects: before, or while they are being ended."""
    is_dialled, go_on = threading.Event(), threading.Event()

    def late(*args: Any) -> DataConnection:
        connection = dial(*args)
        is_dialled.set()
        assert go_on.wait(WAIT_S)
        return connection

    monkeypatch.setattr("kvtransfer.link.dial.dial", late)
    received, sent = pair.begin(pair.grant((1,)))
    assert is_dialled.wait(WAIT_S)
    wait_for(lambda: len(pair.receiver.peers) == 1, "the connection, on the other side")
    [connection] = pair.sender.plain._pairs.values()
    if is_heard:

        def give_up(table: SendTransfers, now_s: float) -> list[Any]:
            """The connection is made after the commands were taken and before the end."""
            go_on.set()
            wait_for(lambda: bool(connection._commands), "the word that it is up")
            raise outbound.Gone("the sender gives up")

        monkeypatch.setattr(SendTransfers, "expire", give_up)
        connection.wake()
    else:
        connection.stop()
    assert sent.wait().outcome is SendOutcome.FAILED
    go_on.set()
    wait_for(lambda: not pair.receiver.peers, "its end, on the other side")
    monkeypatch.undo()
    pair.receiver.abort(pair.receiver.open_keys[0])
    assert received.wait().outcome is ReceiveOutcome.DRAINED
    assert_still_serves(pair)


# Connections.


def test_connections_over_the_limit_are_rejected(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_still_serves(pair)
    with monkeypatch.context() as patch:
        patch.setattr("kvtransfer.link.receiver.MAX_CONNECTIONS", 1)
        with pytest.raises((TransferFailed, ConnectionError)):
            RawSender(pair, "one more").hear()  # tcp: the socket was accepted before it was rejected.
    wait_for(lambda: pair.receiver.stats.refused_connections == 1, "the count")
    assert_still_serves(pair)


def test_a_failed_accept_is_retried_later(pair: Pair) -> None:
    def no_more() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    pair.receiver._accept(SimpleNamespace(accept=no_more), next(iter(pair.receiver._listeners)))  # type: ignore[arg-type]
    assert pair.receiver.stats.refused_connections == 1
    assert_still_serves(pair)


def test_a_peer_that_reads_no_answers_is_disconnected() -> None:
    mine, theirs = socket.socketpair()
    channel = Channel(mine)
    for _ in range(1000):
        channel.post(bytes(1000))
    channel.flush()  # The socket is full, and the peer may be slow.
    for _ in range(MAX_OUTBOX):
        channel.post(bytes(1000))
    with pytest.raises(Gone, match="the peer does not read its answers"):
        channel.flush()
    theirs.close()
    channel.close()


def test_an_answer_to_a_lost_peer_raises() -> None:
    mine, theirs = socket.socketpair()
    channel = Channel(mine)
    theirs.close()
    channel.post(b"answer")
    with pytest.raises(Gone, match="connection lost"):
        channel.flush()
    channel.close()


def test_detached_frames_allow_memory_to_change() -> None:
    mine, theirs = socket.socketpair()
    channel, writer, is_free = Channel(mine), Writer(), threading.Event()
    memory = bytearray(b"a" * 1000)
    writer.write(b"small")
    writer.stream([memoryview(memory)], is_free.set)
    writer.advance(channel)  # The small frame alone.
    assert not is_free.is_set()
    writer.detach()
    assert is_free.is_set()
    memory[:] = b"b" * 1000
    while not writer.is_idle:
        writer.advance(channel)
    assert theirs.recv(5000) == b"small" + b"a" * 1000
    theirs.close()
    channel.close()


# Missing packages and system features.


def test_without_xxhash_blake2b_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_checksums()[0] is Checksum.XXH3_64
    monkeypatch.setitem(sys.modules, "xxhash", None)
    assert available_checksums() == (Checksum.BLAKE2B_64,)


def test_without_numba_blocks_are_still_copied(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    fused._is_installed.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "numba", None)
        pair = make_pair("shm")
        grant = pair.grant((9, 3, 4))
        assert pair.move(grant, (5, 6, 7))[0].outcome is ReceiveOutcome.VERIFIED
        pair.assert_equal(grant, (5, 6, 7))
        [connection] = pair.receiver._connections.values()
        assert isinstance(connection._half, ShmReceive)
        assert connection._half._copier is None
    fused._is_installed.cache_clear()


def test_a_host_without_an_id_shares_no_memory(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox without /proc. Two of them must not be treated as one host."""

    def unreadable(path: str) -> str:
        raise OSError("no /proc here")

    with monkeypatch.context() as patch:
        patch.setattr(os, "readlink", unreadable)
        assert slots.host_id() == ""
        pair = make_pair("auto")
        assert pair.move(pair.grant((1,)), (1,))[0].outcome is ReceiveOutcome.VERIFIED
        assert [link.transport for link in pair.sender.links] == ["tcp"]


def test_without_memory_files_no_host_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Shm().why_not() == ""
    monkeypatch.delattr(os, "memfd_create")
    assert Shm().why_not() == "shm needs Linux"
    assert slots.host_id() == ""


def test_another_users_process_is_rejected(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair("shm")
    me, here = os.geteuid(), slots.host_id()
    with monkeypatch.context() as patch:
        patch.setattr("kvtransfer.link.dial.host_id", lambda: here)
        patch.setattr(os, "geteuid", lambda: me + 1)
        sent = Heard()
        pair.sender.start(pair.grant((1,)), sent)
        assert sent.wait().outcome is SendOutcome.FAILED
        wait_for(lambda: pair.receiver.stats.refused_connections == 1, "the refusal")
    assert_still_serves(pair)


def test_a_sender_with_a_false_fingerprint_sends_nothing(pair: Pair) -> None:
    sender = PlainSender(
        endpoint_config(HostPool(64, 8), fingerprint(), worker_id="p1", incarnation="1", transport="tcp")
    )
    sent = Heard()
    sender.start(pair.grant((1,)), sent)
    assert sent.wait().error == "kv_shape.block_bytes: got 8, expected 4096"
    sender.close()
