"""A sender whose blocks differ in shape from the receiver's, over real connections."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvtransfer.link.endpoint import make_sender
from kvtransfer.protocol.plan import arrival_of, shards_of
from kvtransfer.protocol.transport import ReceiveOutcome, SendOutcome
from kvtransfer.reshape import sender
from kvtransfer.reshape import sender as reshaper
from kvtransfer.reshape.convert import BlockArrays
from pdserve.core.errors import InternalError
from pdserve.core.kv.kv_shape import KvShape, wire_dtype
from pdserve.core.kv.stamps import BlockStamps
from tests.support.transfer_ends import WAIT_S, HostPool, endpoint_config
from tests.unit.kvtransfer.harness import PATIENT, Heard, wait_for
from tests.unit.kvtransfer.shapes import FLOAT_16, NUM_BLOCKS, PAIRS, MakeShapes, Shapes, facts, opened_shapes
from tests.unit.kvtransfer.test_convert import shape_of

TRANSPORTS = ("tcp", "shm", "nixl-stand-in")


def in_turn(cases: Sequence[tuple[Any, ...]], each: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
    """The transport of each case, then the case. A conversion does not depend on the transport, so a case has one of
    them. With `each`, every case is repeated with each of these values at its end, which has all transports too."""
    if each is None:
        return [(TRANSPORTS[i % 3], *case) for i, case in enumerate(cases)]
    return [(TRANSPORTS[(i + j) % 3], *case, one) for i, case in enumerate(cases) for j, one in enumerate(each)]


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest, prepared: Callable[[str], str]) -> str:
    return prepared(request.param)


@pytest.fixture
def make_shapes(transport: str) -> Iterator[MakeShapes]:
    with opened_shapes(transport) as make:
        yield make


@pytest.mark.parametrize(("transport", "source", "target"), in_turn(PAIRS), indirect=["transport"])
def test_received_blocks_are_converted(make_shapes: MakeShapes, source: KvShape, target: KvShape) -> None:
    shapes = make_shapes(source, target)
    for num_tokens, held in ((1, 0), (100, 0), (107, 2), (3 * target.block_size, 1)):
        grant, text, sources = shapes.grant(num_tokens, held)
        expected = shapes.expected(grant, text, sources)
        received, sent = shapes.begin(grant, text)
        at = 0
        while at < len(sources):  # While chunks of the prompt are computed.
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
    ("transport", "source", "target", "sides"),
    in_turn(
        [one for one in PAIRS if not {"int8"} & {one[0].dtype, one[1].dtype}],
        [(True, True), (True, False), (False, True)],
    ),
    indirect=["transport"],
)
def test_blocks_of_a_run_per_layer_are_converted(
    make_shapes: MakeShapes, source: KvShape, target: KvShape, sides: tuple[bool, bool]
) -> None:
    layers = source.num_layers
    assert layers > 1
    runs = tuple(layers if is_in_layers else 1 for is_in_layers in sides)
    shapes = make_shapes(source, target, runs_per_block=runs)
    grant, text, sources = shapes.grant(107, 2)
    expected = shapes.expected(grant, text, sources)
    received, sent = shapes.begin(grant, text)
    shapes.sender.push(grant.key, list(enumerate(sources)), True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED, received.all
    assert sent.wait().outcome is SendOutcome.SENT
    assert shapes.target.blocks == expected


def test_scaled_blocks_are_not_read_as_runs_of_layers() -> None:
    form = shape_of("int8", 16, 4, head_dim=8).form
    with pytest.raises(InternalError, match="int8 blocks of 2 layers in 2 runs"):
        BlockArrays(bytearray(2 * form.block_bytes), form, form.num_layers)


@pytest.mark.parametrize(
    ("transport", "source", "target"),
    in_turn(
        [
            (FLOAT_16, FLOAT_16),
            (FLOAT_16, replace(FLOAT_16, block_size=32)),
            (FLOAT_16, shape_of("bfloat16", 16, 4, head_dim=8)),
            (shape_of("bfloat16", 16, 4, head_dim=8), FLOAT_16),
        ]
    ),
    indirect=["transport"],
)
def test_floats_may_be_sent_as_int8(make_shapes: MakeShapes, source: KvShape, target: KvShape) -> None:
    shapes = make_shapes(source, target, "int8")
    grant, text, sources = shapes.grant(107, 1)
    expected = shapes.expected(grant, text, sources, "int8")
    received, sent = shapes.begin(grant, text)
    shapes.sender.push(grant.key, list(enumerate(sources)), True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED, received.all
    assert bytes(shapes.target.memory) == expected
    assert sent.wait().wire_dtype == "int8"
    assert sent.wait().num_bytes < 0.8 * len(grant.blocks) * min(source.block_bytes, target.block_bytes)


def test_transfers_over_a_slow_link_use_int8(make_shapes: MakeShapes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "LEAST_BYTES", 1)
    monkeypatch.setattr(sender, "CONVERTED_BYTES_S", 1e15)  # Every link is slower.
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
    tail = len(sources) * 16 - 40  # Here the source's own bytes are sent, including those after the end of the text.
    assert tail > 0
    values = BlockArrays(bytearray(shapes.target.memory), FLOAT_16.form).values[list(grant.blocks)]
    np.testing.assert_array_equal(
        values[:-1], BlockArrays(bytearray(expected), FLOAT_16.form).values[list(grant.blocks)][:-1]
    )
    assert shapes.sender.reshapers == []


def test_an_empty_transfer_is_sent_at_once(make_shapes: MakeShapes) -> None:
    shapes = make_shapes(*PAIRS[0])
    grant, text, sources = shapes.grant(64, num_cached_blocks=2)
    assert grant.blocks == ()
    received, sent = shapes.begin(grant, text)
    shapes.sender.push(grant.key, list(enumerate(sources)), True)
    assert received.wait().outcome is ReceiveOutcome.VERIFIED
    assert sent.wait().outcome is SendOutcome.SENT


def test_layer_groups_are_converted_when_complete(make_shapes: MakeShapes, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("transport", "source", "target", "kv_wire"),
    in_turn(
        [
            (replace(FLOAT_16, tp_degree=2), replace(FLOAT_16, block_size=32)),
            (replace(FLOAT_16, tp_degree=2), shape_of("bfloat16", 8, 4, head_dim=8)),
            (shape_of("int8", 16, 4, head_dim=8, tp_degree=2), FLOAT_16),
            (replace(FLOAT_16, tp_degree=4), replace(FLOAT_16, block_size=5, tp_degree=2, tp_rank=1)),
        ],
        ["exact", "int8"],
    ),
    indirect=["transport"],
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
        values = BlockArrays(pool.memory, other.form).values
        values[:] = np.random.default_rng(1).standard_normal(values.shape)
    second = make_sender(
        endpoint_config(
            pool, facts(other), worker_id="p0", incarnation="p0-1", transport=transport, stamps=stamps, lease=PATIENT
        ),
        kv_wire=kv_wire,
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
    received = BlockArrays(shapes.target.memory, target.form)
    whole = BlockArrays(bytearray(both.expected(grant, text, sources[::-1], dtype, is_whole=False)), target.form)
    np.testing.assert_array_equal(received.values[list(grant.blocks)], whole.values[list(grant.blocks)])
    others = sorted(set(range(NUM_BLOCKS)) - set(grant.blocks))
    np.testing.assert_array_equal(received.raw[others], whole.raw[others])
