"""A sender whose blocks have another shape than the receiver's, over real connections."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.secret import SECRET
from benchmarks.transfer_ends import WAIT_S, GrpcHost, HostPool, fingerprint
from kvtransfer.dial import dial
from kvtransfer.endpoint import make_receiver, make_sender
from kvtransfer.frames import Frame, Kind, tag_of
from kvtransfer.parts import Part
from kvtransfer.receiver import StreamReceiver
from kvtransfer.reshape import reshaper, wire_rule
from kvtransfer.reshape.convert import Blocks, pack, unpack
from kvtransfer.reshape.mapping import arrival_of, pieces_of, shards_of
from kvtransfer.reshape.sender import ShapedSender
from kvtransfer.transport import ReceiveOutcome, SendOutcome, Text
from pdserve.core.errors import InvalidRequest, Unavailable
from pdserve.core.grant import Fingerprint, Grant, TransferKey
from pdserve.core.kv_shape import KvShape, wire_dtype
from pdserve.core.stamps import BlockStamps
from tests.unit.kvtransfer.harness import PATIENT, Heard, wait_for
from tests.unit.kvtransfer.test_convert import shape_of

NUM_BLOCKS = 512


@dataclass
class Shapes:
    """Both ends, their pools and stamps."""

    source: HostPool
    target: HostPool
    stamps: tuple[BlockStamps, BlockStamps]
    shapes: tuple[KvShape, KvShape]
    sender: ShapedSender
    receiver: StreamReceiver
    host: GrpcHost
    order: random.Random = field(default_factory=lambda: random.Random(0))
    unused: list[list[int]] = field(default_factory=list)  # blocks of each side
    num_grants: int = 0

    def grant(self, num_tokens: int, held_blocks: int = 0) -> tuple[Grant, Text, list[int]]:
        """A grant in random blocks, what the sender knows of the text, and marked source blocks of it."""
        self.num_grants += 1
        source, target = (shape.block_size for shape in self.shapes)
        first = held_blocks * target // source
        self.unused = self.unused or [self.order.sample(range(NUM_BLOCKS), NUM_BLOCKS) for _ in range(2)]
        sources = [self.unused[0].pop() for _ in range(-(-num_tokens // source) - first)]
        blocks = [self.unused[1].pop() for _ in range(-(-num_tokens // target) - held_blocks)]
        self.stamps[0].begin(sources)
        text = Text(
            num_tokens=num_tokens,
            own=tuple(1000 + index for index in range(len(sources))),
            theirs=tuple(2000 + index for index in range(len(blocks))),
        )
        for block, name in zip(sources, text.own, strict=True):
            self.stamps[0].mark(block, name)
        grant = Grant(
            key=TransferKey(transfer_id=f"t{self.num_grants}", attempt=1, generation=self.num_grants),
            endpoint=self.host.endpoint,
            worker_id="d0",
            incarnation="d0-1",
            fingerprint=facts(self.shapes[1]),
            blocks=tuple(blocks),
            held_blocks=held_blocks,
        )
        return grant, text, sources

    def begin(self, grant: Grant, text: Text, deadline_s: float | None = None) -> tuple[Heard, Heard]:
        received, sent = Heard(), Heard()
        self.receiver.expect(grant, received, deadline_s, text.theirs)
        self.sender.start(grant, sent, deadline_s, text)
        return received, sent

    def expected(
        self, grant: Grant, text: Text, sources: list[int], dtype: str | None = None, *, is_whole: bool = True
    ) -> bytes:
        """The target pool with the transfer in it, converted without connection, by way of blocks of `dtype`.

        `is_whole`: it fills the blocks alone.
        """
        source, target = self.shapes
        arrival = arrival_of(source, target, dtype or target.dtype)
        memory = bytearray(self.target.memory)
        pool = Blocks(memory, target.form)
        if is_whole:
            pool.raw[list(grant.blocks)] = 0
        pieces = pieces_of(
            source.block_size,
            target.block_size,
            num_tokens=text.num_tokens,
            first_block=grant.held_blocks,
            num_blocks=len(grant.blocks),
        )
        packed = Blocks(bytearray(len(grant.blocks) * arrival.form.block_bytes), arrival.form)
        numbers = range(len(grant.blocks))
        pack(Blocks(self.source.memory, source.form), sources, arrival.out_of, packed, numbers, pieces)
        unpack(packed, pool, grant.blocks, arrival.into)
        return bytes(memory)

    @property
    def num_staged(self) -> int:
        return sum(one.num_staged for one in self.sender.reshapers)


def facts(shape: KvShape) -> Fingerprint:
    return fingerprint(shape=shape)


MakeShapes = Callable[..., Shapes]


@pytest.fixture(params=["tcp", "shm", "nixl-stand-in"])
def transport(request: pytest.FixtureRequest, prepared: Callable[[str], str]) -> str:
    return prepared(request.param)


@pytest.fixture
def make_shapes(transport: str) -> Iterator[MakeShapes]:
    made: list[Shapes] = []

    def make(source: KvShape, target: KvShape, kv_wire: str = "exact") -> Shapes:
        pools = [HostPool(NUM_BLOCKS, shape.block_bytes, seed=3) for shape in (source, target)]
        values = Blocks(pools[0].memory, source.form).values
        if source.dtype == "float32":
            values[:] = np.random.default_rng(0).standard_normal(values.shape)
        stamps = BlockStamps(NUM_BLOCKS), BlockStamps(NUM_BLOCKS)
        receiver = make_receiver(
            pools[1],
            facts(target),
            secret=SECRET,
            worker_id="d0",
            incarnation="d0-1",
            host="127.0.0.1",
            transport=transport,
            stamps=stamps[1],
            lease=PATIENT,
        )
        sender = make_sender(
            pools[0],
            facts(source),
            secret=SECRET,
            worker_id="p0",
            incarnation="p0-1",
            transport=transport,
            stamps=stamps[0],
            kv_wire=kv_wire,
            lease=PATIENT,
        )
        one = Shapes(*pools, stamps, (source, target), sender, receiver, GrpcHost(receiver.servicer))
        made.append(one)
        return one

    yield make
    for one in made:
        one.sender.close()
        one.receiver.close()
        one.host.stop()
        assert one.num_staged == 0


FLOAT_16 = shape_of("float32", 16, 4, head_dim=8)
PAIRS = [
    (FLOAT_16, replace(FLOAT_16, block_size=32)),
    (replace(FLOAT_16, block_size=32), FLOAT_16),
    (replace(FLOAT_16, block_size=5), replace(FLOAT_16, block_size=7)),
    (FLOAT_16, shape_of("int8", 32, 4, head_dim=8)),
    (FLOAT_16, shape_of("bfloat16", 16, 4, head_dim=8)),
    (shape_of("int8", 16, 4, head_dim=8), FLOAT_16),
    (shape_of("bfloat16", 16, 4, head_dim=8), replace(FLOAT_16, block_size=32)),
    (FLOAT_16, replace(FLOAT_16, tp_degree=2, tp_rank=1)),
    (replace(FLOAT_16, tp_degree=8, tp_rank=4), shape_of("int8", 32, 4, head_dim=8, tp_degree=4, tp_rank=2)),
]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_what_lands_is_what_conversion_gives(make_shapes: MakeShapes, source: KvShape, target: KvShape) -> None:
    shapes = make_shapes(source, target)
    for num_tokens, held in ((1, 0), (100, 0), (107, 2), (3 * target.block_size, 1)):
        grant, text, sources = shapes.grant(num_tokens, held)
        expected = shapes.expected(grant, text, sources)
        received, sent = shapes.begin(grant, text)
        at = 0
        while at < len(sources):  # as chunks of the prompt are computed
            end = min(at + shapes.order.randint(1, 4), len(sources))
            shapes.sender.push(grant.key, list(enumerate(sources))[at:end], end == len(sources))
            at = end
        assert received.wait().outcome is ReceiveOutcome.VERIFIED, received.all
        assert sent.wait().outcome is SendOutcome.SENT
        arrival = arrival_of(source, target, wire_dtype(source, target))
        assert sent.wait().num_bytes == len(grant.blocks) * arrival.form.block_bytes
        assert sent.wait().wire_dtype == wire_dtype(source, target)
        assert bytes(shapes.target.memory) == expected
    assert shapes.sender.open_keys == []
    wait_for(lambda: shapes.num_staged == 0, "staging blocks")
    assert shapes.sender.stats.verified == 4
    assert [link.endpoint for link in shapes.sender.links] == [shapes.host.endpoint]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (FLOAT_16, FLOAT_16),
        (FLOAT_16, replace(FLOAT_16, block_size=32)),
        (FLOAT_16, shape_of("bfloat16", 16, 4, head_dim=8)),
        (shape_of("bfloat16", 16, 4, head_dim=8), FLOAT_16),
    ],
)
def test_floats_may_travel_as_int8(make_shapes: MakeShapes, source: KvShape, target: KvShape) -> None:
    shapes = make_shapes(source, target, "int8")
    grant, text, sources = shapes.grant(107, 1)
    expected = shapes.expected(grant, text, sources, "int8")
    received, sent = shapes.begin(grant, text)
    shapes.sender.push(grant.key, list(enumerate(sources)), True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED, received.all
    assert bytes(shapes.target.memory) == expected
    assert sent.wait().wire_dtype == "int8"
    assert sent.wait().num_bytes < 0.8 * len(grant.blocks) * min(source.block_bytes, target.block_bytes)


def test_a_slow_link_is_found_and_its_transfers_travel_as_int8(
    make_shapes: MakeShapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_rule, "LEAST_BYTES", 1)
    monkeypatch.setattr(wire_rule, "CONVERTED_BYTES_S", 1e15)  # every link is slower
    shapes = make_shapes(FLOAT_16, FLOAT_16, "auto")
    seen = []
    for _ in range(3):
        grant, text, sources = shapes.grant(100)
        for block, name in zip(sources, text.theirs, strict=True):
            shapes.stamps[0].mark(block, name)
        text = replace(text, own=text.theirs)
        _, sent = shapes.begin(grant, text)
        shapes.sender.push(grant.key, list(enumerate(sources)), True)
        assert sent.wait().outcome is SendOutcome.SENT
        seen.append(sent.wait().wire_dtype)
    assert seen == ["", "int8", "int8"]


def test_transfers_larger_than_the_staging_pool_take_turns(
    make_shapes: MakeShapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reshaper, "STAGING_BYTES", 0)
    shapes = make_shapes(FLOAT_16, shape_of("int8", 8, 4, head_dim=8))
    heard = []
    for _ in range(8):
        grant, text, sources = shapes.grant(400)
        heard.append(shapes.begin(grant, text))
        threading.Thread(target=shapes.sender.push, args=(grant.key, list(enumerate(sources)), True)).start()
    for received, sent in heard:
        assert received.wait().outcome is ReceiveOutcome.VERIFIED
        assert sent.wait().outcome is SendOutcome.SENT


def test_equal_shapes_move_without_a_reshaper(make_shapes: MakeShapes) -> None:
    shapes = make_shapes(FLOAT_16, FLOAT_16)
    grant, text, sources = shapes.grant(40)
    expected = shapes.expected(grant, text, sources)
    for block, name in zip(sources, text.theirs, strict=True):
        shapes.stamps[0].mark(block, name)
    received, sent = shapes.begin(grant, replace(text, own=text.theirs))
    shapes.sender.push(grant.key, list(enumerate(sources)), True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    assert sent.wait().outcome is SendOutcome.SENT
    tail = len(sources) * 16 - 40  # here the source's own bytes travel, also behind the end of the text
    assert tail > 0
    values = Blocks(bytearray(shapes.target.memory), FLOAT_16.form).values[list(grant.blocks)]
    np.testing.assert_array_equal(
        values[:-1], Blocks(bytearray(expected), FLOAT_16.form).values[list(grant.blocks)][:-1]
    )
    assert shapes.sender.reshapers == []


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
    shapes.sender.push(grant.key, [(0, sources[0])], False)  # half of a target block: not converted yet
    shapes.stamps[0].begin([sources[0]])
    shapes.stamps[0].mark(sources[0], text.own[0])  # it even holds the same again: nobody can know for how long
    shapes.sender.push(grant.key, list(enumerate(sources))[1:], True)
    assert failed(shapes, received, sent) == "a source block was reassigned while it was being converted"
    assert shapes.sender.stats.stale_source == 1


def test_a_source_block_of_another_text_fails_the_transfer(make_shapes: MakeShapes) -> None:
    shapes = make_shapes(*PAIRS[0])
    grant, text, sources = shapes.grant(64)
    shapes.stamps[0].mark(sources[3], 77)
    received, sent = shapes.begin(grant, text)
    shapes.sender.push(grant.key, list(enumerate(sources)), True)
    assert failed(shapes, received, sent) == "a source block does not hold what the prompt says"
    assert shapes.sender.stats.stamp_mismatches == 1


@pytest.mark.parametrize(
    ("pushes", "error"),
    [
        ([([(1, 5)], False)], "source block 1 was pushed, expected 0"),
        ([([(0, 5)], False), ([(0, 5)], True)], "source block 0 was pushed, expected 1"),
        ([([(0, 5), (1, 6)], True)], "the last push leaves 32 of 64 tokens out"),
    ],
)
def test_pushes_that_do_not_make_a_text_fail_the_transfer(make_shapes: MakeShapes, pushes: Any, error: str) -> None:
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


def test_a_text_that_does_not_fit_the_grant_is_refused(make_shapes: MakeShapes) -> None:
    shapes = make_shapes(*PAIRS[0])
    grant, text, _ = shapes.grant(64)
    for wrong in (None, replace(text, num_tokens=65), replace(text, theirs=text.theirs[1:])):
        with pytest.raises(InvalidRequest, match="what fills 2 blocks of 32 after 0"):
            shapes.sender.start(grant, Heard(), None, wrong)
    assert shapes.sender.open_keys == []
    shapes.begin(grant, text)  # expected, so that it stays open: a receiver ends what it does not expect
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

    monkeypatch.setattr(reshaper, "pack", slow_pack)
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
        patch.setattr(reshaper, "pack", broken)
        grant, text, sources = shapes.grant(100)
        received, sent = shapes.begin(grant, text)
        shapes.sender.push(grant.key, list(enumerate(sources)), True)
        assert failed(shapes, received, sent) == "converting KV failed: no room"
    grant, text, sources = shapes.grant(100)
    received, sent = shapes.begin(grant, text)
    shapes.sender.push(grant.key, list(enumerate(sources)), True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED


def test_a_transfer_of_nothing_is_sent_at_once(make_shapes: MakeShapes) -> None:
    shapes = make_shapes(*PAIRS[0])
    grant, text, sources = shapes.grant(64, held_blocks=2)
    assert grant.blocks == ()
    received, sent = shapes.begin(grant, text)
    shapes.sender.push(grant.key, list(enumerate(sources)), True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    assert sent.wait().outcome is SendOutcome.SENT


def test_blocks_that_are_pushed_by_layer_groups_are_converted_when_the_last_group_has_come(
    make_shapes: MakeShapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[bool] = []
    has_all = False
    convert = reshaper.pack

    def noted(*args: Any) -> None:
        packed.append(has_all)
        convert(*args)

    monkeypatch.setattr(reshaper, "pack", noted)
    shapes = make_shapes(*PAIRS[0])
    grant, text, sources = shapes.grant(64)
    expected = shapes.expected(grant, text, sources)
    received, sent = Heard(), Heard()
    shapes.receiver.expect(grant, received, None, text.theirs)
    shapes.sender.start(grant, sent, None, text, groups=2)
    shapes.sender.push(grant.key, list(enumerate(sources)), True, range(1))
    has_all = True
    shapes.sender.push(grant.key, list(enumerate(sources)), True, range(1, 2))
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    assert bytes(shapes.target.memory) == expected
    assert all(packed)


def test_a_transfer_that_ends_while_it_waits_its_turn_is_not_converted(
    make_shapes: MakeShapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_packing, may_go_on, packed = threading.Event(), threading.Event(), list[Any]()
    convert = reshaper.pack

    def held(*args: Any) -> None:
        packed.append(args[1])
        is_packing.set()
        assert may_go_on.wait(WAIT_S)
        convert(*args)

    monkeypatch.setattr(reshaper, "pack", held)
    shapes = make_shapes(*PAIRS[0])
    (first, text, sources), (second, other, others) = shapes.grant(64), shapes.grant(64)
    heard = [shapes.begin(first, text), shapes.begin(second, other)]
    shapes.sender.push(first.key, list(enumerate(sources)), True)
    assert is_packing.wait(WAIT_S)
    shapes.sender.push(second.key, list(enumerate(others)), True)
    shapes.sender.abort(second.key)
    assert heard[1][1].wait().outcome is SendOutcome.FAILED
    may_go_on.set()
    assert heard[0][0].wait().outcome is ReceiveOutcome.VERIFIED
    assert heard[1][0].wait().outcome is ReceiveOutcome.FAILED
    third, text, sources = shapes.grant(64)
    received, _ = shapes.begin(third, text)
    shapes.sender.push(third.key, list(enumerate(sources)), True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    assert len(packed) == 2, "the second was never converted"


class Lagging:
    """A lock of which the converting thread is slow to come back, once, when it has packed."""

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


def test_an_end_that_comes_as_the_conversion_does_is_told_once(
    make_shapes: MakeShapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both threads find that it has ended and that nobody reads the source."""
    shapes = make_shapes(*PAIRS[0])
    grant, text, sources = shapes.grant(64)
    received, sent = shapes.begin(grant, text)
    [one] = shapes.sender.reshapers

    def until() -> None:
        one.abort(grant.key)
        sent.wait()

    lagging = Lagging(one._lock, until)
    monkeypatch.setattr(one, "_lock", lagging)
    convert = reshaper.pack

    def packed(*args: Any) -> None:
        convert(*args)
        lagging.is_armed = True  # the next lock that this thread leaves is that of what has been packed

    monkeypatch.setattr(reshaper, "pack", packed)
    shapes.sender.push(grant.key, list(enumerate(sources)), True)
    assert sent.wait().outcome is SendOutcome.FAILED
    assert received.wait().outcome is ReceiveOutcome.FAILED
    wait_for(lambda: shapes.num_staged == 0, "staging blocks")
    assert len(sent.all) == 1


