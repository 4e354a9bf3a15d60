"""A small engine of another distribution: the next token is the sum of all tokens in the KV.

Its KV is one unsigned 64-bit integer per position, so a missing or misplaced block changes the answer.
"""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

from pdserve.config import WorkerConfig
from pdserve.core.types import Role, TokenOut
from pdserve.engine.interface import EngineSpec, OnLayer, Row, RowOut, kept
from pdserve.engine.rows import check_rows
from pdserve.model_source import model_name

NUM_BLOCKS = 256
VALUE_BYTES = 8


def next_token(tokens: Sequence[int]) -> int:
    """A printable character."""
    return 32 + sum(tokens) % 95


class AdderPool:
    """Plain memory, which other processes cannot map."""

    is_on_host = True
    descriptor = None
    runs_per_block = 1

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self.buffer = memoryview(bytearray(num_blocks * block_bytes))


class AdderEngine:
    def __init__(self, config: WorkerConfig, role: Role) -> None:
        num_blocks = config.kv_blocks or NUM_BLOCKS
        self.role = role
        self.spec = EngineSpec(
            model=model_name(config.model),
            weights_hash="adder.v1",
            dtype="uint64",
            layout="opaque.adder.v1",
            vocab_size=257,
            max_context_tokens=config.max_context_tokens or 1024,
            eos_token_ids=(256,),
            block_size=config.block_size,
            num_blocks=num_blocks,
            block_bytes=VALUE_BYTES * config.block_size,
            kv_dtype="uint64",
            kv_layers=1,
            kv_heads=1,
            kv_head_dim=1,
        )
        self.pool = AdderPool(num_blocks, self.spec.block_bytes)
        self._values = self.pool.buffer.cast("Q")

    def step(self, rows: Sequence[Row], on_layer: OnLayer | None = None) -> list[RowOut]:
        check_rows(self.spec, rows)
        for row in rows:
            for position, token in enumerate((*row.tokens, *row.drafts), row.start):
                self._values[self._slot(row, position)] = token
        if on_layer is not None:
            on_layer(self.spec.num_layers)
        return [self._out(row) for row in rows]

    def close(self) -> None:
        pass

    def _slot(self, row: Row, position: int) -> int:
        index, offset = divmod(position, self.spec.block_size)
        return row.blocks[index] * self.spec.block_size + offset

    def _token(self, row: Row, position: int) -> int:
        return self._values[self._slot(row, position)]

    def _out(self, row: Row) -> RowOut:
        ends = range(row.start + len(row.tokens), row.start + row.num_queries + 1) if row.num_samples else ()
        sampled = [TokenOut(token_id=next_token([self._token(row, each) for each in range(end)])) for end in ends]
        return RowOut(kept(sampled, row.drafts))


class LayeredEngine(AdderEngine):
    """Two layers, whose values of a position must match. On prefill workers a block is one run of bytes per layer."""

    def __init__(self, config: WorkerConfig, role: Role) -> None:
        super().__init__(config, role)
        spec = self.spec
        self.spec = replace(
            spec, block_bytes=2 * spec.block_bytes, kv_layers=2, num_layers=2, layout="opaque.layers.v1"
        )
        self.pool = AdderPool(spec.num_blocks, self.spec.block_bytes)
        self.pool.runs_per_block = 2 if role is Role.PREFILL else 1
        self._values = self.pool.buffer.cast("Q")

    def step(self, rows: Sequence[Row], on_layer: OnLayer | None = None) -> list[RowOut]:
        check_rows(self.spec, rows)
        for layer in range(2):
            for row in rows:
                for position, token in enumerate((*row.tokens, *row.drafts), row.start):
                    self._values[self._at(row, position, layer)] = token * (1 + 2 * layer)
            if on_layer is not None:
                on_layer(layer + 1)
        return [self._out(row) for row in rows]

    def _at(self, row: Row, position: int, layer: int) -> int:
        block, offset = divmod(self._slot(row, position), self.spec.block_size)
        in_layers = self.pool.runs_per_block > 1
        run = layer * self.spec.num_blocks + block if in_layers else block * 2 + layer
        return run * self.spec.block_size + offset

    def _token(self, row: Row, position: int) -> int:
        first, second = (self._values[self._at(row, position, layer)] for layer in range(2))
        return second - 2 * first


NOT_A_FACTORY = 7


def no_engine(config: WorkerConfig, role: Role) -> object:
    return object()


def no_pool(config: WorkerConfig, role: Role) -> AdderEngine:
    engine = AdderEngine(config, role)
    engine.pool = SimpleNamespace(num_blocks=NUM_BLOCKS)
    return engine


def no_spec(config: WorkerConfig, role: Role) -> AdderEngine:
    engine = AdderEngine(config, role)
    engine.spec = {}
    return engine


def other_size(config: WorkerConfig, role: Role) -> AdderEngine:
    """Its spec has another number of blocks than its pool."""
    engine = AdderEngine(config, role)
    engine.pool.num_blocks += 1
    return engine


def other_model(config: WorkerConfig, role: Role) -> AdderEngine:
    """Its model has a name of its own, which no router knows."""
    engine = AdderEngine(config, role)
    engine.spec = replace(engine.spec, model="adder")
    return engine


def in_runs(config: WorkerConfig, role: Role) -> AdderEngine:
    """Its pool has more runs per block than layers."""
    engine = AdderEngine(config, role)
    engine.pool.runs_per_block = 2
    return engine


def scaled_in_layers(config: WorkerConfig, role: Role) -> LayeredEngine:
    """Its blocks end with the scales of all layers."""
    engine = LayeredEngine(config, role)
    engine.spec = replace(engine.spec, kv_dtype="int8")
    engine.pool.runs_per_block = 2
    return engine
