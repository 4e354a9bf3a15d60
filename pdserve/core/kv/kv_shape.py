"""The format of a worker's KV blocks, which formats can be converted into each other, and grants of blocks to write.
Pure.

A pool is block-major: block b is one run of bytes with the values [layers, planes, tokens, heads, head_dim]. The planes
are keys, then values. A layout with heads first has [layers, planes, heads, tokens, head_dim]. In an int8 or fp8 block,
the values are followed by a float32 scale for each row of head_dim values, in the same order. Two workers of one model
may differ in block size, in the stored dtype and in their tensor-parallel degree. All other properties must be equal.

The order of the values in a layout `opaque.NAME`, of an engine that is not ours, is unknown here, so its shapes must be
equal. Its block has [layers, tokens, heads, head_dim] values in whichever order; head_dim counts what the engine stores
for a token and head, such as a key and a value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from pdserve.core.errors import ConfigError

#: Bytes of one value. float16 and uint8 are only of opaque layouts.
ITEM_BYTES: Final = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "float8_e4m3fn": 1,
    "uint8": 1,
    "uint64": 8,
}
SCALED: Final = ("int8", "float8_e4m3fn")  # stored relative to a scale for each token and head
SCALE_BYTES: Final = 4  # float32
ALIGNMENT: Final = 64  # alignment of a scaled block's values and of its scales
# Limit of any number in a shape: sizes of memory are products of these numbers, which come from the network.
MOST: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Layout:
    """A named layout. Blocks of layouts of different families cannot be converted into each other."""

    family: str
    dtypes: tuple[str, ...]
    planes: int
    heads_first: bool = False


TOY_LAYOUT: Final = "toy.v1"  # of the engine toy, which computes no model
LAYOUTS: Final = {
    "block-major.v1": Layout("attention", ("float32", "bfloat16"), planes=2),
    "block-major-int8.v1": Layout("attention", ("int8",), planes=2),
    "block-major-fp8.v1": Layout("attention", ("float8_e4m3fn",), planes=2),
    "block-major-heads.v1": Layout("attention-heads", ("float32", "bfloat16"), planes=2, heads_first=True),
    "block-major-heads-int8.v1": Layout("attention-heads", ("int8",), planes=2, heads_first=True),
    "block-major-heads-fp8.v1": Layout("attention-heads", ("float8_e4m3fn",), planes=2, heads_first=True),
    TOY_LAYOUT: Layout("toy", ("uint64",), planes=1),
}
_OPAQUE: Final = re.compile(r"opaque\.[A-Za-z0-9._-]{1,64}")
_OPAQUE_DTYPES: Final = tuple(dtype for dtype in ITEM_BYTES if dtype not in SCALED)


def is_opaque(layout: str) -> bool:
    return _OPAQUE.fullmatch(layout) is not None


def layout_of(name: str) -> Layout:
    """Raises ConfigError for an unknown layout."""
    if is_opaque(name):
        return Layout(name, _OPAQUE_DTYPES, planes=1)
    if name not in LAYOUTS:
        raise _wrong("layout", name, "one of " + ", ".join(LAYOUTS) + ", or opaque.NAME")
    return LAYOUTS[name]


@dataclass(frozen=True, slots=True)
class Loss:
    """The maximum error of a converted value x: relative * |x| + of_largest * (the largest |x| of its token and head).

    It holds for finite values of normal size. A row whose largest |x| is below 2^-120 becomes zero.
    """

    relative: float = 0.0
    of_largest: float = 0.0


_ROUNDING: Final = 1 + 2**-12  # float32's own rounding during the conversion
# By stored dtype. bfloat16 has 8 significant bits. fp8 has 4, with steps of 2^-9 below 2^-6, relative to a row maximum
# of 448. int8 has steps of 1/127 of the row maximum. A scaled value is value * scale in float32.
_INTO: Final = {
    "float32": Loss(),
    "bfloat16": Loss(relative=2**-8),
    "int8": Loss(of_largest=0.5 / 127 * _ROUNDING),
    "float8_e4m3fn": Loss(relative=2**-4 * _ROUNDING, of_largest=2**-10 / 448 * _ROUNDING),
}
LOSSES: Final = {
    **{(source, target): loss for source in _INTO for target, loss in _INTO.items()},
    **{(dtype, dtype): Loss() for dtype in ITEM_BYTES},
}


@dataclass(frozen=True, slots=True)
class BlockForm:
    """The format of one block, or of a part of a block that is sent separately."""

    dtype: str
    planes: int
    num_layers: int
    block_size: int
    num_heads: int
    head_dim: int
    heads_first: bool = False

    @property
    def is_scaled(self) -> bool:
        return self.dtype in SCALED

    @property
    def num_rows(self) -> int:
        """Number of vectors of head_dim values."""
        return self.num_layers * self.planes * self.block_size * self.num_heads

    @property
    def value_bytes(self) -> int:
        return self.num_rows * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def scales_at(self) -> int:
        """Offset of the scales in a scaled block."""
        return _round_up(self.value_bytes) if self.is_scaled else self.value_bytes

    @property
    def block_bytes(self) -> int:
        return self.scales_at + (_round_up(self.num_rows * SCALE_BYTES) if self.is_scaled else 0)

    def narrowed(self, num_layers: int, num_heads: int) -> BlockForm:
        """The format of a part with so many layers and heads."""
        return replace(self, num_layers=num_layers, num_heads=num_heads)

    def stored_as(self, dtype: str) -> BlockForm:
        """The format of the same values in another dtype."""
        return replace(self, dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """The shape of one worker's pool. Raises ConfigError with the name of an invalid field."""

    layout: str
    dtype: str  # dtype of the stored keys and values
    num_layers: int
    num_kv_heads: int  # of the whole model; each rank stores a share
    head_dim: int
    block_size: int
    tp_degree: int = 1
    tp_rank: int = 0

    def __post_init__(self) -> None:
        layout = layout_of(self.layout)
        if self.dtype not in layout.dtypes:
            raise _wrong("dtype", self.dtype, " or ".join(layout.dtypes) + f", the dtypes of {self.layout}")
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "tp_degree"):
            if not 1 <= getattr(self, name) <= MOST:
                raise _wrong(name, getattr(self, name), f"1 to {MOST}")
        if not 0 <= self.tp_rank < self.tp_degree:
            raise _wrong("tp_rank", self.tp_rank, f"0 to {self.tp_degree - 1}, below tp_degree")
        small, large = sorted((self.num_kv_heads, self.tp_degree))
        if large % small:
            raise _wrong("tp_degree", self.tp_degree, f"a divisor or a multiple of {self.num_kv_heads}, the kv heads")

    @property
    def replicas(self) -> int:
        """Number of ranks that store the same head: more than one if there are more ranks than kv heads."""
        return max(1, self.tp_degree // self.num_kv_heads)

    @property
    def num_heads(self) -> int:
        """Number of heads of this rank."""
        return max(1, self.num_kv_heads // self.tp_degree)

    @property
    def first_head(self) -> int:
        """This rank's heads are first_head .. first_head + num_heads - 1."""
        return self.tp_rank // self.replicas * self.num_heads

    @property
    def form(self) -> BlockForm:
        layout = layout_of(self.layout)
        return BlockForm(
            self.dtype,
            layout.planes,
            self.num_layers,
            self.block_size,
            self.num_heads,
            self.head_dim,
            layout.heads_first,
        )

    @property
    def block_bytes(self) -> int:
        return self.form.block_bytes


def check_convertible(source: KvShape, target: KvShape) -> Loss:
    """The error bound of the conversion. Raises ConfigError with the first field that prevents the conversion."""
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        seen, expected = getattr(source, name), getattr(target, name)
        if seen != expected:
            raise _wrong(name, seen, f"{expected}, as on the receiving worker")
    if layout_of(source.layout).family != layout_of(target.layout).family:
        raise _wrong("layout", source.layout, f"a layout that can be converted to {target.layout}")
    if is_opaque(source.layout):
        for name in ("dtype", "block_size", "tp_degree"):
            seen, expected = getattr(source, name), getattr(target, name)
            if seen != expected:
                raise _wrong(
                    name, seen, f"{expected}, as on the receiving worker: blocks of {source.layout} are opaque"
                )
    return LOSSES[source.dtype, target.dtype]


def wire_dtype(source: KvShape, target: KvShape, *, is_quantised: bool = False) -> str:
    """The dtype that is sent: the narrower one of both. The receiver converts it without further loss.

    With `is_quantised`, it is int8 if both sides store floats in a known order.
    """
    is_quantised = is_quantised and not is_opaque(source.layout)
    narrower = min(source.dtype, target.dtype, key=lambda dtype: ITEM_BYTES[dtype])
    return "int8" if is_quantised and (narrower, "int8") in LOSSES and narrower not in SCALED else narrower


def is_same_bytes(source: KvShape, target: KvShape) -> bool:
    """Whether source blocks and target blocks have the same bytes, so no conversion is needed."""
    return source.form == target.form and source.first_head == target.first_head


def _wrong(name: str, seen: object, expected: str) -> ConfigError:
    return ConfigError(f"kv_shape.{name}", seen, expected)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


# --- grants ---------------------------------------------------------------------------------------------------
# A decode worker tells a prefill worker where KV may be written, and the format of its bytes. Routers forward an
# encoded Grant without reading it.


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferKey:
    """Names one attempt to transfer one sequence's KV. A late message has an old key, and is counted and ignored."""

    transfer_id: str
    attempt: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Identifies a worker's KV. Two workers that exchange blocks must agree in every field except the shape."""

    protocol: int
    model: str
    engine: str  # identifies the weights
    shape: KvShape

    @property
    def block_bytes(self) -> int:
        return self.shape.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Blocks that a decode worker has reserved for a transfer.

    `blocks` are the receiver's block numbers in prompt order, after `num_cached_blocks` blocks that its prefix cache
    already has. Both count blocks of the receiver's size.
    """

    key: TransferKey
    endpoint: str  # HOST:PORT of the granting worker's gRPC server
    worker_id: str
    incarnation: str
    fingerprint: Fingerprint
    blocks: tuple[int, ...]
    num_cached_blocks: int
    hash_seed: bytes = b""  # seed of the receiver's content hashes
    rank_endpoints: tuple[str, ...] = ()  # endpoints of the worker's ranks 1, 2, ..; each rank stores its own heads
