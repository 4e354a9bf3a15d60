"""Converts KV between two block formats: gathers, casts or rounds, and scatters, and does so with received chunks.

A transferred block has the target's format, narrowed to the shard's heads and the part's layers, so packing and
unpacking are the same copy between two memories. float32 is rounded to bfloat16 as torch does, and to int8 and fp8 as
pdserve.engine.memory.pool.quantise does: the result is bit for bit what the target's engine would have stored.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np

from kvtransfer.link.channel import Channel
from kvtransfer.protocol.frames import BadFrame, Checksum, Frame
from kvtransfer.protocol.plan import Arrival, TokenRun, Window
from kvtransfer.protocol.transfers import Claim
from kvtransfer.transports.common.interface import ReceiveLink
from pdserve.core.errors import InternalError
from pdserve.core.kv.kv_shape import SCALE_BYTES, SCALED, BlockForm
from pdserve.engine.interface import KvPool
from pdserve.engine.memory.host import HostMemory

# Shapes: N blocks, L layers, P planes, C tokens per block, K kv heads, D head dim, R rows of D values.

# Tokens are converted in groups of about this size, so that every pass over a group finds it in the cache.
LOT_BYTES: Final = 256 * 1024
# the value to which a row's largest magnitude is scaled
MOST: Final = {"int8": np.float32(127), "float8_e4m3fn": np.float32(448)}
LEAST: Final = np.float32(2**-120)  # below it a row becomes zero: most / largest must be finite
_STORED: Final[dict[str, Any]] = {
    "float32": np.dtype("<f4"),
    "bfloat16": np.dtype("<u2"),
    "int8": np.dtype("i1"),
    "float8_e4m3fn": np.dtype("u1"),
    "uint64": np.dtype("<u8"),
}
_BFLOAT16_NAN: Final = 0x7FC0


@final
class BlockArrays:
    """A memory of blocks of one format: `values` is [N, L, P, C, K, D], `scales` [N, L, P, C, K]; views, no copies."""

    def __init__(self, memory: memoryview | bytearray, form: BlockForm, runs_per_block: int = 1) -> None:
        """`runs_per_block`: as in KvPool. Blocks of several runs have no `raw`."""
        self.form = form
        self.num_blocks = len(memory) // form.block_bytes
        whole = np.frombuffer(memory, np.uint8, self.num_blocks * form.block_bytes)
        if form.heads_first:
            raise InternalError("blocks with heads first are on GPUs, where nothing is converted")
        rows = (form.num_layers, form.planes, form.block_size, form.num_heads)
        self.scales: Any = None
        if runs_per_block > 1:
            if form.is_scaled or runs_per_block != form.num_layers:
                raise InternalError(f"{form.dtype} blocks of {form.num_layers} layers in {runs_per_block} runs")
            by_layer = whole.reshape(form.num_layers, self.num_blocks, -1).view(_STORED[form.dtype])
            self.values = by_layer.reshape(form.num_layers, self.num_blocks, *rows[1:], form.head_dim).swapaxes(0, 1)
            return
        self.raw = whole.reshape(self.num_blocks, form.block_bytes)
        values = self.raw[:, : form.value_bytes].view(_STORED[form.dtype])
        self.values = _unflatten(values, (*rows, form.head_dim))
        if form.is_scaled:
            scales = self.raw[:, form.scales_at : form.scales_at + form.num_rows * SCALE_BYTES]
            self.scales = _unflatten(scales.view(np.dtype("<f4")), rows)


def move(
    source: BlockArrays,
    source_blocks: Sequence[int],
    source_window: Window,
    target: BlockArrays,
    target_blocks: Sequence[int],
    target_window: Window,
    pieces: Sequence[TokenRun],
) -> None:
    """Copies the pieces' tokens; piece.source and piece.target index the two lists of block numbers.

    The windows have equally many layers and heads. The rest of a target block is not modified. Raises IndexError on
    blocks outside the memories; for a target block, before any byte is written.
    """
    for blocks, memory in ((source_blocks, source), (target_blocks, target)):
        if blocks and not (min(blocks) >= 0 and max(blocks) < memory.num_blocks):
            raise IndexError(f"blocks {min(blocks)}..{max(blocks)} of a memory of {memory.num_blocks}")
    views = _Windowed(source, source_window), _Windowed(target, target_window)
    is_copy = source.form.dtype == target.form.dtype
    step = _copy_lot if is_copy else _convert_lot
    for lot in [pieces] if is_copy else _lots(pieces, source_window.num_layers, source_window.num_heads, source.form):
        step(*views, [(source_blocks[piece.source], target_blocks[piece.target], piece) for piece in lot])


def pack(
    source: BlockArrays,
    source_blocks: Sequence[int],
    source_window: Window,
    out: BlockArrays,
    out_blocks: Sequence[int],
    pieces: Sequence[TokenRun],
) -> None:
    """Fills all of these blocks of `out`; positions in no piece, and padding, are zero."""
    form = out.form
    filled = [0] * len(out_blocks)
    for piece in pieces:
        filled[piece.target] += piece.num_tokens
    for block, num_tokens in zip(out_blocks, filled, strict=True):
        if num_tokens < form.block_size:
            out.raw[block] = 0
        elif form.is_scaled:  # the padding is sent too, and may contain bytes of another request
            out.raw[block, form.value_bytes : form.scales_at] = 0
            out.raw[block, form.scales_at + form.num_rows * SCALE_BYTES :] = 0
    move(source, source_blocks, source_window, out, out_blocks, Window.whole(form), pieces)


def unpack(packed: BlockArrays, target: BlockArrays, target_blocks: Sequence[int], target_window: Window) -> None:
    """Scatters the first len(target_blocks) blocks of `packed` into these blocks' windows."""
    size = packed.form.block_size
    pieces = [TokenRun(index, 0, index, 0, size) for index in range(len(target_blocks))]
    numbers = range(len(target_blocks))
    move(packed, numbers, Window.whole(packed.form), target, target_blocks, target_window, pieces)


