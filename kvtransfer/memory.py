"""Views into a pool's memory, as lists for sendmsg and recvmsg_into. Pure.

A view never extends beyond its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvtransfer.plan import byte_ranges
from pdserve.engine.interface import KvPool

MAX_VIEWS: Final = 64  # per system call; the kernel's limit is 1024


def flat(buffer: memoryview) -> memoryview:
    """The same memory as bytes in one dimension."""
    return buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")


def host_view(pool: KvPool) -> memoryview:
    """The pool's bytes; empty for a pool on a device, which only the device transports access."""
    return flat(pool.buffer) if pool.is_on_host else memoryview(b"")


def views_of(memory: memoryview, blocks: Sequence[int], block_bytes: int) -> list[memoryview]:
    """One view per run of consecutive blocks. Raises IndexError on a block outside the memory."""
    if blocks and not (min(blocks) >= 0 and (max(blocks) + 1) * block_bytes <= len(memory)):
        raise IndexError(f"blocks {min(blocks)}..{max(blocks)} of a pool of {len(memory) // block_bytes}")
    return [memory[begin:end] for begin, end in byte_ranges(blocks, block_bytes)]


def advance(views: list[memoryview], num_bytes: int) -> None:
    """Drops the first num_bytes of the views."""
    while num_bytes:
        size = len(views[0])
        if num_bytes < size:
            views[0] = views[0][num_bytes:]
            return
        num_bytes -= size
        del views[0]


def copy(destination: list[memoryview], source: list[memoryview]) -> None:
    """Copies between two lists of views that cover the same number of bytes."""
    to, out = list(destination), list(source)
    while out:
        size = min(len(out[0]), len(to[0]))
        to[0][:size] = out[0][:size]
        advance(out, size)
        advance(to, size)