def test_words_that_come_after_the_end_are_nothing(make_shapes: MakeShapes) -> None:
    shapes = make_shapes(*PAIRS[0])
    grant, text, sources = shapes.grant(64)
    _, sent = shapes.begin(grant, text)
    [one] = shapes.sender.reshapers
    shapes.sender.abort(grant.key)
    assert sent.wait().outcome is SendOutcome.FAILED
    one.push(grant.key, list(enumerate(sources)), True)
    one.abort(grant.key)
    assert (len(sent.all), shapes.num_staged) == (1, 0)


def test_a_sender_without_descriptors_says_so_and_keeps_nothing(
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


INT8_TO_FLOAT = PAIRS[5]  # travels as int8, and is widened where it lands


def test_an_abort_between_the_checksum_and_the_conversion_leaves_the_blocks_untouched(
    make_shapes: MakeShapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = make_shapes(*INT8_TO_FLOAT)
    grant, text, sources = shapes.grant(64)
    before = bytes(shapes.target.memory)
    received, sent = shapes.begin(grant, text)

    def matches(one: bytes, other: bytes) -> bool:
        shapes.receiver.abort(grant.key)
        return one == other

    with monkeypatch.context() as patch:
        patch.setattr("kvtransfer.reshape.unpacker.hmac", SimpleNamespace(compare_digest=matches))
        shapes.sender.push(grant.key, list(enumerate(sources)), True)
        assert received.wait().outcome is ReceiveOutcome.DRAINED
        assert sent.wait().outcome is SendOutcome.FAILED
    assert bytes(shapes.target.memory) == before


def test_layers_that_come_alone_are_not_converted(make_shapes: MakeShapes) -> None:
    """The others would be taken from what the staging area held before."""
    shapes = make_shapes(*INT8_TO_FLOAT)
    grant, text, sources = shapes.grant(64)
    received, _ = shapes.begin(grant, text)
    shapes.sender.push(grant.key, list(enumerate(sources)), True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    [one] = shapes.sender.reshapers
    caller = replace(one._inner.caller, worker_id="raw")
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
    [one] = shapes.sender.reshapers  # of a caller who had found it just before
    with pytest.raises(Unavailable):
        one.start(grant, Heard(), None, text)


@pytest.mark.parametrize("kv_wire", ["exact", "int8"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (replace(FLOAT_16, tp_degree=2), replace(FLOAT_16, block_size=32)),
        (replace(FLOAT_16, tp_degree=2), shape_of("bfloat16", 8, 4, head_dim=8)),
        (shape_of("int8", 16, 4, head_dim=8, tp_degree=2), FLOAT_16),
        (replace(FLOAT_16, tp_degree=4), replace(FLOAT_16, block_size=5, tp_degree=2, tp_rank=1)),
    ],
)
def test_ranks_fill_their_shards_of_one_receiver(
    make_shapes: MakeShapes, transport: str, source: KvShape, target: KvShape, kv_wire: str
) -> None:
    """Each rank has its own pool, sender and source blocks; the receiver's blocks hold the heads of all."""
    shards = shards_of(source, target)
    assert len(shards) == 2
    shapes = make_shapes(replace(source, tp_rank=shards[0].source_rank), target, kv_wire)
    dtype = "int8" if kv_wire == "int8" or source.dtype == "int8" else wire_dtype(source, target)
    other = replace(source, tp_rank=shards[1].source_rank)
    pool, stamps = HostPool(NUM_BLOCKS, other.block_bytes, seed=4), BlockStamps(NUM_BLOCKS)
    if source.dtype == "float32":
        values = Blocks(pool.memory, other.form).values
        values[:] = np.random.default_rng(1).standard_normal(values.shape)
    second = make_sender(
        pool,
        facts(other),
        secret=SECRET,
        worker_id="p0",
        incarnation="p0-1",
        transport=transport,
        stamps=stamps,
        kv_wire=kv_wire,
        lease=PATIENT,
    )
    grant, text, sources = shapes.grant(107)
    for block, name in zip(sources[::-1], text.own, strict=True):
        stamps.mark(block, name)
    first = shapes.expected(grant, text, sources, dtype)
    both = Shapes(
        pool,
        HostPool(NUM_BLOCKS, target.block_bytes),
        (stamps, stamps),
        (other, target),
        second,
        shapes.receiver,
        shapes.host,
    )
    both.target.memory[:] = first
    received, sent = Heard(), (Heard(), Heard())
    shapes.receiver.expect(grant, received, None, text.theirs)
    try:
        for sender, heard, blocks in ((shapes.sender, sent[0], sources), (second, sent[1], sources[::-1])):
            sender.start(grant, heard, None, text)
            sender.push(grant.key, list(enumerate(blocks)), True)
        assert received.wait().outcome is ReceiveOutcome.VERIFIED, received.all
        assert [one.wait().outcome for one in sent] == [SendOutcome.SENT] * 2
    finally:
        second.close()
    received = Blocks(shapes.target.memory, target.form)
    whole = Blocks(bytearray(both.expected(grant, text, sources[::-1], dtype, is_whole=False)), target.form)
    np.testing.assert_array_equal(received.values[list(grant.blocks)], whole.values[list(grant.blocks)])
    others = sorted(set(range(NUM_BLOCKS)) - set(grant.blocks))
    np.testing.assert_array_equal(received.raw[others], whole.raw[others])
