"""A sender and a receiver whose blocks have different shapes, over a real connection."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from kvtransfer.link.endpoint import make_receiver, make_sender
from kvtransfer.link.receiver import PlainReceiver
from kvtransfer.protocol.plan import arrival_of, pieces_of
from kvtransfer.protocol.transport import Text
from kvtransfer.reshape.convert import BlockArrays, pack, unpack
from kvtransfer.reshape.sender import ShapedSender
from pdserve.core.kv.kv_shape import Fingerprint, Grant, KvShape, TransferKey
from pdserve.core.kv.stamps import BlockStamps
from tests.support.transfer_ends import GrpcHost, HostPool, endpoint_config, fingerprint
from tests.unit.kvtransfer.harness import PATIENT, Heard
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
    receiver: PlainReceiver
    host: GrpcHost
    order: random.Random = field(default_factory=lambda: random.Random(0))
    unused: list[list[int]] = field(default_factory=list)  # Blocks on each side.
    num_grants: int = 0

    def grant(self, num_tokens: int, num_cached_blocks: int = 0) -> tuple[Grant, Text, list[int]]:
        """A grant of random blocks, the sender's Text, and marked source blocks."""
        self.num_grants += 1
        source, target = (shape.block_size for shape in self.shapes)
        first = num_cached_blocks * target // source
        self.unused = self.unused or [self.order.sample(range(NUM_BLOCKS), NUM_BLOCKS) for _ in range(2)]
        sources = [self.unused[0].pop() for _ in range(-(-num_tokens // source) - first)]
        blocks = [self.unused[1].pop() for _ in range(-(-num_tokens // target) - num_cached_blocks)]
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
            num_cached_blocks=num_cached_blocks,
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
        """The target pool after the transfer, converted without a connection, by way of blocks of `dtype`.

        With `is_whole`, this sender alone fills the blocks.
        """
        source, target = self.shapes
        arrival = arrival_of(source, target, dtype or target.dtype)
        memory = self.target.blocks
        pool = BlockArrays(memory, target.form)
        if is_whole:
            pool.raw[list(grant.blocks)] = 0
        pieces = pieces_of(
            source.block_size,
            target.block_size,
            num_tokens=text.num_tokens,
            first_block=grant.num_cached_blocks,
            num_blocks=len(grant.blocks),
        )
        packed = BlockArrays(bytearray(len(grant.blocks) * arrival.form.block_bytes), arrival.form)
        numbers = range(len(grant.blocks))
        pack(BlockArrays(self.source.blocks, source.form), sources, arrival.out_of, packed, numbers, pieces)
        unpack(packed, pool, grant.blocks, arrival.into)
        return bytes(memory)

    @property
    def num_staged(self) -> int:
        return sum(one.num_staged for one in self.sender.reshapers)


def facts(shape: KvShape) -> Fingerprint:
    return fingerprint(shape=shape)


MakeShapes = Callable[..., Shapes]


@contextmanager
def opened_shapes(transport: str) -> Iterator[MakeShapes]:
    """Yields make(source shape, target shape, kv_wire), and closes all ends afterwards."""
    made: list[Shapes] = []

    def make(
        source: KvShape, target: KvShape, kv_wire: str = "exact", runs_per_block: tuple[int, int] = (1, 1)
    ) -> Shapes:
        sides = zip((source, target), runs_per_block, strict=True)
        pools = [HostPool(NUM_BLOCKS, shape.block_bytes, 3, runs) for shape, runs in sides]
        values = BlockArrays(pools[0].memory, source.form, runs_per_block[0]).values
        if source.dtype == "float32":
            values[:] = np.random.default_rng(0).standard_normal(values.shape)
        stamps = BlockStamps(NUM_BLOCKS), BlockStamps(NUM_BLOCKS)
        receiver = make_receiver(
            endpoint_config(
                pools[1],
                facts(target),
                worker_id="d0",
                incarnation="d0-1",
                transport=transport,
                stamps=stamps[1],
                lease=PATIENT,
            ),
            host="127.0.0.1",
        )
        sender = make_sender(
            endpoint_config(
                pools[0],
                facts(source),
                worker_id="p0",
                incarnation="p0-1",
                transport=transport,
                stamps=stamps[0],
                lease=PATIENT,
            ),
            kv_wire=kv_wire,
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