class _Windowed:
    """Values and scales of some layers and heads of each block."""

    def __init__(self, blocks: BlockArrays, window: Window) -> None:
        layers = slice(window.first_layer, window.first_layer + window.num_layers)
        heads = slice(window.first_head, window.first_head + window.num_heads)
        self.dtype = blocks.form.dtype
        self.values = blocks.values[:, layers, :, :, heads]
        self.scales = None if blocks.scales is None else blocks.scales[:, layers, :, :, heads]


_Moves = Sequence[tuple[int, int, TokenRun]]  # source block, target block, their tokens


def _lots(pieces: Sequence[TokenRun], num_layers: int, num_heads: int, form: BlockForm) -> list[list[TokenRun]]:
    """Pieces in groups of about LOT_BYTES of float32."""
    token_bytes = 4 * num_layers * form.planes * num_heads * form.head_dim
    limit = max(1, LOT_BYTES // token_bytes)
    lots: list[list[TokenRun]] = []
    size = limit
    for piece in pieces:
        if size + piece.num_tokens > limit:
            lots.append([])
            size = 0
        lots[-1].append(piece)
        size += piece.num_tokens
    return lots


def _copy_lot(source: _Windowed, target: _Windowed, moves: _Moves) -> None:
    pairs = [(source.values, target.values)]
    if source.scales is not None:
        pairs.append((source.scales, target.scales))
    for out_of, into in pairs:
        for block, number, piece in moves:
            a, b, count = piece.source_at, piece.target_at, piece.num_tokens
            into[number, :, :, b : b + count] = out_of[block, :, :, a : a + count]


def _gather(x: Any, moves: _Moves) -> Any:
    """[L, P, T, K, ...] of all tokens of the moves, closely packed."""
    num_tokens = sum(piece.num_tokens for _, _, piece in moves)
    out = np.empty((*x.shape[1:3], num_tokens, *x.shape[4:]), x.dtype)
    at = 0
    for block, _, piece in moves:
        out[:, :, at : at + piece.num_tokens] = x[block, :, :, piece.source_at : piece.source_at + piece.num_tokens]
        at += piece.num_tokens
    return out


def _scatter(x: Any, into: Any, moves: _Moves) -> None:
    at = 0
    for _, number, piece in moves:
        into[number, :, :, piece.target_at : piece.target_at + piece.num_tokens] = x[:, :, at : at + piece.num_tokens]
        at += piece.num_tokens


def _to_float32(source: _Windowed, moves: _Moves) -> Any:
    values = _gather(source.values, moves)
    if source.dtype == "bfloat16":
        return widened(values)
    if source.scales is None:
        return values
    return dequantised(values, _gather(source.scales, moves), source.dtype)


def _convert_lot(source: _Windowed, target: _Windowed, moves: _Moves) -> None:
    x = _to_float32(source, moves)
    if target.dtype in SCALED:
        x, scales = quantised(x, target.dtype)
        _scatter(scales, target.scales, moves)
    elif target.dtype == "bfloat16":
        x = rounded(x)
    _scatter(x, target.values, moves)


def widened(bits: Any) -> Any:
    """bfloat16 bits as float32."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def rounded(x: Any) -> Any:
    """float32 as bfloat16 bits, to nearest, ties to even; a NaN stays one."""
    bits = x.view(np.uint32)
    out = bits >> 16
    out &= 1
    out += bits
    out += 0x7FFF
    out >>= 16
    narrow = out.astype(np.uint16)
    np.putmask(narrow, np.isnan(x), _BFLOAT16_NAN)
    return narrow


def quantised(x: Any, dtype: str = "int8") -> tuple[Any, Any]:
    """Scaled values, and float32 scales without the last axis. x, float32 [..., D], is overwritten.

    A NaN or an infinity makes its row's scale NaN or infinite, as in the engine.
    """
    most = MOST[dtype]
    # Without the sign bit, floats have the order of integers, with NaN last. numpy finds the largest integer faster.
    largest = (x.view(np.int32) & 0x7FFFFFFF).max(-1).view(np.float32)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        scales = largest * (1 / most)
        inverse = np.where(largest > LEAST, most / largest, np.float32(0))
        x *= inverse[..., None]
        if not np.isfinite(scales).all():
            np.nan_to_num(x, copy=False, nan=0.0)
        if dtype != "int8":
            return fp8_bits(x), scales
        np.rint(x, out=x)
        return x.astype(np.int8), scales


def dequantised(values: Any, scales: Any, dtype: str = "int8") -> Any:
    x = values.astype(np.float32) if dtype == "int8" else FP8_VALUES[values]
    with np.errstate(invalid="ignore", over="ignore"):
        x *= scales[..., None]
    return x


def fp8_bits(x: Any) -> Any:
    """float32 within 448 and its rounding error as e4m3fn bits, to nearest, ties to even."""
    bits = x.view(np.uint32)
    sizes = bits & 0x7FFFFFFF
    # Normal: the exponent's bias becomes 7 and 3 bits of the fraction stay; a carry goes into the exponent.
    codes = (sizes + 0x7FFFF + ((sizes >> 20) & 1) >> 20) - (120 << 3)
    is_small = sizes < 0x3C800000  # 2^-6: steps of 2^-9 from here down
    np.copyto(codes, np.rint(np.abs(x) * np.float32(512)).astype(np.uint32), where=is_small)
    codes |= (bits >> 24) & 0x80
    return codes.astype(np.uint8)


def _fp8_values() -> Any:
    """Of all 256 codes."""
    codes = np.arange(256)
    exponent, fraction = (codes >> 3) & 15, codes & 7
    sizes = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0))
    sizes[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes < 128, sizes, -sizes).astype(np.float32)


FP8_VALUES: Final = _fp8_values()


def _unflatten(x: Any, inner: tuple[int, ...]) -> Any:
    """[N, prod(inner)], rows apart, as [N, *inner] without a copy."""
    item = x.itemsize
    strides = [item]
    for size in reversed(inner[1:]):
        strides.insert(0, strides[0] * size)
    return np.lib.stride_tricks.as_strided(x, (len(x), *inner), (x.strides[0], *strides))


# --- staging pool ---------------------------------------------------------------------------------------------
# Host memory for blocks between two formats. It is a pool like an engine's, so every transport can use it.


@final
class StagingPool:
    is_on_host = True
    runs_per_block = 1

    def __init__(self, form: BlockForm, num_blocks: int) -> None:
        self.num_blocks, self.block_bytes = num_blocks, form.block_bytes
        self._memory = HostMemory(num_blocks * form.block_bytes)  # keeps the descriptor
        self.buffer, self.descriptor = self._memory.buffer, self._memory.descriptor


# --- unpacker -------------------------------------------------------------------------------------------------
# Converts received blocks of another format: the transport writes a chunk into staging, and when its checksum matches,
# the chunk is converted into the granted blocks.


@dataclass(frozen=True, slots=True, eq=False)
class StagedClaim(Claim):
    """A claim on staging blocks, with the claim on the granted blocks."""

    granted: Claim


@final
class Unpacker:
    """The link that the transport uses. It converts one chunk at a time: a transport settles a chunk before it begins
    the next one."""

    def __init__(self, link: ReceiveLink, arrival: Arrival, target: BlockForm) -> None:
        self._link, self._window = link, arrival.into
        self.source, self.target = link.source, link.target
        self.block_bytes, self.chunk_bytes = arrival.form.block_bytes, link.chunk_bytes
        self.pool: KvPool = StagingPool(arrival.form, max(1, link.chunk_bytes // self.block_bytes))
        self.memory = self.pool.buffer
        self.channel: Channel = link.channel
        self.checksum: Checksum = link.checksum
        self._staged = BlockArrays(self.memory, arrival.form)
        self._pool = BlockArrays(link.memory, target, link.pool.runs_per_block)

    def staged(self, claim: Claim) -> StagedClaim:
        numbers = tuple(range(claim.count))
        return StagedClaim(claim.transfer, claim.first, claim.count, numbers, claim.part, claim.at, claim)

    def digest(self, views: Iterable[memoryview]) -> bytes:
        return self._link.digest(views)

    def views(self, claim: Claim) -> list[memoryview]:
        return self.source.views(self.memory, claim.blocks, claim.part)

    def size_of(self, frame: Frame) -> int:
        """Raises BadFrame on a chunk of some layers only, because the other layers would be converted from old staging
        contents."""
        if frame.part.groups != 1:
            raise BadFrame(f"layer group {frame.part.group} of {frame.part.groups} of blocks that are to be converted")
        return frame.count * self.source.bytes_of(frame.part)

    def enter(self, claim: Claim) -> bool:
        return self._link.enter(_granted(claim))

    def leave(self, claim: Claim) -> None:
        self._link.leave(_granted(claim))

    def settle(self, claim: Claim, frame: Frame, checksum: bytes) -> None:
        """Converts the staged chunk into the granted blocks if its checksum matches."""
        granted = _granted(claim)
        if hmac.compare_digest(checksum, frame.checksum):
            if not self._link.enter(granted):
                return
            try:
                unpack(self._staged, self._pool, granted.blocks, self._window)
            finally:
                self._link.leave(granted)
        self._link.settle(granted, frame, checksum)


def _granted(claim: Claim) -> Claim:
    assert isinstance(claim, StagedClaim), claim
    return claim.granted
