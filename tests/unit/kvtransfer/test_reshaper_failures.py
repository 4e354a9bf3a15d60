"""A sender that converts blocks: faults, aborts and deadlines of its transfers."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvtransfer.link.dial import dial
from kvtransfer.protocol.frames import Frame, Kind, tag_of
from kvtransfer.protocol.plan import Part
from kvtransfer.protocol.transport import ReceiveOutcome, SendOutcome
from kvtransfer.reshape import sender
from pdserve.core.errors import InvalidRequest, Unavailable
from tests.support.transfer_ends import WAIT_S
from tests.unit.kvtransfer.harness import Heard, wait_for
from tests.unit.kvtransfer.shapes import NUM_BLOCKS, PAIRS, MakeShapes, Shapes, opened_shapes


@pytest.fixture(params=["tcp", "shm", "nixl-stand-in"])
def transport(request: pytest.FixtureRequest, prepared: Callable[[str], str]) -> str:
    return prepared(request.param)


@pytest.fixture
def make_shapes(transport: str) -> Iterator[MakeShapes]:
    with opened_shapes(transport) as make:
        yield make


def failed(shapes: Shapes, received: Heard, sent: Heard) -> str:
    assert received.wait().outcome is ReceiveOutcome.FAILED
    assert sent.wait().outcome is SendOutcome.FAILED
    wait_for(lambda: shapes.num_staged == 0, "staging blocks")
    assert len(sent.all) == 1
    error: str = sent.wait().error
    return error


def test_a_source_block_that_is_reused_fails_the_transfer(make_shapes: MakeShapes) -> None:
    shapes = make_shapes(*PAIRS[0])
    grant, text, sources = shapes.grant(64)
    received, sent = shapes.begin(grant, text)
    shapes.sender.push(grant.key, [(0, sources[0])], False)  # Half of a target block, which is not converted yet.
    shapes.stamps[0].begin([sources[0]])
    shapes.stamps[0].mark(sources[0], text.own[0])  # It even has the same contents again, but may change at any time.
    shapes.sender.push(grant.key, list(enumerate(sources))[1:], True)
    assert failed(shapes, received, sent) == "a source block was reassigned while it was being converted"
    assert shapes.sender.stats.stale_source == 1


def test_a_source_block_of_another_text_fails_the_transfer(make_shapes: MakeShapes) -> None:
    shapes = make_shapes(*PAIRS[0])
    grant, text, sources = shapes.grant(64)
    shapes.stamps[0].mark(sources[3], 77)
    received, sent = shapes.begin(grant, text)
    shapes.sender.push(grant.key, list(enumerate(sources)), True)
    assert failed(shapes, received, sent) == "a source block does not have the content hash of the prompt's block"
    assert shapes.sender.stats.stamp_mismatches == 1


@pytest.mark.parametrize(
    ("pushes", "error"),
    [
        ([([(1, 5)], False)], "source block 1 was pushed, expected 0"),
        ([([(0, 5)], False), ([(0, 5)], True)], "source block 0 was pushed, expected 1"),
        ([([(0, 5), (1, 6)], True)], "the last push leaves 32 of 64 tokens out"),
    ],
)
def test_incomplete_pushes_fail_the_transfer(make_shapes: MakeShapes, pushes: Any, error: str) -> None:
    shapes = make_shapes(*PAIRS[0])
    grant, text, _ = shapes.grant(64)
    received, sent = shapes.begin(grant, text)
    for blocks, is_last in pushes:
        shapes.sender.push(grant.key, blocks, is_last)
    assert failed(shapes, received, sent) == error


def test_a_block_outside_the_pool_is_refused_at_once(make_shapes: MakeShapes) -> None:
    shapes = make_shapes(*PAIRS[0])
    grant, text, _ = shapes.grant(64)
    shapes.begin(grant, text)
    for number in (-1, NUM_BLOCKS):
        with pytest.raises(InvalidRequest, match=f"source block {number}"):
            shapes.sender.push(grant.key, [(0, number)], False)


def test_a_text_that_does_not_match_the_grant_is_rejected(make_shapes: MakeShapes) -> None:
    shapes = make_shapes(*PAIRS[0])
    grant, text, _ = shapes.grant(64)
    for wrong in (None, replace(text, num_tokens=65), replace(text, theirs=text.theirs[1:])):
        with pytest.raises(InvalidRequest, match="what fills 2 blocks of 32 after 0"):
            shapes.sender.start(grant, Heard(), None, wrong)
    assert shapes.sender.open_keys == []
    shapes.begin(grant, text)  # Expected, so that it stays open: a receiver ends transfers that it does not expect.
    with pytest.raises(InvalidRequest, match="not been started already"):
        shapes.sender.start(grant, Heard(), None, text)


def test_an_abort_frees_the_source_and_the_staging(make_shapes: MakeShapes) -> None:
    shapes = make_shapes(*PAIRS[3])
    for is_receivers in (False, True):
        grant, text, sources = shapes.grant(100)
        received, sent = shapes.begin(grant, text)
        shapes.sender.push(grant.key, list(enumerate(sources))[:4], False)
        if is_receivers:
            shapes.receiver.abort(grant.key)
            assert received.wait().outcome is ReceiveOutcome.DRAINED
        else:
            shapes.sender.abort(grant.key)
        assert sent.wait().outcome is SendOutcome.FAILED
        wait_for(lambda: shapes.num_staged == 0, "staging blocks")


def test_a_deadline_ends_a_transfer_that_waits_for_its_text(make_shapes: MakeShapes) -> None:
    shapes = make_shapes(*PAIRS[0])
    grant, text, sources = shapes.grant(100)
    received, sent = shapes.begin(grant, text, deadline_s=0.3)
    shapes.sender.push(grant.key, list(enumerate(sources))[:3], False)
    assert "deadline" in failed(shapes, received, sent)


def test_nothing_is_reported_while_a_source_block_is_being_read(
    make_shapes: MakeShapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_packing, may_go_on = threading.Event(), threading.Event()

    def slow_pack(*args: Any) -> None:
        is_packing.set()
        assert may_go_on.wait(WAIT_S)

    monkeypatch.setattr(sender, "pack", slow_pack)
    shapes = make_shapes(*PAIRS[0])
    grant, text, sources = shapes.grant(100)
    received, sent = shapes.begin(grant, text)
    shapes.sender.push(grant.key, list(enumerate(sources)), True)
    assert is_packing.wait(WAIT_S)
    shapes.sender.abort(grant.key)
    assert received.wait().outcome is ReceiveOutcome.FAILED
    assert sent.all == []
    may_go_on.set()
    assert sent.wait().outcome is SendOutcome.FAILED


def test_a_conversion_that_raises_ends_its_transfer_only(
    make_shapes: MakeShapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise MemoryError("no room")

    shapes = make_shapes(*PAIRS[0])
    with monkeypatch.context() as patch:
        patch.setattr(sender, "pack", broken)
        grant, text, sources = shapes.grant(100)
        received, sent = shapes.begin(grant, text)
        shapes.sender.push(grant.key, list(enumerate(sources)), True)
        assert failed(shapes, received, sent) == "converting KV failed: no room"
    grant, text, sources = shapes.grant(100)
    received, sent = shapes.begin(grant, text)
    shapes.sender.push(grant.key, list(enumerate(sources)), True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED


class Lagging:
    """A lock that the converting thread acquires late, once, after it has packed."""

    def __init__(self, lock: threading.Condition, until: Callable[[], None]) -> None:
        self._lock, self._until = lock, until
        self.is_armed = False
        self.wait, self.notify_all = lock.wait, lock.notify_all

    def __enter__(self) -> None:
        self._lock.__enter__()

    def __exit__(self, *_: Any) -> None:
        self._lock.__exit__(None, None, None)
        if self.is_armed and threading.current_thread().name == "kv-reshaper":
            self.is_armed = False
            self._until()


def test_an_end_during_conversion_is_reported_once(make_shapes: MakeShapes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both threads find that the transfer has ended and that its source is not being read."""
    shapes = make_shapes(*PAIRS[0])
    grant, text, sources = shapes.grant(64)
    received, sent = shapes.begin(grant, text)
    [one] = shapes.sender.reshapers

    def until() -> None:
        one.abort(grant.key)
        sent.wait()

    lagging = Lagging(one._lock, until)
    monkeypatch.setattr(one, "_lock", lagging)
    convert = sender.pack

    def packed(*args: Any) -> None:
        convert(*args)
        lagging.is_armed = True  # The next release of the lock by this thread is after packing.

    monkeypatch.setattr(sender, "pack", packed)
    shapes.sender.push(grant.key, list(enumerate(sources)), True)
    assert sent.wait().outcome is SendOutcome.FAILED
    assert received.wait().outcome is ReceiveOutcome.FAILED
    wait_for(lambda: shapes.num_staged == 0, "staging blocks")
    assert len(sent.all) == 1


def test_messages_after_the_end_are_ignored(make_shapes: MakeShapes) -> None:
    shapes = make_shapes(*PAIRS[0])
    grant, text, sources = shapes.grant(64)
    _, sent = shapes.begin(grant, text)
    [one] = shapes.sender.reshapers
    shapes.sender.abort(grant.key)
    assert sent.wait().outcome is SendOutcome.FAILED
    one.push(grant.key, list(enumerate(sources)), True)
    one.abort(grant.key)
    assert (len(sent.all), shapes.num_staged) == (1, 0)


def test_a_reshaper_without_descriptors_reports_the_error(
    make_shapes: MakeShapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    shapes = make_shapes(*PAIRS[0])
    grant, text, sources = shapes.grant(64)
    with monkeypatch.context() as patch:
        patch.setattr("os.pipe", no_more)
        with pytest.raises(Unavailable, match="Too many open files"):
            shapes.sender.start(grant, Heard(), None, text)
    assert shapes.sender.open_keys == []
    received, _ = shapes.begin(grant, text)
    shapes.sender.push(grant.key, list(enumerate(sources)), True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED


INT8_TO_FLOAT = PAIRS[5]  # Sent as int8, and widened by the receiver.


def test_an_abort_before_conversion_writes_nothing(make_shapes: MakeShapes, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = make_shapes(*INT8_TO_FLOAT)
    grant, text, sources = shapes.grant(64)
    before = bytes(shapes.target.memory)
    received, sent = shapes.begin(grant, text)

    def matches(one: bytes, other: bytes) -> bool:
        shapes.receiver.abort(grant.key)
        return one == other

    with monkeypatch.context() as patch:
        patch.setattr("kvtransfer.reshape.convert.hmac", SimpleNamespace(compare_digest=matches))
        shapes.sender.push(grant.key, list(enumerate(sources)), True)
        assert received.wait().outcome is ReceiveOutcome.DRAINED
        assert sent.wait().outcome is SendOutcome.FAILED
    assert bytes(shapes.target.memory) == before


def test_single_layer_groups_are_not_converted(make_shapes: MakeShapes) -> None:
    """The other layers would be old contents of the staging area."""
    shapes = make_shapes(*INT8_TO_FLOAT)
    grant, text, sources = shapes.grant(64)
    received, _ = shapes.begin(grant, text)
    shapes.sender.push(grant.key, list(enumerate(sources)), True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    [one] = shapes.sender.reshapers
    caller = replace(one._inner.config, worker_id="raw")
    connection = dial(caller, shapes.host.endpoint, "d0-1")
    grant, text, _ = shapes.grant(64)
    received, tag = Heard(), tag_of(grant.key)
    shapes.receiver.expect(grant, received, None, text.theirs)
    part = Part(0, 0, 2)
    connection.socket.sendall(Frame(Kind.ANNOUNCE, tag, part=part).encode())
    connection.socket.sendall(Frame(Kind.CHUNK, tag, 0, 1, 0, 4, b"c" * 8, False, part).encode())
    expected = "protocol error: layer group 0 of 2 of blocks that are to be converted"
    assert received.wait().error == f"sender raw: {expected}"
    connection.close()


def test_closing_ends_what_is_open(make_shapes: MakeShapes) -> None:
    shapes = make_shapes(*PAIRS[0])
    grant, text, sources = shapes.grant(100)
    received, sent = shapes.begin(grant, text)
    shapes.sender.push(grant.key, list(enumerate(sources))[:2], False)
    wait_for(lambda: shapes.receiver.stats.chunks == 1, "a chunk")
    shapes.sender.close()
    assert sent.wait().outcome is SendOutcome.FAILED
    assert received.wait().outcome is ReceiveOutcome.FAILED
    with pytest.raises(Unavailable):
        shapes.sender.start(grant, Heard(), None, text)
    [one] = shapes.sender.reshapers  # Called by a thread that had found the transfer just before.
    with pytest.raises(Unavailable):
        one.start(grant, Heard(), None, text)
